"""The EAGLE layer as other projects describe it: a Llama config, written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headstart.heads.config import HeadsConfig, layer_facts
from headstart.heads.formats_table import Row
from headstart.heads.tie import Tie

SERVED_ACTIVATION = "silu"
"""The one activation that vLLM and SGLang have for a Llama layer."""
SCALED_EMBEDDINGS = ("gemma", "granite", "minicpm")
"""How the types of models begin that multiply their embedding by a number, which draft models elsewhere do not."""
SCALED_LOGITS = ("cohere", "granite")
"""The same of the logits."""


def layer_rows(prefix: str, reads: str) -> tuple[Row, ...]:
    """The tensors of our DecoderLayer under ``prefix``; ``reads`` is the size of what its attention reads."""
    return (
        Row(f"{prefix}.self_attn.q_proj.weight", ("q", reads), "layer.q_proj.weight"),
        Row(f"{prefix}.self_attn.k_proj.weight", ("kv", reads), "layer.k_proj.weight"),
        Row(f"{prefix}.self_attn.v_proj.weight", ("kv", reads), "layer.v_proj.weight"),
        Row(f"{prefix}.self_attn.o_proj.weight", ("h", "q"), "layer.o_proj.weight"),
        Row(f"{prefix}.post_attention_layernorm.weight", ("h",), "layer.post_attention_layernorm.weight"),
        Row(f"{prefix}.mlp.gate_proj.weight", ("i", "h"), "layer.mlp.gate_proj.weight"),
        Row(f"{prefix}.mlp.up_proj.weight", ("i", "h"), "layer.mlp.up_proj.weight"),
        Row(f"{prefix}.mlp.down_proj.weight", ("h", "i"), "layer.mlp.down_proj.weight"),
    )


def layer_sizes(layer: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """The sizes that ``layer_rows`` names, of facts as in ``layer_facts``."""
    width, channels = layer["hidden_size"], layer["head_dim"]
    return {
        "h": width,
        "2h": 2 * width,
        "q": layer["num_attention_heads"] * channels,
        "kv": layer["num_key_value_heads"] * channels,
        "i": layer["intermediate_size"],
        "V": vocab_size,
    }


def llama_config(layer: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """``layer_facts`` as a Llama config with one layer, rotary settings as transformers 5 and as those before it."""
    rope = dict(layer["rope_parameters"])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "num_hidden_layers": 1,
        **{key: layer[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")},
        **{key: layer[key] for key in ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps")},
        "max_position_embeddings": layer["max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def read_layer(config: Mapping[str, Any], target_config: PreTrainedConfig, where: str) -> dict[str, Any]:
    """Facts as of ``layer_facts`` from a draft's Llama config. Raises ValueError naming what our layer cannot be."""
    lacks = [key for key in ("hidden_size", "num_attention_heads", "intermediate_size") if not config.get(key)]
    if lacks:
        raise ValueError(f"the config of {where} lacks {lacks}: the layer's shape cannot be told")
    wrong = [
        f"{key}={config[key]!r} (expected {wanted!r})"
        for key, wanted in (("model_type", "llama"), ("num_hidden_layers", 1), ("mlp_bias", False))
        if config.get(key, wanted) != wanted
    ]
    text = target_config.get_text_config(decoder=True)
    for key, has in (("hidden_size", text.hidden_size), ("vocab_size", text.vocab_size)):
        if config.get(key, has) != has:
            wrong.append(f"{key}={config[key]} (the target {target_config.name_or_path} has {has})")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for part in (config.get("partial_rotary_factor"), rope.pop("partial_rotary_factor", None)):
        if part not in (None, 1.0):
            wrong.append(f"partial_rotary_factor={part} (expected 1.0: our layer turns whole heads)")
    if config.get("target_hidden_size") not in (None, text.hidden_size):
        wrong.append(f"target_hidden_size={config['target_hidden_size']} (the target has {text.hidden_size})")
    if wrong:
        raise ValueError(f"the draft layer of {where} cannot be taken over for this target: {'; '.join(wrong)}")
    old_name = rope.pop("type", None)
    kind = rope.get("rope_type") or old_name or "default"
    heads = config["num_attention_heads"]
    return layer_facts(
        target_config,
        {
            "hidden_size": config["hidden_size"],
            "num_attention_heads": heads,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "intermediate_size": config["intermediate_size"],
            "hidden_act": config.get("hidden_act") or SERVED_ACTIVATION,
            "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
            "max_position_embeddings": config.get("max_position_embeddings") or 2048,
            "rope_parameters": {"rope_theta": config.get("rope_theta") or 10000.0} | rope | {"rope_type": kind},
        },
    )


