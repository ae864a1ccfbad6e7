"""EAGLE-3 of others as our heads: the formats of ``formats_eagle3`` read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from headstart.heads.config import HeadsConfig, target_facts
from headstart.heads.eagle3 import Eagle3, check_layers
from headstart.heads.formats_eagle3 import SPECULATORS, final_norm, table
from headstart.heads.formats_llama import layer_sizes, read_layer, same_embedding
from headstart.heads.formats_path import unfold_path
from headstart.heads.formats_table import audit, draft_ids_of, named_as_ours
from headstart.heads.tie import Tie, fingerprint

DEPTH = 7  # guesses of heads that do not say: the steps EAGLE-3 is trained for as published
IDS = "eagle_aux_hidden_state_layer_ids"
OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "model.": "",
}
"""Beginnings of names that mean the same."""


def read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any, where: str, features: Sequence[int] | None
) -> tuple[Eagle3, list[str]]:
    """EAGLE-3 heads for ``target`` from a folder's config and tensors; ``features`` say which hidden states they read
    where the config does not. Raises ValueError for what our heads cannot be, or what does not fit."""
    layer, flags = read_layer(described_layer(config, where), target.config, where), read_flags(config, where)
    facts = target_facts(target.config)
    named = same_embedding({_plain(name): tensor for name, tensor in tensors.items()}, target, where)
    sizes = told_sizes(config, named, layer, flags, facts["target_vocab_size"], where)
    expected = table("layers.0", sizes)
    audit(named, expected, where)
    n = facts["target_num_layers"]
    ids, notes = layer_ids(config, sizes["A"], n, where, features)
    state = named_as_ours(named, expected)
    if sizes["output"]:
        size = facts["target_vocab_size"]
        state["draft_ids"] = draft_ids_of(named, size, where) if sizes["d2t"] else torch.arange(size)
    if sizes["biases"]:
        found = unfold_path(state, layer)
        if found is None:
            raise ValueError(f"{where} has biases in its attention (attention_bias=true), which our EAGLE-3 lacks")
        state, layer = found
    if "lm_head.weight" in state:  # elsewhere the logits of a draft are not scaled as the target's are
        state["lm_head.weight"] = state["lm_head.weight"] / Tie.of(target).logit_scale
    residual_last = ids[-1] == n
    if residual_last:
        take_out_last(state, sizes["A"] - 1, target, layer["rms_norm_eps"], where)
    check_layers(ids[: len(ids) - residual_last], n)
    depth = proposed(config)
    heads = Eagle3(
        HeadsConfig(
            **facts,
            **flags,
            family="eagle3",
            features=ids,
            layer=layer,
            residual_last=residual_last,
            step_path="path.weight" in state,
            draft_vocab_size=sizes["D"] if sizes["output"] else None,
            num_draft_heads=depth,
            unroll=depth,
            target_fingerprint=fingerprint(Tie.of(target)),
        )
    )
    heads.load_state_dict(state)
    return heads, notes


def told_sizes(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layer: Mapping[str, Any],
    flags: Mapping[str, Any],
    vocab_size: int,
    where: str,
) -> dict[str, int]:
    """The sizes of ``formats_eagle3.table`` that config and fc tell. An output over the whole vocabulary needs no
    tables, and where it is missing the target's own stands for it."""
    size = config.get("draft_vocab_size") or vocab_size
    return layer_sizes(layer, vocab_size) | {
        "A": streams(tensors, layer["hidden_size"], where),
        "D": size,
        "fc_norm": int(flags["fc_norm"]),
        "biases": int(bool(described_layer(config, where).get("attention_bias"))),
        "output": int("lm_head.weight" in tensors or size != vocab_size),
        "d2t": int("d2t" in tensors or size != vocab_size),
        "t2d": int("t2d" in tensors),
    }


