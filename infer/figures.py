"""What the runs of a benchmark show: speed-ups with an interval, tokens per pass, parts of a step, verdicts. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, NamedTuple, TypedDict

from headstart.infer.report import Depth

VERSION = 2  # of the file that a benchmark writes, see Saved
PLAIN = "plain"  # the name of the reference: the target's own generate
ALL = "all tasks"  # the scope of all tasks together
FIRST = "first token"  # the decoding whose runs are there for the time to the first token, a length of prompt a task
OTHER = "other"  # the part of a call's time that no part of its report accounts for
LOOP_TIMES, LOOP_TOKENS = 4, 12  # a tail that repeats itself so often and so long is a loop


class Run(NamedTuple):
    """One batch decoded by one contestant."""

    decoding: str  # "greedy", "temperature 1", or FIRST
    batch: int  # the same number for every contestant
    contestant: str
    task: str
    prompts: tuple[str, ...]  # names, one a row, as in the other tuples
    turn: int  # 0 = it was the first to decode this batch
    seconds: float  # of the whole call, prefill included
    first_token: float  # seconds until the first token of the batch
    tokens: int  # new, all rows, end tokens included
    passes: int  # forwards that gave a row tokens, counted once per row
    forwards: int  # of the target, prefill included
    steps: int  # forwards that gave tokens
    verify_steps: int  # of these, the ones whose time is in the part "verify"
    loop_tokens: int  # tokens of the decoding loop alone, and its seconds: the call without prefill and preparations
    loop_seconds: float
    outside_seconds: float  # of the loop, outside of drafting and the target's forwards; of others the latter alone
    depths: tuple[Depth, ...]  # what became of the guesses at each depth, from 1 on; empty where it is not known
    looping: tuple[bool, ...]
    split: Mapping[str, float]  # seconds by part; empty where they are not known
    verdicts: tuple[str, ...] = ()  # what each text is, compared with the plain one
    remarks: tuple[str, ...] = ()  # where texts part, one line for each that does

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @classmethod
    def restored(cls, row: Mapping[str, Any]) -> Run:
        """The run that ``row`` = ``_asdict()``, gone through JSON, stands for."""
        whole: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        return cls(**whole | {"depths": tuple(Depth(*depth) for depth in whole["depths"])})


Pair = tuple[Run, Run]


class Figures(NamedTuple):
    """What a set of runs of one contestant shows. A speed-up is its tokens/s over the plain tokens/s on one batch."""

    runs: int
    speedup: float  # median
    low: float  # order statistics around it that hold the true median with a chance of ``coverage``
    high: float
    coverage: float
    speed: float  # median tokens per second
    tokens: int  # written in all runs
    plain_tokens: int  # written by plain decoding in the same batches
    forwards: int  # of the target in all runs, prefill included
    tokens_per_pass: float  # all tokens over all passes
    accepted_by_depth: list[float]  # share of the passes with a guess at depth 1, 2 ... on offer that kept it
    accepted_given_parent: list[float]  # the same among those of them that kept the guess before it
    first_token: float  # median seconds
    first_token_speedup: float  # median of plain seconds over its own
    draft: float | None  # seconds a step
    verify: float | None  # seconds a step
    plain_step: float | None  # seconds of a plain decoding step in the same batches
    loop_speedup: float | None  # speed-up of the loop as measured, prefill and preparations left out on both sides
    predicted: float | None  # the same of one half of the batches, by what steps cost and bring in the other half
    measured: float | None  # of that one half, as measured
    outside: float | None  # share of the loop that is spent outside of drafting and the target's forwards
    outside_token: float | None  # seconds of it a token
    split: dict[str, float]  # shares of the wall time; empty where they are not known
    looping: float  # share of texts that end in a loop; loops flatter every drafter
    verdicts: dict[str, int]  # texts by verdict


class Entry(TypedDict):
    """A contestant of a benchmark."""

    name: str
    ours: bool  # a Speculator
    parameters: int | None  # own weights of what guesses: trained ones of heads, all of a draft model; None = not ours
    refused: str | None  # why it did not run


class FirstToken(TypedDict):
    """Time to the first token after prompts of one length."""

    runs: int
    seconds: float  # median
    speedup: float  # median of plain seconds over its own


class Saved(TypedDict):
    """The file that ``headstart bench --save`` writes, as JSON. Figures go by decoding, contestant, task (or ALL)."""

    version: int  # VERSION; it grows where a reader of the older file would misread the newer one
    complete: bool  # False = interrupted
    protocol: dict[str, str | int | float | None]  # what was asked for, and what it ran on
    contestants: list[Entry]
    figures: dict[str, dict[str, dict[str, Figures]]]
    figures_without_loops: dict[str, dict[str, dict[str, Figures]]]  # without batches in which a text ends in a loop
    first_token: dict[str, dict[str, FirstToken]]  # by contestant and prompt tokens
    runs: list[Run]


def decodings(runs: Sequence[Run]) -> list[str]:
    """The decodings that ``runs`` hold, without FIRST."""
    return [name for name in dict.fromkeys(run.decoding for run in runs) if name != FIRST]


def summary(runs: Sequence[Run], *, loops: bool = True) -> dict[str, dict[str, Figures]]:
    """Figures of runs of one decoding by contestant and then by task, ALL first; ``loops`` as in ``figures``. What has
    no runs is left out."""
    table: dict[str, dict[str, Figures]] = {}
    tasks = dict.fromkeys(run.task for run in runs)
    for name in dict.fromkeys(run.contestant for run in runs):
        scopes = {ALL: list(runs)} | {task: [run for run in runs if run.task == task] for task in tasks}
        found = {scope: figures(part, name, loops=loops) for scope, part in scopes.items()}
        table[name] = {scope: value for scope, value in found.items() if value is not None}
    return table


def figures(runs: Sequence[Run], contestant: str, *, loops: bool = True) -> Figures | None:
    """Of the runs of ``contestant`` that have a plain one beside them, all of one decoding; ``loops`` False leaves out
    the batches in which a text of its own or of the plain run loops. None where nothing is left."""
    beside = {run.batch: run for run in runs if run.contestant == PLAIN}
    own = [run for run in runs if run.contestant == contestant and run.batch in beside]
    if not loops:
        own = [run for run in own if not any(run.looping + beside[run.batch].looping)]
    if not own:
        return None
    plain = [beside[run.batch] for run in own]
    ratios = [run.speed / other.speed for run, other in zip(own, plain, strict=True)]
    low, high, coverage = median_interval(ratios)
    depths = pooled([run.depths for run in own])
    looping = [loop for run in own for loop in run.looping]
    return Figures(
        runs=len(own),
        speedup=statistics.median(ratios),
        low=low,
        high=high,
        coverage=coverage,
        speed=statistics.median(run.speed for run in own),
        tokens=sum(run.tokens for run in own),
        plain_tokens=sum(run.tokens for run in plain),
        forwards=sum(run.forwards for run in own),
        tokens_per_pass=sum(run.tokens for run in own) / sum(run.passes for run in own),
        accepted_by_depth=[depth.cumulative for depth in depths],
        accepted_given_parent=[depth.conditional for depth in depths],
        first_token=statistics.median(run.first_token for run in own),
        first_token_speedup=statistics.median(p.first_token / r.first_token for r, p in zip(own, plain, strict=True)),
        **_costs(own, plain),
        split=_split(own),
        looping=sum(looping) / len(looping),
        verdicts=dict(Counter(verdict for run in own for verdict in run.verdicts)),
    )


def pooled(runs: Sequence[Sequence[Depth]]) -> list[Depth]:
    """The counts of several runs added up, depth by depth."""
    deepest = max(map(len, runs), default=0)
    columns = [[depths[d] for depths in runs if d < len(depths)] for d in range(deepest)]
    return [Depth(*(sum(counts) for counts in zip(*column, strict=True))) for column in columns]


def _costs(own: Sequence[Run], plain: Sequence[Run]) -> dict[str, float | None]:
    """What a step's parts take, what the loops took, and what one half says of the other; None = not measured."""
    steps, verifies = sum(run.steps for run in own), sum(run.verify_steps for run in own)
    known = all(run.split for run in own)
    draft = _over(sum(run.split["draft"] for run in own), steps) if known else None
    verify = _over(sum(run.split["verify"] for run in own), verifies) if known else None
    step = _over(sum(run.loop_seconds for run in plain), sum(max(run.steps - 1, 0) for run in plain))
    pairs = list(zip(own, plain, strict=True))
    fitted, left = halves(pairs)
    outside = sum(run.outside_seconds for run in own)
    predicted, measured = (prediction(fitted), _ratio(left)) if known and left else (None, None)
    return {
        "draft": draft,
        "verify": verify,
        "plain_step": step,
        "loop_speedup": _ratio(pairs),
        "predicted": predicted,
        "measured": measured,
        "outside": _over(outside, sum(run.loop_seconds for run in own)),
        "outside_token": _over(outside, sum(run.loop_tokens for run in own)),
    }


