"""Medusa as FasterDecoding and vLLM keep it.

FasterDecoding has two forms: V1, where every head brings an output over the whole vocabulary, and V2, where one
residual block a head goes through the target's own output. vLLM wants outputs in the checkpoint, and takes one for all
heads. Its own draft vocabulary (``token_map`` and fewer rows) works for that one alone: heads with outputs of their own
must say every token, so that the others' rows are made such that they are never the guess; ``token_map`` stays in the
file, for us, and vLLM passes it over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import DraftHeads
from headstart.heads.config import HeadsConfig, target_facts
from headstart.heads.formats_eagle3 import whole_output
from headstart.heads.formats_table import Export, Row, audit, expand, named_as_ours, named_as_theirs
from headstart.heads.medusa import Medusa
from headstart.heads.tie import Tie, fingerprint
from headstart.heads.vocab import check_draft_ids

VLLM = (
    Row("blocks.{k}.layers.{l}.weight", ("h", "h"), "blocks.{k}.{l}.linear.weight"),
    Row("blocks.{k}.layers.{l}.bias", ("h",), "blocks.{k}.{l}.linear.bias", when="bias"),
    Row("lm_heads.{o}.weight", ("V", "h"), "outputs.{o}.weight"),
    Row("token_map", ("D",), "draft_ids", torch.int64, when="reduced"),
)
PREFIXES = ("medusa_heads.", "medusa_head.")
"""What may stand before the names."""


def faster_decoding(layers: int) -> tuple[Row, ...]:
    """V1 with ``layers`` residual blocks a head; V2 where the size o, outputs, is 0."""
    return (
        Row("{k}.{l}.linear.weight", ("h", "h"), "blocks.{k}.{l}.linear.weight"),
        Row("{k}.{l}.linear.bias", ("h",), "blocks.{k}.{l}.linear.bias"),
        Row(f"{{o}}.{layers}.weight", ("D", "h"), "outputs.{o}.weight"),
    )


def write(heads: DraftHeads, target: Any, base: str, to: str) -> Export:
    """Medusa for "vllm", or FasterDecoding's form ("medusa"). Raises ValueError naming what it has no place for."""
    config = heads.config
    assert isinstance(heads, Medusa)
    if config.features != [config.target_num_layers]:
        raise ValueError(
            f"heads.features={config.features} has no place in this layout: engines hand on the last hidden state; "
            f"train with heads.features=[{config.target_num_layers}]"
        )
    state = {name: tensor.detach().cpu() for name, tensor in heads.state_dict().items()}
    sizes = {"k": config.num_draft_heads, "l": config.num_draft_layers, "h": config.target_hidden_size, "bias": 1}
    return (_vllm if to == "vllm" else _faster)(heads, state, sizes, target, base)


def _vllm(heads: Medusa, state: dict[str, Tensor], sizes: dict[str, int], target: Any, base: str) -> Export:
    config = heads.config
    shared = heads.outputs is None
    if shared:
        state["outputs.0.weight"] = whole_output(target, "vLLM").to(state["blocks.0.0.linear.weight"].dtype)
    size, vocab_size, notes = config.draft_vocab_size or config.target_vocab_size, config.target_vocab_size, []
    reduced = int(size != vocab_size)
    sizes |= {"o": 1 if shared else sizes["k"], "D": size, "V": vocab_size, "reduced": reduced}
    if reduced:
        state |= {
            f"outputs.{k}.weight": _spread(state[f"outputs.{k}.weight"], state["draft_ids"], vocab_size)
            for k in range(sizes["o"])
        }
        notes.append(
            f"vLLM has no draft vocabulary for outputs of a head's own: they go as {vocab_size} rows, those outside "
            f"the {size} tokens of ours as the mean row, which is never the guess"
        )
    expected = expand(VLLM, sizes)
    described = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.target_vocab_size,
        "truncated_vocab_size": vocab_size,
        "num_heads": config.num_draft_heads,
        "num_hidden_layers": config.num_draft_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "base_model_name_or_path": base,
    }
    return Export(described, named_as_theirs(state, expected), expected, tuple(notes))


