"""What a target and a call must be like: refused by name before the first token, with what to do instead.

Legend: B rows, P padded prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache, get_layer_types_and_kwargs
from transformers.generation.configuration_utils import GenerationMode

from headstart.infer.grouped import attention_of
from headstart.infer.target import attention_windows

HARMLESS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "tokenizer"}
TREE_ATTENTION = ("sdpa", "eager")
_SAME_ATTENTION = ("flash", "flex", "paged")  # the same function in kernels that take no tree: sdpa stands in for them
_ALIBI = "its attention biases count slots, not positions"
_BY_SLOTS = {"gpt_neo": "its local attention counts slots, not positions", "mpt": _ALIBI, "bloom": _ALIBI}


def bare(model: Any) -> Any:
    """The model that ``generate`` hands to its callable: the causal LM inside a PEFT or compile wrapper, or ``model``.

    Raises ValueError for adapters that work through the prompt, which such a call would lose in silence.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper hands on ``generate`` of what is inside
    if not callable(getattr(model, "get_base_model", None)):
        return model
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning:
            raise ValueError(_prompt_tuned(f"the adapter {name!r} is {kind}"))
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"the adapter {name!r} ({kind}) begins at its invocation tokens, which a tree of guesses cannot "
                "follow; an adapter that covers the whole text, or plain generate, is needed"
            )
    return model.get_base_model()


def check_bound(model: Any, target: Any) -> None:
    """Raises ValueError where ``generate`` runs another ``model`` than the checked ``target``, or one changed since."""
    prepare = vars(model).get("prepare_inputs_for_generation")  # set by PEFT for the length of a call
    if getattr(prepare, "__self__", model) is not model:
        raise ValueError(_prompt_tuned(f"this call comes from a {type(prepare.__self__).__name__}"))
    if model is not bare(target):
        raise ValueError("this Speculator was made for another model object: make one for the model that decodes")
    found = attention_of(model)
    if found not in TREE_ATTENTION:
        raise ValueError(
            f"the target's attention was set to {found!r} after this Speculator was made, and that takes no tree of "
            "guesses; set it back with model.set_attn_implementation('sdpa'), or make a new Speculator"
        )


def check_target(model: Any) -> list[str]:
    """Raises ValueError, naming the reason, for a model whose trees could be silently wrong.

    Returns what a user should know: attention that cannot take a tree is switched, on the model, to one that can.
    """
    name = type(model).__name__
    if not hasattr(model, "config"):
        raise ValueError(f"{name} is no transformers model; pass the causal LM itself (inside a wrapper: .module)")
    text = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; trees need a decoder-only causal LM")
    shards = _sharding(model)
    if shards:
        raise ValueError(
            f"{name} is {shards}: verifying needs whole weights in every process; load it with device_map or quantised "
            "to fit one process, or decode where it is not sharded"
        )
    attention_windows(text)
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} ({text.model_type}) keeps a recurrent state that a rejected guess cannot be taken out of; "
            "a target with attention in every layer is needed"
        )
    why = _BY_SLOTS.get(text.model_type, _ALIBI if getattr(text, "alibi", False) else None)
    if why:
        raise ValueError(f"{name} cannot take a tree: {why}; a target with rotary positions is needed")
    _check_windows(text)
    return _settle_attention(model, text)


def check_length(model: Any, total: int, nodes: int) -> None:
    """Raises ValueError where ``total`` tokens, prompt included, or ``nodes`` more slots pass what a tree is exact in.

    Rotary types "dynamic" and "longrope" choose frequencies by the longest position of a whole forward, so a tree that
    reaches past the limit would turn the tokens before it, and a long prompt would depend on how it is cut into
    forwards. A few families count slots from some length on, where siblings take one each.
    """
    for limit, slots, why in _length_limits(model.config.get_text_config(decoder=True)):
        if total + (nodes if slots else 0) > limit:
            raise ValueError(
                f"{type(model).__name__} {why} at {limit} tokens and is exact up to there; prompt and new tokens may "
                f"be {total} here" + (f", with {nodes} nodes of a tree" if slots else "") + ": ask for fewer tokens "
                "(max_new_tokens), or decode this text without speculation"
            )


def check_call(config: GenerationConfig, ids: Tensor, model_kwargs: dict[str, Any]) -> Cache | None:
    """Raises ValueError for options that are not decoded exactly yet, before the first forward.

    Returns the cache that was passed, where it already holds tokens of the prompt ``ids`` [B, P].
    """
    refused = []
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        refused.append(f"generation mode {config.get_generation_mode().value!r} (greedy and sampling work)")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            refused.append(f"{name}=True (leave it out)")
    rows = ids.shape[0]
    if config.return_dict_in_generate and rows > 1:
        refused += [f"{n} for {rows} rows (one row)" for n in ("output_scores", "output_logits") if getattr(config, n)]
    if config.cache_implementation not in (None, "dynamic"):
        refused.append(f"cache_implementation={config.cache_implementation!r} (leave it out)")
    if model_kwargs.get("use_cache") is False:
        refused.append("use_cache=False (a verified tree needs the cache)")
    cache = model_kwargs.get("cache") if model_kwargs.get("cache") is not None else model_kwargs.get("past_key_values")
    held = 0 if cache is None else int(cache.get_seq_length())
    if cache is not None and not held and getattr(cache, "_is_user_defined", False):
        refused.append("an empty cache to be filled (use return_dict_in_generate=True, which returns one)")
    if held and (ids.shape[0] > 1 or held >= ids.shape[1] or model_kwargs.get("attention_mask") is not None):
        refused.append(
            f"a cache of {held} tokens with a prompt of {tuple(ids.shape)} (one row without padding, the whole text "
            "including what the cache holds, at least one token more)"
        )
    for name, value in model_kwargs.items():
        nothing = value is None or (isinstance(value, dict) and not value)  # of images, in a text to a model that sees
        if name not in HARMLESS and not nothing:
            refused.append(f"{name} (not understood by trees)")
    if refused:
        raise ValueError("not available with speculative decoding: " + "; ".join(refused))
    return cache if held else None