def halves(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Pairs of a run and the plain one beside it: every other one, and those between, as many of each task in both."""
    tasks = list(dict.fromkeys(run.task for run, _ in pairs))
    ordered = sorted(pairs, key=lambda pair: (tasks.index(pair[0].task), pair[0].batch))
    return ordered[::2], ordered[1::2]


def prediction(pairs: Sequence[Pair]) -> float | None:
    """Speed-up of the decoding loop by the cost model: tokens of a step / (verify + draft + what is outside of both),
    over the tokens of a plain loop a second. Prefill, and the pass that runs with the end of a prompt, are in neither.
    None where it was not measured."""
    own, plain = [run for run, _ in pairs], [run for _, run in pairs]
    steps, verifies = sum(run.steps for run in own), sum(run.verify_steps for run in own)
    rate = _over(sum(run.loop_tokens for run in plain), sum(run.loop_seconds for run in plain))
    if not steps or not verifies or not rate:
        return None
    tokens = sum(run.loop_tokens for run in own) / verifies
    beside = sum(run.split["draft"] + run.outside_seconds for run in own) / steps
    return tokens / (sum(run.split["verify"] for run in own) / verifies + beside) / rate


def _ratio(pairs: Sequence[Pair]) -> float | None:
    """Tokens a second of the loops, over those of the plain loops beside them."""
    ours, theirs = (
        _over(sum(pair[side].loop_tokens for pair in pairs), sum(pair[side].loop_seconds for pair in pairs))
        for side in (0, 1)
    )
    return ours / theirs if ours and theirs else None


def _over(total: float, count: float) -> float | None:
    return total / count if count else None


def _split(own: Sequence[Run]) -> dict[str, float]:
    """Shares of the wall time by part, what no part accounts for as OTHER."""
    if not all(run.split for run in own):
        return {}
    wall = sum(run.seconds for run in own)
    parts = {part: sum(run.split[part] for run in own) for part in own[0].split}
    return {part: value / wall for part, value in (parts | {OTHER: wall - sum(parts.values())}).items()}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(low, high, coverage): the k-th smallest and k-th largest value, k as large as ``confidence`` allows, and the
    chance that the median of whatever the values were drawn from lies between them.

    Binomial, no shape assumed. It is what a bootstrap of the median tends to, without its chance and with a coverage
    that holds for few values too. Below six values no pair reaches 95 %: then the range, and its smaller chance.
    """
    ordered, n = sorted(values), len(values)
    outside, rank = 2 / 2**n, 1
    while rank < n // 2 and 1 - outside - 2 * comb(n, rank) / 2**n >= confidence:
        outside += 2 * comb(n, rank) / 2**n
        rank += 1
    return ordered[rank - 1], ordered[n - rank], 1 - outside


def loops_at_end(ids: Sequence[int], longest: int = 32) -> bool:
    """Whether the last tokens are one run of up to ``longest`` tokens repeated at least four times and 12 tokens."""
    for size in range(1, longest + 1):
        tail = max(LOOP_TIMES * size, LOOP_TOKENS)
        if len(ids) >= tail and all(ids[-i] == ids[-i - size] for i in range(1, tail - size + 1)):
            return True
    return False
