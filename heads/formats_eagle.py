"""EAGLE-1 and EAGLE-2 as SafeAILab, SGLang and vLLM keep them: one layer, fc over embedding and feature, the target's
own embedding and output. They differ in whether fc has a bias.

The embedding that drafts elsewhere read is the target's matrix without the number that some targets multiply it by: the
number goes into the columns of fc that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import DraftHeads
from headstart.heads.config import HeadsConfig, target_facts
from headstart.heads.eagle import Eagle
from headstart.heads.formats_llama import (
    cap_notes,
    embedding_scale,
    layer_refusals,
    layer_rows,
    layer_sizes,
    llama_config,
    logit_scale,
    read_layer,
    same_embedding,
)
from headstart.heads.formats_table import Export, Row, audit, expand, named_as_ours, named_as_theirs
from headstart.heads.tie import Tie, fingerprint

DEPTH = 5  # guesses of heads from elsewhere: as published
ROWS = (
    Row("fc.weight", ("h", "2h"), "fc.weight"),  # columns: embedding, then feature
    Row("fc.bias", ("h",), "fc.bias", when="bias"),
    *layer_rows("layers.0", "h"),
)
ENGINES = {  # its name, its architecture, whether its fc has a bias (None: as the config says), no activation but silu
    "vllm": ("vLLM", "EagleLlamaForCausalLM", False, True),
    "sglang": ("SGLang", "LlamaForCausalLMEagle", True, True),
    "eagle": ("SafeAILab's EAGLE", "LlamaForCausalLM", None, False),
}


def write(heads: DraftHeads, target: Any, base: str, to: str) -> Export:
    """EAGLE-1 for an engine of ENGINES. Raises ValueError naming what its layout has no place for."""
    engine, architecture, biased, only_silu = ENGINES[to]
    config = heads.config
    assert isinstance(heads, Eagle) and config.layer is not None
    wrong = layer_refusals(config.layer, engine, only_silu)
    if config.features != [config.target_num_layers]:
        wrong.append(f"features={config.features}: it hands on the last hidden state only")
    if config.fc_bias and biased is False:
        wrong.append("fc has a bias, and its fc has none")
    if wrong:
        raise ValueError(f"{engine} cannot load these heads:\n  " + "\n  ".join(wrong))
    state = {name: tensor.detach().cpu() for name, tensor in heads.state_dict().items() if name != "draft_ids"}
    width = config.target_hidden_size
    if biased and not config.fc_bias:
        state["fc.bias"] = torch.zeros(width, dtype=state["fc.weight"].dtype)
    state["fc.weight"] = _scaled(state["fc.weight"], embedding_scale(config, target, "which must go into fc"))
    bias = config.fc_bias if biased is None else biased
    expected = expand(ROWS, layer_sizes(config.layer, config.target_vocab_size) | {"bias": int(bias)})
    described = {
        "architectures": [architecture],
        **llama_config(config.layer, config.target_vocab_size),
        "bias": bias,
        "base_model_name_or_path": base,
    }
    notes = cap_notes(target)
    if (scale := logit_scale(config, target)) != 1.0:
        notes.append(
            f"the target multiplies its logits by {scale:g}, and engines read a draft through the same output without "
            "that: same guesses, other probabilities"
        )
    if config.draft_vocab_size is not None:
        notes.append(
            f"the draft vocabulary of {config.draft_vocab_size} tokens stays behind: the engine reads the whole output "
            "of the target, so heads that were trained on a part of it guess the rest untaught"
        )
    return Export(described, named_as_theirs(state, expected), expected, tuple(notes))


def read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any, where: str, features: Sequence[int] | None
) -> tuple[Eagle, list[str]]:
    """EAGLE-1 heads for ``target``. Raises ValueError for what our heads cannot be, or what does not fit."""
    layer, facts = read_layer(config, target.config, where), target_facts(target.config)
    if features:
        raise ValueError(f"{where} is EAGLE-1, which reads the last hidden state; --layer is for EAGLE-3")
    named = same_embedding(dict(tensors), target, where)
    bias = "fc.bias" in named or config.get("bias") is True
    expected = expand(ROWS, layer_sizes(layer, facts["target_vocab_size"]) | {"bias": int(bias)})
    audit(named, expected, where)
    state = named_as_ours(named, expected)
    if "fc.bias" in state and not state["fc.bias"].any():
        state.pop("fc.bias")  # SGLang's engine has one whether it was trained or not
    scale = embedding_scale(HeadsConfig(**facts), target, "which is in fc")
    state["fc.weight"] = _scaled(state["fc.weight"], 1.0 / scale)
    heads = Eagle(
        HeadsConfig(
            **facts,
            family="eagle",
            features=[facts["target_num_layers"]],
            layer=layer,
            fc_bias="fc.bias" in state,
            num_draft_heads=DEPTH,
            target_fingerprint=fingerprint(Tie.of(target)),
        )
    )
    heads.load_state_dict(state)
    return heads, []


def _scaled(fc: Tensor, scale: float) -> Tensor:
    """fc [H, 2 H] with the columns of the embedding times ``scale``."""
    if scale == 1.0:
        return fc
    width = fc.shape[0]
    return torch.cat([fc[:, :width] * scale, fc[:, width:]], 1)
