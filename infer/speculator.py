"""Speculator: heads (or another source of guesses) bound to a target, with the call signature of ``generate``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.heads import DraftHeads, Tie, load_heads
from headstart.infer.accept import RULES
from headstart.infer.decode import Limits, decode
from headstart.infer.draft_heads import HeadsSource
from headstart.infer.draft_merge import Merged
from headstart.infer.draft_ngram import PromptLookup, TokenRecycling
from headstart.infer.drafter import Source
from headstart.infer.report import Report
from headstart.infer.target import Target, attention_windows, check_model
from headstart.infer.visit import Emission

logger = logging.getLogger(__name__)

DRAFTERS: dict[str, Callable[..., Source]] = {
    "prompt-lookup": PromptLookup,
    "token-recycling": TokenRecycling,
}
"""Sources of guesses that need no weights, by name: a new one is a file draft_x.py and a line here."""

HARMLESS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "tokenizer"}


class Speculator:
    """Decodes ``target`` several tokens a forward; the text is the target's own.

    Use it as ``fast.generate(...)`` with the arguments of ``target.generate``, or hand it over as
    ``target.generate(..., custom_generate=fast)``. ``report`` holds the counts of the last call.
    """

    def __init__(
        self,
        target: Any,
        source: DraftHeads | Source | str | Sequence[DraftHeads | Source | str],
        *,
        rule: str = "match",
        nodes: int = 16,
        depth: int | None = None,
        **options: Any,
    ) -> None:
        """``source`` heads in memory, a name in DRAFTERS, any Source, or a list of them to merge. ``nodes`` a pass
        verifies, root included; ``depth`` guesses on the longest path (None = all the source has); ``options`` are the
        fields of HeadsSource or of the named source. Raises ValueError where target and source do not fit, before any
        token."""
        source = _source(source, options)
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; known are {sorted(RULES)}")
        if nodes < 1 or (depth is not None and depth < 0):
            raise ValueError(f"nodes must be at least 1 and depth at least 0; got nodes={nodes}, depth={depth}")
        check_target(target)
        self.target, self.source, self.rule = target, source, rule
        self.notes = source.check(target)
        check_model(target, source.wants)
        most = source.depth
        if depth is not None and depth > most:
            self.notes.append(f"depth {depth} was asked for, {source.name} guesses {most} tokens: {most} is used")
        self.nodes, self.depth = nodes, most if depth is None else min(depth, most)
        shape = getattr(source, "shape", None)
        if shape is not None and len(shape.parents) > nodes:
            raise ValueError(f"the shape has {len(shape.parents)} nodes, nodes={nodes} allows fewer")
        self.report = Report()
        for note in self.notes:
            logger.warning(note)

    @classmethod
    def from_pretrained(
        cls, source: str, target: Any, *, revision: str | None = None, also: Sequence[str] = (), **options: Any
    ) -> Speculator:
        """Heads from a folder or the Hub, in the target's dtype and on its output's device; ``also`` names drafters
        whose guesses are merged with theirs."""
        heads = load_heads(source, **({"revision": revision} if revision else {}))
        weight = Tie.of(target).weight
        torch.nn.Module.to(heads, device=weight.device, dtype=target.dtype)
        return cls(target, [*also, heads] if also else heads, **options)

    def generate(
        self,
        *args: Any,
        streamer: Any = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """``target.generate(...)``, sooner. Takes streamer, tokenizer and stop_strings, which transformers drops or
        refuses on its ``custom_generate`` path."""
        for name in ("assistant_model", "synced_gpus"):  # transformers would drop them without a word
            if kwargs.pop(name, None):
                raise ValueError(f"{name} is not available with speculative decoding: leave it out")
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        if stop_strings is None:
            stop_strings = getattr(given, "stop_strings", None) or self.target.generation_config.stop_strings
        if stop_strings is not None:
            if tokenizer is None:
                raise ValueError("stop_strings need the tokenizer they are written in: pass tokenizer=")
            stop = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), stop])
            kwargs["stop_strings"] = None  # the criterion above stands for them
        return self.target.generate(*args, custom_generate=self, sink=streamer, **kwargs)

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        sink: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``target.generate(custom_generate=self)`` calls: padded ids [B, P] -> ids [B, P + new]."""
        try:
            if model is not self.target:
                raise ValueError(
                    "this Speculator was made for another model object: make one for the model that decodes"
                )
            known = check_call(generation_config, input_ids, model_kwargs)
            ids, lengths = left_aligned(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
            device = model.get_input_embeddings().weight.device
            if sink is not None:
                sink.put(input_ids.cpu())
            visit = self._emission(input_ids, logits_processor, stopping_criteria, generation_config, sink)
            text = model.config.get_text_config(decoder=True)
            limits = Limits(self.nodes, self.depth, getattr(text, "max_position_embeddings", None) or 1 << 60)
            ends = torch.tensor(sorted(visit.ends), dtype=torch.int64, device=device)
            drafter = self.source.drafter(model, ends)
            target = Target(model, drafter.wants)
            report = decode(target, drafter, RULES[self.rule], visit, ids.to(device), lengths.to(device), limits, known)
            report.drafter, report.rule, report.notes = self.source.name, self.rule, list(self.notes)
            self.report = report
            return _output(visit, target, generation_config)
        finally:
            if sink is not None:
                sink.end()

    def _emission(self, ids: Tensor, processors: Any, criteria: Any, config: GenerationConfig, sink: Any) -> Emission:
        pad: Tensor | None = config._pad_token_tensor
        return Emission(
            ids,
            processors,
            criteria,
            max_length=criteria.max_length or config.max_length,  # a MaxLengthCriteria of the caller's replaces it
            do_sample=bool(config.do_sample),
            pad=None if pad is None else int(pad),
            sink=sink,
            record=bool(config.return_dict_in_generate and (config.output_scores or config.output_logits)),
        )


def _source(source: Any, options: dict[str, Any]) -> Source:
    """What a Speculator was given as a Source; a list becomes a merge. Raises ValueError naming what is known."""
    if isinstance(source, (list, tuple)):
        share = {"share": options.pop("share")} if "share" in options else {}
        return Merged(tuple(_source(part, options if isinstance(part, DraftHeads) else {}) for part in source), **share)
    make: Callable[..., Source] | None = HeadsSource if isinstance(source, DraftHeads) else None
    if isinstance(source, str):
        if source not in DRAFTERS:
            raise ValueError(f"unknown drafter {source!r}; known are {sorted(DRAFTERS)}, or heads in memory")
        make = DRAFTERS[source]
    if make is None:
        if options:
            raise ValueError(f"options {sorted(options)} belong to heads or a named drafter; this is a made Source")
        return source  # type: ignore[no-any-return]
    known = [f.name for f in dataclasses.fields(make) if f.name not in ("heads", "name", "wants")]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown options {unknown}; known here are {sorted(known)}")
    return make(source, **options) if make is HeadsSource else make(**options)


def check_target(model: Any) -> None:
    """Raises ValueError, naming the reason, for a model whose trees could be silently wrong."""
    text = model.config.get_text_config(decoder=True)
    implementation = getattr(text, "_attn_implementation", None)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; trees need a decoder-only causal LM")
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attention {implementation!r} cannot take a tree mask; "
            "load the target with attn_implementation='sdpa' (or 'eager')"
        )
    alibi = "its attention biases count slots, not positions"
    slots = {"gpt_neo": "its local attention counts slots, not positions", "mpt": alibi, "bloom": alibi}
    why = slots.get(text.model_type, alibi if getattr(text, "alibi", False) else None)
    if why:
        raise ValueError(f"{type(model).__name__} cannot take a tree: {why}; a target with rotary positions is needed")
    if (getattr(text, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        raise ValueError(
            "rope_type longrope picks its frequencies by the longest position of a forward, so guesses would change "
            "the tokens before them; a target with another rope_type is needed"
        )
    attention_windows(text)


def _output(visit: Emission, target: Target, config: GenerationConfig) -> Tensor | GenerateDecoderOnlyOutput:
    """Ids [B, P + new], or with them what ``return_dict_in_generate`` asked for."""
    if not config.return_dict_in_generate:
        return visit.sequences()
    return GenerateDecoderOnlyOutput(
        sequences=visit.sequences(),  # type: ignore[arg-type]
        scores=visit.scores if config.output_scores else None,  # type: ignore[arg-type]
        logits=visit.logits if config.output_logits else None,  # type: ignore[arg-type]
        cache=target.cache.stock(target.model.config) if visit.rows == 1 else None,
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
    refused += [
        f"{k} (not understood by trees)" for k, v in model_kwargs.items() if k not in HARMLESS and v is not None
    ]
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
    if positions is not None and bool(
        (positions.to(ids.device) != (mask.long().cumsum(1) - 1).clamp(min=0))[mask].any()
    ):
        raise ValueError("position_ids other than 0, 1, 2 ... per row are not available with speculative decoding")
    return ids.gather(1, (index + width - lengths[:, None]).clamp(max=width - 1)), lengths