def described_layer(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The Llama config in a speculators config, or the flat config itself. Raises ValueError for a later release."""
    if "speculators_model_type" not in config:
        return config
    if config["speculators_model_type"] != "eagle3":
        raise ValueError(
            f"{where} is a speculator of the type {config['speculators_model_type']!r}; of that format, only 'eagle3' "
            "can be imported"
        )
    written, known = str(config.get("speculators_version", SPECULATORS)), Version(SPECULATORS)
    try:
        later = Version(written).release[:2] > known.release[:2]
    except InvalidVersion:
        later = True
    if later:
        raise ValueError(
            f"{where} was written by speculators {written}, this release reads up to {SPECULATORS}: upgrade with "
            "`pip install -U headstart-llm`"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"the config of {where} has transformer_layer_config={layer!r}, expected an object")
    return layer


def read_flags(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Our options of EAGLE-3 from both places where configs hold them, the nested one first."""
    nested = config.get("eagle_config") or {}
    found: dict[str, Any] = {}
    for name in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"):
        found[name] = bool(nested.get(name, config.get(name, False)))
    if found.pop("norm_before_fc"):
        raise ValueError(f"{where} has norm_before_fc=true, one norm over all streams, which our EAGLE-3 lacks")
    if "speculators_model_type" in config and config.get("norm_before_residual") is None:
        raise ValueError(
            f"the config of {where} does not say norm_before_residual, which speculators takes for false and vLLM for "
            "true: write in what the heads were trained with"
        )
    return found


def layer_ids(
    config: Mapping[str, Any], count: int, n: int, where: str, features: Sequence[int] | None
) -> tuple[list[int], list[str]]:
    """hidden_states indices of the streams, and notes. Raises ValueError where the config says none, or two."""
    nested = config.get("eagle_config") or {}
    told = {"config": config[IDS]} if IDS in config else {}
    if IDS in nested:
        told["eagle_config"] = [i + 1 for i in nested[IDS]] if _ids(nested[IDS]) else nested[IDS]
    notes = []
    if features:
        ids = list(features)
    elif not told:
        ids = [2, n // 2, n - 3]
        notes.append(
            f"the config names no layers: the published ones are taken, hidden_states {ids}; else give --layer"
        )
    elif strange := [ids for ids in told.values() if not _ids(ids)]:
        raise ValueError(
            f"the config of {where} has {IDS}={json.dumps(strange[0])}: which layers the heads read cannot be told; "
            f"give them as --layer, hidden_states indices (the published ones are {[2, n // 2, n - 3]} for {n} layers)"
        )
    elif len({tuple(ids) for ids in told.values()}) > 1:
        raise ValueError(
            f"the config of {where} contradicts itself: {IDS} is {config[IDS]} at the top (what enters a layer) and "
            f"{nested[IDS]} in eagle_config (layer outputs, one less); give the right ones as --layer"
        )
    else:
        ids = list(next(iter(told.values())))
    if len(ids) != count:
        raise ValueError(f"{where} names {len(ids)} layers {ids}, and its fc reads {count}")
    if ids != sorted(ids):
        raise ValueError(f"{where} names its layers as {ids}: engines capture in ascending order, so must they be")
    return ids, notes


def _ids(value: Any) -> bool:
    """Whether this is a list of layer ids."""
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def streams(tensors: Mapping[str, Tensor], width: int, where: str) -> int:
    """How many feature streams fc reads."""
    fc = tensors.get("fc.weight")
    if fc is None or fc.dim() != 2 or fc.shape[1] % width or not fc.shape[1]:
        found = "no fc.weight" if fc is None else f"fc.weight {tuple(fc.shape)}"
        raise ValueError(f"{where} has {found}; EAGLE-3 has one of [{width}, streams * {width}]")
    return fc.shape[1] // width


def take_out_last(state: dict[str, Tensor], last: int, target: Any, eps: float, where: str) -> None:
    """The stream of layer id n out of fc and the norms. Raises ValueError unless it is added as the target's last
    hidden state and nothing else, as our ``residual_last`` is written."""
    width = state["fc.weight"].shape[0]
    fc, block = state["fc.weight"][:, :-width], state["fc.weight"][:, -width:]
    gains = state.pop(f"fc_norm.{last}.weight", None)
    eye = torch.eye(width, dtype=block.dtype)
    if gains is None or not last or not torch.equal(block, eye):
        raise ValueError(
            f"{where} reads layer id n, what leaves the last layer before the final norm, which is no hidden state of "
            "transformers: heads on it can be imported only where it is handed on whole after the target's own norm"
        )
    if not torch.allclose(gains.float(), final_norm(target, eps), rtol=1e-2, atol=1e-3):
        raise ValueError(f"the norm on the last stream of {where} is not the final norm of this target: another target")
    state["fc.weight"] = fc


def proposed(config: Mapping[str, Any]) -> int:
    """The depth that a speculators config proposes."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or DEPTH)


def _plain(name: str) -> str:
    for start, plain in OTHER_NAMES.items():
        if name.startswith(start):
            return _plain(plain + name[len(start) :])
    return name
