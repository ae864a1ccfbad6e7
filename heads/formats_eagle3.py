"""EAGLE-3 as vLLM (speculators format), SGLang and SafeAILab's own code keep it.

Layer ids. We number as transformers does: i = what enters layer i, and the last one, n, after the final norm. vLLM and
speculators number the same way, but their n is what *leaves* the last layer, before the final norm; SGLang counts layer
outputs from 0, one less. Engines capture in ascending order whatever the list says, so streams are sorted.

``residual_last`` goes into fc as a stream of its own with the identity for its columns. Where every stream has a norm
(``fc_norm``), that stream is layer id n and its norm is the target's final one: exactly the last hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads.base import DraftHeads
from headstart.heads.config import HeadsConfig
from headstart.heads.eagle3 import Eagle3
from headstart.heads.formats_llama import (
    architectures,
    cap_notes,
    embedding_scale,
    layer_refusals,
    layer_rows,
    layer_sizes,
    llama_config,
    logit_scale,
)
from headstart.heads.formats_path import fold_path
from headstart.heads.formats_table import Export, Row, expand, named_as_theirs, vocabulary_tables
from headstart.heads.tie import Tie

SPECULATORS = "0.9.0"  # the release whose format is written; later ones are not read


class Engine(NamedTuple):
    """What an engine's EAGLE-3 can be, as a row."""

    name: str
    architecture: str
    layer: str  # what the one layer is called
    shift: int  # hidden_states index - the engine's layer id
    options: frozenset[str] = frozenset()  # of ours, beside those of the paper
    published_layers: bool = False  # no choice of layers
    silu: bool = True  # no other activation


ENGINES = {
    "vllm": Engine(
        "vLLM",
        "Eagle3Speculator",
        "layers.0",
        0,
        frozenset({"fc_norm", "norm_output", "norm_before_residual", "residual_last", "step_path", "embedding", "one"}),
    ),
    "sglang": Engine("SGLang", "LlamaForCausalLMEagle3", "midlayer", 1, frozenset({"fc_norm", "norm_output"})),
    "eagle": Engine("SafeAILab's EAGLE", "LlamaForCausalLM", "midlayer", 1, published_layers=True, silu=False),
}
BIASES = tuple(
    Row(f"{{layer}}.self_attn.{name}.bias", (size,), f"layer.{name}.bias", when="biases")
    for name, size in (("q_proj", "q"), ("k_proj", "kv"), ("v_proj", "kv"), ("o_proj", "h"))
)


def rows(layer: str) -> tuple[Row, ...]:
    """The tensors of EAGLE-3 with its layer called ``layer``; sizes: A streams, D draft vocabulary, V target's."""
    return (
        Row("fc.weight", ("h", "A*h"), "fc.weight"),
        Row("fc_norm.{A}.weight", ("h",), "fc_norm.{A}.weight", when="fc_norm"),
        Row(f"{layer}.hidden_norm.weight", ("h",), "hidden_norm.weight"),
        Row(f"{layer}.input_layernorm.weight", ("h",), "input_layernorm.weight"),
        *layer_rows(layer, "2h"),
        *(row._replace(name=row.name.replace("{layer}", layer)) for row in BIASES),
        Row("norm.weight", ("h",), "norm.weight"),
        Row("lm_head.weight", ("D", "h"), "lm_head.weight", when="output"),
        Row("d2t", ("D",), None, torch.int64, when="d2t"),
        Row("t2d", ("V",), None, torch.bool, when="t2d"),
    )


