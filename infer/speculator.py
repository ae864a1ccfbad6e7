"""Speculator: heads (or another source of guesses) bound to a target, with the call signature of ``generate``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.heads import DraftHeads, Tie, load_heads
from headstart.heads.tie import tokenizer_notes
from headstart.infer.accept import LOSSY, RULES, Rule, block, match, typical
from headstart.infer.checks import bare, check_bound, check_call, check_length, check_target, left_aligned
from headstart.infer.costs import check_plan, one_shape, plan_for, plan_in
from headstart.infer.decode import Limits, decode
from headstart.infer.draft_merge import Merged
from headstart.infer.drafter import Source, sampling_as
from headstart.infer.drafters import check_shapes, source_of
from headstart.infer.grouped import attention_of
from headstart.infer.plan import Plan
from headstart.infer.planner import Planning
from headstart.infer.prepack import Prepacked, modules_of
from headstart.infer.probe import check_model
from headstart.infer.report import Report
from headstart.infer.target import Target, compute_dtype, home
from headstart.infer.visit import Emission

logger = logging.getLogger(__name__)


class Speculator:
    """Decodes ``target`` several tokens a forward; the text is the target's own.

    Use it as ``fast.generate(...)`` with the arguments of ``target.generate``, or hand it over as
    ``target.generate(..., custom_generate=fast)``. ``report`` holds the counts of the last call.
    """

    def __init__(
        self,
        target: Any,
        source: DraftHeads | PreTrainedModel | Source | str | Sequence[DraftHeads | Source | str],
        *,
        rule: str = "match",
        nodes: int = 16,
        depth: int | None = None,
        walk: bool | None = None,
        compile: bool | str = False,
        prepack: bool = False,
        plan: str | Plan = "fixed",
        **options: Any,
    ) -> None:
        """``source`` heads in memory, a name in DRAFTERS, a draft model, any Source, or a list of them to merge.

        ``nodes`` a pass verifies, root included; ``depth`` guesses on the longest path (None = all the source has);
        ``walk`` accepts without a sync for each token where that is exact (None = on an accelerator); ``compile`` runs
        the verify pass through torch.compile (True, or the name of a backend); ``prepack`` keeps bfloat16 weights on a
        CPU a second time, as it multiplies fastest by them; ``plan`` "fixed" spends all of nodes and depth in every
        step, "adaptive" what pays by costs measured here once, a Plan by what ``headstart tune`` found;
        ``options`` are the fields of HeadsSource, DraftModel or the named source. Raises ValueError where target and
        source do not fit, before any token.
        """
        source = source_of(source, options)
        check_plan(plan)
        if compile and prepack:
            raise ValueError("compile and prepack exclude each other: the compiler lays weights out itself")
        source, nodes = one_shape(source, nodes, plan) if compile else (source, nodes)
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; known are {sorted(RULES)}")
        if nodes < 1 or (depth is not None and depth < 0):
            raise ValueError(f"nodes must be at least 1 and depth at least 0; got nodes={nodes}, depth={depth}")
        model = bare(target)
        self.target, self.source, self.rule, self.walk = target, source, rule, walk
        self.notes = [*check_target(model), *source.check(model)]
        check_model(model, source.wants)
        most = source.depth
        if depth is not None and depth > most:
            self.notes.append(f"depth {depth} was asked for, {source.name} guesses {most} tokens: {most} is used")
        self.nodes, self.depth = nodes, most if depth is None else min(depth, most)
        check_shapes(source, nodes)
        self.compiled = _backend(compile) if compile else None
        self._compiled = torch.compile(model, backend=self.compiled, dynamic=False) if self.compiled else None
        self.packed = Prepacked([model, *modules_of(source)]) if prepack else None
        self.notes += [str(self.packed)] if self.packed else []
        self.layout = self.packed or nullcontext()
        self._sizes = (nodes,) if plan == "fixed" else (1, nodes)  # few shapes to compile
        self.planning = Planning(None, self.depth)
        self.planning = Planning(plan_for(self, plan), self.depth)  # may measure, by calls without a plan
        self.report = Report()
        for note in self.notes:
            logger.warning(note)

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        target: Any,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        tokenizer: Any = None,
        also: Sequence[str] = (),
        **options: Any,
    ) -> Speculator:
        """Heads from a folder or the Hub; ``also`` names drafters whose guesses are merged with theirs.

        ``revision`` and ``token`` are the Hub's. A ``tokenizer`` is compared with the one the heads were trained with.
        ``plan="adaptive"`` begins with the plan that ``headstart tune`` wrote beside them.
        """
        heads = heads_for(target, source, revision=revision, token=token)
        if options.get("plan") == "adaptive":
            options["plan"] = plan_in(source, revision, token) or "adaptive"
        fast = cls(target, [*also, heads] if also else heads, **options)
        for note in [] if tokenizer is None else tokenizer_notes(heads.config.target_tokenizer, tokenizer):
            fast.notes.append(note)
            logger.warning(note)
        return fast

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
            check_bound(model, self.target)
            check_length(model, stopping_criteria.max_length or generation_config.max_length, self.nodes)
            known = check_call(generation_config, input_ids, model_kwargs)
            ids, lengths = left_aligned(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
            device = home(model)
            if sink is not None:
                sink.put(input_ids.cpu())
            name, rule = self._rule(generation_config)
            visit = self._emission(input_ids, logits_processor, stopping_criteria, generation_config, sink, rule)
            text = model.config.get_text_config(decoder=True)
            limits = Limits(self.nodes, self.depth, getattr(text, "max_position_embeddings", None) or 1 << 60)
            ends = torch.tensor(sorted(visit.ends), dtype=torch.int64, device=device)
            drawing = sampling_as(logits_processor) if name == "rejection" else None
            drafter = self.source.drafter(model, ends, drawing)
            target = self.bound(drafter.wants, visit.max_length)
            walking = rule is match and visit.walks and (device.type != "cpu" if self.walk is None else self.walk)
            walking &= input_ids.device == device or not visit.do_sample  # draws are made where the prompt is
            prompt = (ids.to(device), lengths.to(device))
            kind = name if generation_config.do_sample else "greedy"
            drawn = drawing is not None and not isinstance(self.source, Merged)  # a merge draws nothing
            planner = self.planning.begin(kind, len(ids), drawn)
            with self.layout:
                report = decode(target, drafter, rule, visit, *prompt, limits, known, walking, planner)
            self.planning.end(kind, planner)
            report.drafter, report.rule, report.lossless = self.source.name, name, name not in LOSSY
            report.dtype, report.attention = str(compute_dtype(model)).removeprefix("torch."), attention_of(model) or ""
            report.notes = list(self.notes)
            self.report = report
            return _output(visit, target, generation_config)
        finally:
            if sink is not None:
                sink.end()

    def _rule(self, config: GenerationConfig) -> tuple[str, Rule]:
        """The rule of a call: greedily all are the same, and chains have a better one than trees."""
        name = self.rule if config.do_sample else "match"
        rule = block if name == "rejection" and self.source.chain else RULES[name]
        if rule in (block, typical) and config.return_dict_in_generate:
            kept = [n for n in ("output_scores", "output_logits") if getattr(config, n)]
            if kept:
                raise ValueError(f"{kept} are not available with rule {name!r} here: use rule='match'")
        return name, rule

    @property
    def model(self) -> Any:
        """The causal LM inside whatever wraps the target."""
        return bare(self.target)

    def bound(self, wants: tuple[int, ...], length: int) -> Target:
        """The target of one call of up to ``length`` tokens; a compiled one sees trees of one size, or two where steps
        may be plain, and a cache that never grows."""
        if self._compiled is None:
            return Target(self.model, wants)
        return Target(self.model, wants, room=length + self.nodes, compiled=self._compiled, sizes=self._sizes)

    def _emission(
        self, ids: Tensor, processors: Any, criteria: Any, config: GenerationConfig, sink: Any, rule: Rule
    ) -> Emission:
        pad: Tensor | None = config._pad_token_tensor
        return Emission(
            ids,
            processors,
            criteria,
            max_length=criteria.max_length or config.max_length,  # a MaxLengthCriteria of the caller's replaces it
            do_sample=bool(config.do_sample),
            pad=None if pad is None else int(pad),
            sink=sink,
            in_order=rule is match,
            record=bool(config.return_dict_in_generate and (config.output_scores or config.output_logits)),
        )


def heads_for(target: Any, source: str, **where: Any) -> DraftHeads:
    """Heads from ``source``, a folder or Hub id, in the target's dtype and on its output's device.

    ``where`` are keywords of ``from_pretrained``: revision, token, cache_dir, local_files_only.
    """
    heads = load_heads(source, **{name: value for name, value in where.items() if value is not None})
    torch.nn.Module.to(heads, device=Tie.of(target).weight.device, dtype=compute_dtype(target))
    return heads


def _backend(compile: bool | str) -> str:
    """The backend's name; raises ValueError naming the known ones."""
    name = "inductor" if compile is True else str(compile)
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise ValueError(f"unknown torch.compile backend {name!r}; known are {known}")
    return name


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