def _spread(rows: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """``rows`` [D, h] of the tokens ``ids`` as rows of the whole vocabulary [V, h]; the others get the mean of them,
    whose logit is the mean of theirs and so never the largest."""
    whole = rows.mean(0).expand(vocab_size, -1).clone()
    whole[ids] = rows
    return whole


def _faster(heads: Medusa, state: dict[str, Tensor], sizes: dict[str, int], target: Any, base: str) -> Export:
    config = heads.config
    if config.draft_vocab_size not in (None, config.target_vocab_size):
        raise ValueError(
            f"heads.draft_vocab_size={config.draft_vocab_size} has no place in FasterDecoding's Medusa, whose heads "
            "say every token: train with heads.draft_vocab_size=null, or export to vllm"
        )
    reduced_form = heads.outputs is None and config.num_draft_layers == 1
    if heads.outputs is None and not reduced_form:  # only V1 has several blocks
        rows = whole_output(target, "FasterDecoding's Medusa").to(state["blocks.0.0.linear.weight"].dtype)
        state |= {f"outputs.{k}.weight": rows for k in range(sizes["k"])}
    outputs = 0 if reduced_form else sizes["k"]
    expected = expand(faster_decoding(sizes["l"]), sizes | {"o": outputs, "D": config.target_vocab_size})
    described = {
        "medusa_num_heads": config.num_draft_heads,
        "medusa_num_layers": config.num_draft_layers,
        "base_model_name_or_path": base,
    } | ({"version": "2"} if reduced_form else {})
    notes = []
    if sizes["l"] > 1:
        notes.append(
            f"FasterDecoding's own code makes one module of the {sizes['l']} blocks of a head, so that the last one "
            "stands for all; other engines read them apart: for that code, train with heads.num_draft_layers=1"
        )
    return Export(described, named_as_theirs(state, expected), expected, tuple(notes))


def read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any, where: str, features: Sequence[int] | None
) -> tuple[Medusa, list[str]]:
    """Medusa heads for ``target`` from either form. Raises ValueError for what our heads cannot be, or what does not
    fit."""
    if features:
        raise ValueError(f"{where} is Medusa, which reads the last hidden state; --layer is for EAGLE-3")
    facts, notes = target_facts(target.config), []
    named = {_plain(name): tensor for name, tensor in tensors.items()}
    width, vocab_size = facts["target_hidden_size"], facts["target_vocab_size"]
    for key, has in (("hidden_size", width), ("vocab_size", vocab_size)):
        if config.get(key, has) != has:
            raise ValueError(f"{where} has {key}={config[key]}, the target {facts['target_name']} has {has}")
    sizes = {"h": width, "bias": 1}
    if "medusa_num_heads" in config:
        sizes |= {"k": _heads(named), "l": int(config.get("medusa_num_layers", 1)), "D": vocab_size}
        sizes["o"] = sizes["k"] if any(re.fullmatch(rf"\d+\.{sizes['l']}\.weight", name) for name in named) else 0
        if sizes["k"] != config["medusa_num_heads"]:
            notes.append(f"the config says {config['medusa_num_heads']} heads, the file holds {sizes['k']}: all taken")
        rows = faster_decoding(sizes["l"])
        if sizes["k"] < config["medusa_num_heads"]:
            sizes["k"] = int(config["medusa_num_heads"])
    else:
        sizes |= {"k": int(config["num_heads"]), "l": int(config["num_hidden_layers"])}
        sizes["bias"] = int(bool(config.get("medusa_fc_bias", False)))
        sizes["D"] = int(config.get("truncated_vocab_size") or vocab_size)
        if sizes["D"] == vocab_size and "token_map" in named:  # as we write it
            sizes["D"] = named["token_map"].numel()
        sizes["reduced"] = int(sizes["D"] != vocab_size)
        sizes["o"] = 1 if config.get("original_lm_head") else sizes["k"]
        output = named.get("lm_heads.0.weight")
        sizes["V"] = sizes["D"] if output is not None and len(output) == sizes["D"] else vocab_size
        rows = VLLM
    expected = expand(rows, sizes)
    audit(named, expected, where)
    state = named_as_ours(named, expected)
    if sizes.get("V", sizes["D"]) != sizes["D"]:
        check_draft_ids(state["draft_ids"], vocab_size)
        state |= {f"outputs.{k}.weight": state[f"outputs.{k}.weight"][state["draft_ids"]] for k in range(sizes["o"])}
    return _made(state, sizes, facts, target), notes


def _made(state: dict[str, Tensor], sizes: dict[str, int], facts: dict[str, Any], target: Any) -> Medusa:
    """Our heads of audited tensors, with one output a head where there is any."""
    if sizes["o"]:
        state |= {f"outputs.{k}.weight": state["outputs.0.weight"] for k in range(sizes["o"], sizes["k"])}
        state.setdefault("draft_ids", torch.arange(sizes["D"]))
    if not sizes["bias"]:
        zeros = torch.zeros(sizes["h"])
        state |= {f"blocks.{k}.{layer}.linear.bias": zeros for k in range(sizes["k"]) for layer in range(sizes["l"])}
    heads = Medusa(
        HeadsConfig(
            **facts,
            family="medusa",
            features=[facts["target_num_layers"]],
            num_draft_heads=sizes["k"],
            num_draft_layers=sizes["l"],
            draft_vocab_size=sizes["D"] if sizes["o"] else None,
            target_fingerprint=fingerprint(Tie.of(target)),
        )
    )
    heads.load_state_dict(state)
    return heads


def _heads(tensors: Mapping[str, Tensor]) -> int:
    """How many heads the names count; published configs say 2 where the file holds 5."""
    return len({name.split(".")[0] for name in tensors if name.split(".")[0].isdigit()})


def _plain(name: str) -> str:
    for start in PREFIXES:
        name = name.removeprefix(start)
    return name