def left_aligned(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Left-padded ids [B, P] with mask [B, P] -> ids with the tokens first [B, P] and their counts [B].

    Raises ValueError for padding on the right or inside, for empty rows and for positions other than 0, 1, 2 ...
    """
    width = ids.shape[1]
    if width == 0:
        raise ValueError("an empty prompt was given; at least one token is needed to begin with")
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device).bool()
    lengths = mask.sum(1)
    index = torch.arange(width, device=ids.device)
    if bool((mask != (index >= width - lengths[:, None])).any()) or bool((lengths == 0).any()):
        raise ValueError(
            "attention_mask must be 0 on the left and 1 from the first token to the last one of every row; "
            "pad with padding_side='left'"
        )
    if positions is not None:  # [B, P], or [axes, B, P] of a model that sees: in a text all axes are the same
        given = positions.to(ids.device).expand(*positions.shape[:-2], *ids.shape).reshape(-1, *ids.shape)
        if bool((given != mask.long().cumsum(1) - 1)[:, mask].any()):
            raise ValueError("position_ids other than 0, 1, 2 ... per row are not available with speculative decoding")
    return ids.gather(1, (index + width - lengths[:, None]).clamp(max=width - 1)), lengths


def _prompt_tuned(what: str) -> str:
    return (
        f"{what}: virtual tokens in front of the prompt would be lost, and the text would be that of the bare model; "
        "a LoRA adapter, or plain generate, is needed"
    )


def _sharding(model: nn.Module) -> str | None:
    """How a model's weights are spread over processes, None where this process holds them whole."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return f"split by tensor parallelism over {model._tp_size} processes"
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        return "sharded by FSDP"
    for p in model.parameters():
        if hasattr(p, "ds_id"):
            return "partitioned by DeepSpeed ZeRO-3"
        if hasattr(p, "placements"):  # a DTensor: fully_shard, or a tensor parallel plan
            return "made of distributed tensors (DTensor)"
    return None


def _check_windows(text: Any) -> None:
    """One window a kind of layer; configs may state one for every layer."""
    seen: dict[str, set[int | None]] = {}
    for kind, options in zip(*get_layer_types_and_kwargs(text), strict=True):
        seen.setdefault(kind, set()).add(options.get("sliding_window"))
    odd = sorted(kind for kind, windows in seen.items() if len(windows) > 1)
    if odd:
        raise ValueError(f"layers of kind {odd} have windows of several sizes; one size a kind is needed for a tree")


def _length_limits(text: Any) -> list[tuple[int, bool, str]]:
    """(tokens up to which a tree is exact, whether slots of a tree count among them, what happens there)."""
    found: list[tuple[int, bool, str]] = []
    rope = getattr(text, "rope_parameters", None) or {}
    for options in [rope, *(v for v in rope.values() if isinstance(v, dict))]:  # one set, or one a kind of layer
        kind = str(options.get("rope_type") or "")
        limit = text.max_position_embeddings if "dynamic" in kind else None
        if kind == "longrope":
            own = getattr(text, "original_max_position_embeddings", None)
            limit = options.get("original_max_position_embeddings") or own or text.max_position_embeddings
        if limit is not None:
            found.append((int(limit), False, f"has rope_type {kind!r}, whose frequencies change"))
    if text.model_type == "llama4_text" and text.attn_temperature_tuning:
        found.append((int(text.floor_scale) - 1, True, "begins to scale its attention by slots"))
    if text.model_type == "doge":
        found.append((int(text.keep_window_size), True, "begins to choose among slots"))
    return found


def _settle_attention(model: Any, text: Any) -> list[str]:
    """Attention kernels without masks of their own give way to one that computes the same with them."""
    given = attention_of(model)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    only_eager = capped or not getattr(model, "_supports_sdpa", True)
    if given == "eager" or (given == "sdpa" and not only_eager):
        return []
    if given != "sdpa" and not any(word in str(given) for word in _SAME_ATTENTION):
        raise ValueError(
            f"attention {given!r} is not known to take a tree mask; load the target with attn_implementation='sdpa' "
            "(or 'eager')"
        )
    wanted = "eager" if only_eager else "sdpa"
    try:
        model.set_attn_implementation(wanted)
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"attention {given!r} takes no tree of guesses and cannot be switched ({error}); load the target with "
            f"attn_implementation={wanted!r}"
        ) from error
    if attention_of(model) != wanted:
        raise ValueError(
            f"attention {given!r} takes no tree of guesses and {type(model).__name__} does not let it be switched; "
            f"load the target with attn_implementation={wanted!r}"
        )
    why = "cannot cap its scores" if given == "sdpa" and capped else "takes no tree of guesses"
    return [f"attention {given!r} {why}: the target was switched to {wanted!r} and stays so"]
