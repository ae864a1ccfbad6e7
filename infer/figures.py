"""What the runs of a benchmark show: speed-ups with an interval, tokens per pass, loops, verdicts. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from typing import NamedTuple

PLAIN = "plain"  # the name of the reference: the target's own generate
ALL = "all tasks"  # the scope of all tasks together
LOOP_TIMES, LOOP_TOKENS = 4, 12  # a tail that repeats itself so often and so long is a loop


class Run(NamedTuple):
    """One batch decoded by one contestant."""

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
    looping: tuple[bool, ...]
    split: Mapping[str, float]  # seconds by part; empty where they are not known
    verdicts: tuple[str, ...] = ()  # what each text is, compared with the plain one
    remarks: tuple[str, ...] = ()  # where texts part, one line for each that does

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Figures(NamedTuple):
    """What a set of runs of one contestant shows. A speed-up is its tokens/s over the plain tokens/s on one batch."""

    runs: int
    speedup: float  # median
    low: float  # order statistics around it that hold the true median with a chance of ``coverage``
    high: float
    coverage: float
    speed: float  # median tokens per second
    tokens_per_pass: float  # all tokens over all passes
    first_token: float  # median seconds
    looping: float  # share of texts that end in a loop; loops flatter every drafter
    verdicts: dict[str, int]  # texts by verdict


def summary(runs: Sequence[Run], *, loops: bool = True) -> dict[str, dict[str, Figures]]:
    """Figures by contestant and then by task, ALL first; ``loops`` as in ``figures``. What has no runs is left out."""
    table: dict[str, dict[str, Figures]] = {}
    tasks = dict.fromkeys(run.task for run in runs)
    for name in dict.fromkeys(run.contestant for run in runs):
        scopes = {ALL: list(runs)} | {task: [run for run in runs if run.task == task] for task in tasks}
        found = {scope: figures(part, name, loops=loops) for scope, part in scopes.items()}
        table[name] = {scope: value for scope, value in found.items() if value is not None}
    return table


def figures(runs: Sequence[Run], contestant: str, *, loops: bool = True) -> Figures | None:
    """Of the runs of ``contestant`` that have a plain one beside them; ``loops`` False leaves out the batches in which
    a text of its own or of the plain run loops. None where nothing is left."""
    plain = {run.batch: run for run in runs if run.contestant == PLAIN}
    own = [run for run in runs if run.contestant == contestant and run.batch in plain]
    if not loops:
        own = [run for run in own if not any(run.looping + plain[run.batch].looping)]
    if not own:
        return None
    ratios = [run.speed / plain[run.batch].speed for run in own]
    low, high, coverage = median_interval(ratios)
    looping = [loop for run in own for loop in run.looping]
    return Figures(
        runs=len(own),
        speedup=statistics.median(ratios),
        low=low,
        high=high,
        coverage=coverage,
        speed=statistics.median(run.speed for run in own),
        tokens_per_pass=sum(run.tokens for run in own) / sum(run.passes for run in own),
        first_token=statistics.median(run.first_token for run in own),
        looping=sum(looping) / len(looping),
        verdicts=dict(Counter(verdict for run in own for verdict in run.verdicts)),
    )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(low, high, coverage): the k-th smallest and k-th largest value, k as large as ``confidence`` allows, and the
    chance that the median of whatever the values were drawn from lies between them.

    Binomial, no shape assumed. Below six values no pair reaches 95 %: then the range, and its smaller chance.
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