def layer_refusals(layer: Mapping[str, Any], engine: str, only_silu: bool) -> list[str]:
    """What of our layer an engine's Llama layer cannot be."""
    wrong = []
    if only_silu and layer["hidden_act"] != SERVED_ACTIVATION:
        wrong.append(
            f"heads.layer.hidden_act={layer['hidden_act']}: {engine} has a Llama layer with {SERVED_ACTIVATION} only; "
            f"train with heads.layer.hidden_act={SERVED_ACTIVATION}"
        )
    if layer["rope_parameters"]["rope_type"] == "proportional":
        wrong.append(
            f"rotary scaling 'proportional': no Llama layer of {engine} has it; train with heads.layer.rope_parameters "
            "of another kind"
        )
    return wrong


def embedding_scale(config: HeadsConfig, target: Any, why: str) -> float:
    """What the target multiplies its embedding rows by, in its module or after it. Raises ValueError where the target
    is needed to tell."""
    if target is None:
        if config.target_model_type.startswith(SCALED_EMBEDDINGS):
            raise ValueError(f"{config.target_model_type} targets scale their embedding, {why}: give --target")
        return 1.0
    tie = Tie.of(target)
    scale = float(getattr(tie.embedding, "embed_scale", 1.0)) * tie.embedding_scale
    weight: Any = tie.embedding.weight
    rows = weight.detach()[: min(64, weight.shape[0])]
    given = tie.embed(torch.arange(rows.shape[0], device=rows.device)).detach()
    if not torch.allclose(given.float(), rows.float() * scale, rtol=2e-2, atol=1e-6):
        raise ValueError(f"{type(tie.embedding).__name__} of the target does more than scale its rows, {why}")
    return scale


def logit_scale(config: HeadsConfig, target: Any) -> float:
    """What the target multiplies its logits by, which engines do not do to a draft's. Raises ValueError where the
    target is needed to tell."""
    if target is None:
        if config.target_model_type.startswith(SCALED_LOGITS):
            raise ValueError(f"{config.target_model_type} targets scale their logits, and so do drafts: give --target")
        return 1.0
    return Tie.of(target).logit_scale


def cap_notes(target: Any) -> list[str]:
    """What to know of a target that caps its logits."""
    cap = None if target is None else Tie.of(target).softcap
    if cap is None:
        return []
    return [f"the target caps its logits at {cap:g} and engines cap no draft's: same guesses, other probabilities"]


def same_embedding(tensors: dict[str, Tensor], target: Any, where: str) -> dict[str, Tensor]:
    """Takes ``embed_tokens.weight`` out where it is the target's own. Raises ValueError where it is another one."""
    own = tensors.get("embed_tokens.weight")
    if own is None:
        return tensors
    theirs: Any = Tie.of(target).embedding.weight
    theirs = theirs.detach().cpu().float()
    if own.shape != theirs.shape or not torch.allclose(own.float(), theirs, rtol=1e-2, atol=1e-3):
        raise ValueError(
            f"embed_tokens.weight {tuple(own.shape)} of {where} is not the embedding {tuple(theirs.shape)} of the "
            f"target {target.config.name_or_path}: another target, or a draft with an embedding of its own, which our "
            "heads do not have"
        )
    return {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}


def architectures(config: HeadsConfig) -> list[str]:
    """The target's class as transformers names it, for engines that look for it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.target_model_type)
    return [] if name is None else [name]