def table(layer: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """``rows`` for heads of these sizes."""
    return expand(rows(layer), {**sizes, "A*h": sizes["A"] * sizes["h"]})


# out ----------------------------------------------------------------------------------------------------------------


def write(heads: DraftHeads, target: Any, base: str, to: str) -> Export:
    """EAGLE-3 for an engine of ENGINES. Raises ValueError naming every option that its layout has no place for."""
    engine, config = ENGINES[to], heads.config
    assert isinstance(heads, Eagle3) and config.layer is not None and config.features is not None
    wrong = refusals(heads, engine)
    if wrong:
        raise ValueError(f"{engine.name} cannot load these heads:\n  " + "\n  ".join(wrong))
    notes, layer, scale = cap_notes(target), config.layer, logit_scale(config, target)
    state = {name: tensor.detach().cpu() for name, tensor in heads.state_dict().items() if name != "draft_ids"}
    path = state.pop("path.weight", None)
    if path is not None and path.any():
        state, layer = fold_path(path, state, layer)
        more = layer["num_attention_heads"] - config.layer["num_attention_heads"]
        notes.append(f"the step path goes as {more} more attention heads with biases; an older vLLM refuses the biases")
    ids = sort_streams(state, config, target)
    if config.residual_last:
        notes.append(f"the last hidden state goes as layer id {ids[-1]}; an older vLLM that cannot capture it stops")
    if embedding_scale(config, target, "which the norm on it only takes out but for its epsilon") != 1.0:
        notes.append("the target scales its embedding and engines do not: a norm follows, so only its epsilon differs")
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = whole_output(target, engine.name).to(state["norm.weight"].dtype)
    state["lm_head.weight"] = state["lm_head.weight"] * scale
    size = config.draft_vocab_size or config.target_vocab_size
    reduced = int(size != config.target_vocab_size)
    sizes = layer_sizes(layer, config.target_vocab_size) | {
        "A": len(ids),
        "D": size,
        "fc_norm": int(config.fc_norm),
        "biases": int("layer.q_proj.bias" in state),
        "output": 1,
        "d2t": reduced,
        "t2d": reduced,
    }
    expected = table(engine.layer, sizes)
    tensors = named_as_theirs(state, expected)
    if reduced:
        assert heads.draft_ids is not None
        tensors |= vocabulary_tables(heads.draft_ids, config.target_vocab_size)
    described = llama_config(layer, config.target_vocab_size) | {"attention_bias": bool(sizes["biases"])}
    shape = _speculators if to == "vllm" else _flat
    return Export(shape(config, engine, described, ids, size, base), tensors, expected, tuple(notes))


def refusals(heads: Eagle3, engine: Engine) -> list[str]:
    """What of these heads has no place in an engine's layout, each with what to train with instead."""
    config, wrong = heads.config, []
    assert config.layer is not None and config.features is not None
    path = heads.path is not None and bool(heads.path.weight.any())
    asked = {"step_path": path} | {
        name: getattr(config, name) for name in ("fc_norm", "norm_output", "norm_before_residual", "residual_last")
    }
    for name in sorted(name for name, is_on in asked.items() if is_on and name not in engine.options):
        wrong.append(f"heads.{name}=true has no place in its layout: train with heads.{name}=false")
    if config.residual_last and "residual_last" in engine.options and not config.fc_norm:
        wrong.append(
            "heads.residual_last=true beside heads.fc_norm=false: the last hidden state is captured before the "
            "target's final norm, and a norm on it needs one on all: train with heads.fc_norm=true"
        )
    streams, n = config.features[: heads.streams], config.target_num_layers
    if engine.published_layers and streams != [2, n // 2, n - 3]:
        wrong.append(f"heads.features={streams}: its code captures {[2, n // 2, n - 3]} and nothing else")
    if "embedding" not in engine.options and 0 in streams:
        wrong.append("heads.features names 0, the embedding, which has no layer id there")
    if "one" not in engine.options and len(streams) == 1:
        wrong.append("heads.features names one layer: its code then leaves out fc; train on two or more")
    return wrong + layer_refusals(config.layer, engine.name, engine.silu)


def sort_streams(state: dict[str, Tensor], config: HeadsConfig, target: Any) -> list[int]:
    """Puts the streams in ``state`` in ascending order, the last hidden state among them; returns their indices."""
    assert config.features is not None and config.layer is not None
    width = config.target_hidden_size
    streams = config.features[: len(config.features) - config.residual_last]
    order = sorted(range(len(streams)), key=streams.__getitem__)
    blocks = torch.split(state["fc.weight"], width, 1)
    norms = [state.pop(f"fc_norm.{i}.weight") for i in range(len(streams))] if config.fc_norm else []
    sorted_blocks, sorted_norms = [blocks[i] for i in order], [norms[i] for i in order if norms]
    ids = [streams[i] for i in order]
    if config.residual_last:
        ids.append(config.target_num_layers)
        sorted_blocks.append(torch.eye(width, dtype=blocks[0].dtype))
        sorted_norms.append(final_norm(target, config.layer["rms_norm_eps"]).to(blocks[0].dtype))
    state["fc.weight"] = torch.cat(sorted_blocks, 1)
    state.update({f"fc_norm.{i}.weight": norm for i, norm in enumerate(sorted_norms)})
    return ids


@torch.no_grad()
def final_norm(target: Any, eps: float) -> Tensor:
    """The gains [H] float32 of the target's final norm. Raises ValueError unless it is an RMS norm of this ``eps``."""
    why = "heads.residual_last=true goes into this layout through the target's final norm"
    if target is None:
        raise ValueError(f"{why}: give --target")
    norm = getattr(target.get_decoder(), "norm", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        raise ValueError(
            f"{why}, and {type(target).__name__} has none to be found: train with heads.residual_last=false"
        )
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[eps**0.5], [1.0], [100.0]])  # the first one shows the epsilon
    x = torch.randn(3, weight.shape[0], generator=generator) * sizes
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    given = norm(x.to(weight.device)).float().cpu()
    plain: Tensor = weight.detach().float().cpu()
    for gains in (plain, 1.0 + plain):
        if torch.allclose(given, normed * gains, rtol=1e-4, atol=1e-5):
            return gains
    raise ValueError(
        f"{why}, and {type(norm).__name__} of {type(target).__name__} is no RMS norm with the epsilon {eps} of the "
        "draft layer: train with heads.residual_last=false"
    )


def whole_output(target: Any, engine: str) -> Tensor:
    """The target's output rows [V, H], for heads that speak through it. Raises ValueError where rows are not all."""
    why = f"these heads speak through the target's own output, and {engine} wants its rows in the checkpoint"
    if target is None:
        raise ValueError(f"{why}: give --target")
    tie = Tie.of(target)
    if getattr(tie.output, "bias", None) is not None:
        raise ValueError(f"{why}, where there is no place for its bias: train with heads.draft_vocab_size=N")
    return tie.weight.detach().cpu()


def _speculators(
    config: HeadsConfig, engine: Engine, layer: dict[str, Any], ids: Sequence[int], size: int, base: str
) -> dict[str, Any]:
    """config.json of the speculators format."""
    return {
        "architectures": [engine.architecture],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_draft_heads,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": base or None, "architectures": architectures(config)},
        },
        "transformer_layer_config": layer | {"num_aux_hidden_states": len(ids)},  # vLLM takes 3 where nothing says so
        "draft_vocab_size": size,
        "target_hidden_size": None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def _flat(
    config: HeadsConfig, engine: Engine, layer: dict[str, Any], ids: Sequence[int], size: int, base: str
) -> dict[str, Any]:
    """config.json of SGLang and SafeAILab; vLLM reads it too, from the top level with its own numbering of layers."""
    flags = {"norm_before_residual": config.norm_before_residual, "norm_before_fc": False}
    flags |= {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    return {
        "architectures": [engine.architecture],
        **layer,
        "bias": False,
        "draft_vocab_size": size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(ids),
        **flags,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - engine.shift for i in ids],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            **flags,
        },
        "base_model_name_or_path": base,
    }
