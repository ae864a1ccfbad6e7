"""What drafting brings, measured: ways of decoding the same prompts, run in turn.

Every contestant does every job, a batch of prompts under given options, with the same seed; which one begins changes
from job to job. A time is that of the whole call, with a streamer that notes when the first token came. Nothing is
printed here; the figures that follow from the runs are in figures.py.

Legend: B rows of a batch, P prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headstart.infer.draft_merge import Merged
from headstart.infer.drafter import Source
from headstart.infer.figures import FIRST, PLAIN, Run, loops_at_end
from headstart.infer.parity import first_difference
from headstart.infer.prepack import Prepacked
from headstart.infer.report import OUTSIDE, Report
from headstart.infer.speculator import Speculator
from headstart.infer.watch import FirstToken, Forwards, watched

EQUAL, TIE, BUG = "equal", "near tie", "bug"  # of greedy texts
DRAWS, LOSSY = "other draws", "lossy"  # of sampled texts that differ, and of those by a rule that does not keep the law
WARM_TOKENS = 16
FIRST_TOKENS = 8  # asked for where the first one is timed: a whole tree is drafted before it comes
LOOKUP_TOKENS = 10  # guesses of transformers' own prompt lookup
T = TypeVar("T")


class Prompt(NamedTuple):
    """One tokenised prompt of a suite."""

    name: str
    task: str
    ids: Tensor  # [P]


class Job(NamedTuple):
    """What every contestant does in turn."""

    decoding: str  # a name for the options
    number: int  # of the batch, among those of its decoding
    batch: Sequence[Prompt]
    options: Mapping[str, Any]  # of generate: max_new_tokens, do_sample and pad_token_id are among them

    @property
    def key(self) -> tuple[str, int]:
        """As in the runs: decoding and batch."""
        return self.decoding, self.number


@dataclass
class Contestant:
    """A way of decoding. ``call`` takes what ``target.generate`` takes and returns ids [B, P + new]."""

    name: str
    call: Callable[..., Any]
    fast: Speculator | None = None  # one of ours: its report is read after each call
    refused: str = ""  # why it cannot run; found out in the warm-up

    @classmethod
    def ours(cls, name: str, fast: Speculator) -> Contestant:
        """A Speculator as a contestant."""
        return cls(name, fast.generate, fast)


def stock(target: Any, lookup: bool = False, assistant: Any = None, prepacked: bool = False) -> list[Contestant]:
    """Plain ``generate``, and what else goes without heads: transformers' prompt lookup, its assisted generation by
    ``assistant``, and plain ``generate`` by prepacked weights, which tells what those alone are worth."""
    made = [Contestant(PLAIN, target.generate)]
    if lookup:
        call = partial(target.generate, prompt_lookup_num_tokens=LOOKUP_TOKENS)
        made.append(Contestant("transformers prompt-lookup", call))
    if assistant is not None:
        made.append(Contestant("transformers assisted", partial(target.generate, assistant_model=assistant)))
    if prepacked:
        made.append(Contestant("plain, prepacked", Prepacked([target]).around(target.generate)))
    return made


def own_parameters(source: Source) -> int:
    """Weights of a source's own: the trained ones of heads, all of a draft model, the sum of a merge, else 0."""
    if isinstance(source, Merged):
        return sum(own_parameters(part) for part in source.sources)
    heads, model = getattr(source, "heads", None), getattr(source, "model", None)
    if heads is not None:
        return sum(p.numel() for p in heads.parameters() if p.requires_grad)
    return 0 if model is None else sum(p.numel() for p in model.parameters())


def pad_token(target: Any, tokenizer: Any) -> int:
    """What fills rows: the pad token, or an end token where there is none, as in ``generate``."""
    ends = target.generation_config.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    given = (target.generation_config.pad_token_id, tokenizer.pad_token_id, first, 0)
    return int(next(token for token in given if token is not None))


