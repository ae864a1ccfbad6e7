"""Report: what a call did, counted so that the numbers add up to the tokens that came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch

PARTS = ("prefill", "draft", "plan", "verify", "accept", "commit")  # of a call's time
OUTSIDE = ("plan", "accept", "commit")  # of these, what a step does outside of the draft and the target


class Depth(NamedTuple):
    """Passes at one depth of their trees."""

    offered: int  # had a guess that deep on offer
    reached: int  # of those, kept the guess above it
    kept: int  # of those, kept the guess at this depth

    @property
    def cumulative(self) -> float:
        """Share of the passes that offered a guess here which kept it."""
        return self.kept / self.offered if self.offered else 0.0

    @property
    def conditional(self) -> float:
        """The same share among the passes in which the depth above was kept."""
        return self.kept / self.reached if self.reached else 0.0


@dataclass
class Report:
    """Counts of one call. A pass is one row in one verifying forward; drafts after a stop count for nothing."""

    drafter: str = ""
    rule: str = "match"
    lossless: bool = True
    tokens: int = 0  # emitted, all rows
    passes: int = 0  # verifying forwards, counted once per row that was not finished
    forwards: int = 0  # forwards of the target, prefill included
    prefill_forwards: int = 0
    steps: int = 0  # verifying forwards, whatever the number of rows
    verify_steps: int = 0  # of these, the ones whose time is in "verify": not those that ran with the end of the prompt
    nodes: int = 0  # verified, all passes, roots included
    syncs: int = 0  # times accepting and streaming waited for the device's answer; on a CPU they cost nothing
    plan: str = "fixed"  # how a step's tree was chosen
    plain_steps: int = 0  # steps run without guesses because the plan expected none to pay
    dtype: str = ""
    attention: str = ""
    rounds: list[tuple[int, int]] = field(default_factory=list)  # per pass: guesses accepted, guesses on offer in depth
    row_of: list[int] = field(default_factory=list)  # per pass: the row
    ranks: Counter[tuple[int, int]] = field(
        default_factory=Counter
    )  # (depth, place among siblings) of accepted guesses
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> str:
        """What can be relied on: the very text of plain decoding, or a text that the same call gives again, or less."""
        if not self.lossless:
            return "neither the target's law nor, with other trees, the same text"
        if self.rule == "match" and self.dtype == "float64":
            return "the text of plain decoding, whatever the plan"
        text = "the text of plain decoding up to near ties" if self.rule == "match" else "the target's law"
        again = "the same call gives it again" if self.plan == "fixed" else "only plan='fixed' gives it again for sure"
        return f"{text}; {again}"

    @property
    def tokens_per_pass(self) -> float:
        """tau: tokens emitted per pass, the bonus token included."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def total_seconds(self) -> float:
        """Wall time of the call."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """All rows together, prefill included."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def accepted_by_depth(self) -> list[float]:
        """Cumulative: share of passes that offered depth d whose guess at depth d was accepted."""
        return [depth.cumulative for depth in self.depths]

    @property
    def accepted_given_parent(self) -> list[float]:
        """Conditional: the same share among the passes in which depth d - 1 was accepted."""
        return [depth.conditional for depth in self.depths]

    @property
    def depths(self) -> list[Depth]:
        """What became of the guesses at each depth, from 1 on."""
        deepest = max((offered for _, offered in self.rounds), default=0)
        on_offer = [[kept for kept, offered in self.rounds if offered >= d] for d in range(1, deepest + 1)]
        return [
            Depth(len(passes), sum(kept >= d - 1 for kept in passes), sum(kept >= d for kept in passes))
            for d, passes in enumerate(on_offer, 1)
        ]

    @property
    def mean_accepted(self) -> float:
        """Accepted guesses per pass, the bonus token not counted."""
        return sum(a for a, _ in self.rounds) / len(self.rounds) if self.rounds else 0.0

    @property
    def accepted_by_rank(self) -> list[list[float]]:
        """Per depth: which share of all passes accepted the first, second ... child on offer there."""
        deepest = max((depth for depth, _ in self.ranks), default=0)
        widest = [max((r for d, r in self.ranks if d == depth), default=-1) for depth in range(1, deepest + 1)]
        return [[self.ranks[d, r] / self.passes for r in range(most + 1)] for d, most in enumerate(widest, 1)]

    @property
    def by_row(self) -> list[dict[str, float]]:
        """Of each row of the batch: tokens (also those written while others went on), passes, tokens per pass."""
        rows: list[dict[str, float]] = []
        for row in range(max(self.row_of, default=-1) + 1):
            own = [accepted + 1 for (accepted, _), of in zip(self.rounds, self.row_of, strict=True) if of == row]
            rows.append({"tokens": sum(own), "passes": len(own), "tokens_per_pass": sum(own) / max(len(own), 1)})
        return rows

    def add(
        self, accepted: int, offered: int, stopped: bool, *, row: int = 0, nodes: int = 1, ranks: Sequence[int] = ()
    ) -> None:
        """One pass of one row, with the places of its accepted guesses among their siblings.

        A stop cuts what was on offer: nobody knows what would have become of the rest.
        """
        self.passes += 1
        self.tokens += accepted + 1
        self.nodes += nodes
        self.rounds.append((accepted, accepted if stopped else offered))
        self.row_of.append(row)
        self.ranks.update(enumerate(ranks, 1))

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists: for JSON, logs and tables."""
        names = ("drafter", "rule", "lossless", "dtype", "attention", "tokens", "passes", "steps", "tokens_per_pass")
        more = ("forwards", "prefill_forwards", "verify_steps", "nodes", "syncs", "mean_accepted", "accepted_by_depth")
        last = ("accepted_given_parent", "accepted_by_rank", "tokens_per_second", "by_row", "notes")
        plan = ("plan", "plain_steps", "holds")
        return {name: getattr(self, name) for name in (*names, *more, *plan, *last)} | {"seconds": dict(self.seconds)}

    def __str__(self) -> str:
        lossless = "lossless" if self.lossless else "LOSSY"
        split = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        depth = " ".join(f"{share:.2f}" for share in self.accepted_by_depth) or "-"
        lines = [
            f"{self.tokens} tokens in {self.passes} passes: {self.tokens_per_pass:.2f} tokens per pass "
            f"({self.drafter}, rule {self.rule}, {lossless})",
            f"accepted by depth {depth}; {self.tokens_per_second:.1f} tokens/s; {split}",
            f"plan {self.plan}: {self.plain_steps} of {self.steps} steps plain, {self.nodes} nodes; {self.holds}",
        ]
        return "\n".join(lines + self.notes)


class Clock:
    """Splits time between named parts: each ``lap`` charges the time since the last one.

    An accelerator works while the host goes on, so there a lap is a mark behind the work it was given so far. A part is
    charged with what passed on the device between two marks, whoever waited for whom, and nobody waits for the clock's
    sake before ``stop``.
    """

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        """``seconds`` by part, which are added to; the ``device`` that does the work."""
        self._seconds, self._device = seconds, device
        self._last = perf_counter()
        self._marks: list[tuple[str, Any]] = []
        if device.type != "cpu":
            self.lap("")

    def lap(self, part: str) -> None:
        """Charges the time since the last lap to ``part``."""
        if self._device.type != "cpu":
            mark = torch.Event(self._device, enable_timing=True)
            mark.record()
            self._marks.append((part, mark))
            return
        now = perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def stop(self) -> None:
        """The last lap was made: from here on all of it is in the seconds."""
        wait(self._device)
        for (_, before), (part, mark) in pairwise(self._marks):
            self._seconds[part] += before.elapsed_time(mark) / 1000
        self._marks = self._marks[-1:]


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked to."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