def spread(prompts: Sequence[Prompt], limit: int | None = None) -> list[Prompt]:
    """``limit`` prompts (None = all): as many of each task as of any other where there are enough, picked at even
    distances, and dealt out in turn, so that whatever part of the list is run is balanced too."""
    tasks = _by_task(prompts)
    left = len(prompts) if limit is None else min(limit, len(prompts))
    quota = dict.fromkeys(tasks, 0)
    while left:
        for task in [t for t in tasks if quota[t] < len(tasks[t])][:left]:
            quota[task] += 1
            left -= 1
    picked = [[rows[(2 * i + 1) * len(rows) // (2 * quota[t])] for i in range(quota[t])] for t, rows in tasks.items()]
    return _dealt(picked)


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of up to ``size`` prompts of one task each, the tasks in turn."""
    return _dealt([[p[i : i + size] for i in range(0, len(p), size)] for p in _by_task(prompts).values()])


def jobs(work: Sequence[Sequence[Prompt]], decodings: Mapping[str, Mapping[str, Any]]) -> list[Job]:
    """Every batch of ``work`` under the options of every decoding."""
    return [Job(name, at, batch, options) for at, batch in enumerate(work) for name, options in decodings.items()]


def first_token_jobs(
    prompts: Sequence[Prompt], lengths: Sequence[int], times: int, options: Mapping[str, Any]
) -> list[Job]:
    """``times`` jobs with a prompt of each of ``lengths`` tokens, cut out of ``prompts`` joined and repeated."""
    text = torch.cat([prompt.ids for prompt in prompts])
    text = text.repeat(max(lengths, default=0) // len(text) + 1)
    few = {**options, "max_new_tokens": FIRST_TOKENS}
    rounds = [(length, time) for time in range(times) for length in lengths]
    made = [Prompt(f"{length} tokens, {time + 1}", str(length), text[:length]) for length, time in rounds]
    return [Job(FIRST, number, [prompt], few) for number, prompt in enumerate(made)]


def warm_up(target: Any, contestants: Sequence[Contestant], work: Sequence[Job]) -> None:
    """A short call of each for the first job of each decoding, which counts nowhere. A baseline that refuses such a
    call is marked with its reason; one of ours raises."""
    for job in {job.decoding: job for job in reversed(work)}.values():
        short = {**job.options, "max_new_tokens": min(WARM_TOKENS, job.options["max_new_tokens"])}
        for contestant in contestants:
            try:
                _decode(target, contestant, job._replace(options=short), seed=0)
            except (ValueError, NotImplementedError) as reason:  # both are how generate refuses options of a baseline
                if contestant.name == PLAIN or contestant.fast is not None:
                    raise ValueError(f"{contestant.name} cannot decode this: {reason}") from reason
                contestant.refused = str(reason)


def measure(target: Any, contestants: Sequence[Contestant], work: Sequence[Job], seed: int) -> Iterator[list[Run]]:
    """Does each job by every contestant that has not refused, of which one must be called PLAIN.

    Yields all the runs of a job at once, so that what was measured before an interruption is whole.
    """
    for job in work:
        runs, texts = {}, {}
        for turn, contestant in enumerate(rotated([c for c in contestants if not c.refused], job.number)):
            run, texts[contestant.name] = _decode(target, contestant, job, seed)
            runs[contestant.name] = run._replace(turn=turn)
        for contestant in (c for c in contestants if c.name in runs):
            lossless = contestant.fast is None or contestant.fast.report.lossless
            pairs = zip(job.batch, texts[PLAIN], texts[contestant.name], strict=True)
            found = [verdict(target, p.ids, a, b, bool(job.options["do_sample"]), lossless) for p, a, b in pairs]
            remarks = tuple(f"{p.name}: {said}" for p, (_, said) in zip(job.batch, found, strict=True) if said)
            kinds = tuple(kind for kind, _ in found)
            runs[contestant.name] = runs[contestant.name]._replace(verdicts=kinds, remarks=remarks)
        yield list(runs.values())


def rotated(contestants: Sequence[T], number: int) -> list[T]:
    """The order for batch ``number``: each is the first one equally often."""
    at = number % len(contestants)
    return [*contestants[at:], *contestants[:at]]


def verdict(
    target: Any, prompt: Tensor, plain: Tensor, text: Tensor, sampled: bool, lossless: bool = True
) -> tuple[str, str]:
    """What ``text`` [b] is, compared with ``plain`` [a], both after ``prompt`` [P]: a kind, and where they part."""
    if torch.equal(plain, text):
        return EQUAL, ""
    if not lossless:
        return LOSSY, ""
    if sampled:  # another stream of random numbers, or rounding that turned a draw: one text cannot tell
        return DRAWS, ""
    device = target.get_input_embeddings().weight.device
    ids = [torch.cat([prompt, rest]).to(device) for rest in (plain, text)]
    try:
        found = first_difference(target, prompt.to(device), *ids)
    except ValueError as error:  # one text goes on where the other has ended
        return BUG, str(error)
    assert found is not None
    return TIE if found.near_tie else BUG, str(found)


def left_padded(rows: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts [P] each -> ids and attention mask [B, P], padded on the left to the longest P."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_full((width - len(row),), pad), row]) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(width) >= width - lengths[:, None]).long()


def _decode(target: Any, contestant: Contestant, job: Job, seed: int) -> tuple[Run, list[Tensor]]:
    """One timed call, and the new tokens of each row, on the CPU, up to the row's first end token."""
    padded = left_padded([prompt.ids for prompt in job.batch], job.options["pad_token_id"])
    ids, mask = (t.to(target.get_input_embeddings().weight.device) for t in padded)
    stream = FirstToken()
    torch.manual_seed(seed)
    ours = contestant.fast is not None  # it counts for itself, and a compiled pass would take hooks in
    with nullcontext(Forwards(ids.device)) if ours else watched(target) as forwards:
        began = perf_counter()
        call = partial(contestant.call, ids, attention_mask=mask, streamer=stream, **job.options)
        out = call().cpu()  # .cpu() waits for the device
        seconds = perf_counter() - began
    texts = [_own(row[ids.shape[1] :], target.generation_config.eos_token_id) for row in out]
    run = Run(
        decoding=job.decoding,
        batch=job.number,
        contestant=contestant.name,
        task=job.batch[0].task,
        prompts=tuple(prompt.name for prompt in job.batch),
        turn=0,
        seconds=seconds,
        first_token=stream.at - began,
        tokens=sum(map(len, texts)),
        # a forward of stock decoding gives every row that goes on a token or more
        passes=sum(min(len(text), forwards.count) for text in texts),
        forwards=forwards.count,
        steps=forwards.count,
        verify_steps=0,
        loop_tokens=sum(map(len, texts)) - stream.tokens,
        loop_seconds=seconds - (stream.at - began),
        outside_seconds=forwards.between,
        depths=(),
        looping=tuple(loops_at_end(text.tolist()) for text in texts),
        split={},
    )
    return (run if contestant.fast is None else _reported(run, contestant.fast.report)), texts


def _reported(run: Run, report: Report) -> Run:
    """The run of one of ours with what its report counted."""
    joint = report.steps > report.verify_steps  # the first pass ran with the end of the prompt, and is prefill
    first = sum(kept + 1 for kept, _ in report.rounds[: len(run.prompts)]) if joint else 0
    return run._replace(
        passes=report.passes,
        forwards=report.forwards,
        steps=report.steps,
        verify_steps=report.verify_steps,
        loop_tokens=run.tokens - first,
        loop_seconds=report.total_seconds - report.seconds["prefill"],
        outside_seconds=sum(report.seconds[part] for part in OUTSIDE),
        depths=tuple(report.depths),
        split=dict(report.seconds),
    )


def _own(row: Tensor, ends: int | Sequence[int] | None) -> Tensor:
    """New tokens [n] of a row of a batch, without those that only pad it."""
    known = torch.tensor([] if ends is None else ends, dtype=row.dtype)
    end = torch.isin(row, known).nonzero()
    return row[: int(end[0]) + 1] if len(end) else row


def _by_task(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    return {task: [p for p in prompts if p.task == task] for task in dict.fromkeys(p.task for p in prompts)}


def _dealt(piles: Sequence[Sequence[T]]) -> list[T]:
    """The first of each pile, the second of each, and so on."""
    return [pile[i] for i in range(max(map(len, piles), default=0)) for pile in piles if i < len(pile)]
