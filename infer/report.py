"""Report: what a call did, counted so that the numbers add up to the tokens that came out."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter


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
    rounds: list[tuple[int, int]] = field(default_factory=list)  # per pass: guesses accepted, guesses on offer in depth
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "draft", "verify", "other"), 0.0)
    )
    notes: list[str] = field(default_factory=list)

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
        return [self._share(d, d) for d in range(1, self._deepest() + 1)]

    @property
    def accepted_given_parent(self) -> list[float]:
        """Conditional: the same share among the passes in which depth d - 1 was accepted."""
        return [self._share(d, d - 1) for d in range(1, self._deepest() + 1)]

    @property
    def mean_accepted(self) -> float:
        """Accepted guesses per pass, the bonus token not counted."""
        return sum(a for a, _ in self.rounds) / len(self.rounds) if self.rounds else 0.0

    def add(self, accepted: int, offered: int, stopped: bool) -> None:
        """One pass of one row. A stop cuts what was on offer: nobody knows what would have become of the rest."""
        self.passes += 1
        self.tokens += accepted + 1
        self.rounds.append((accepted, accepted if stopped else offered))

    def _deepest(self) -> int:
        return max((offered for _, offered in self.rounds), default=0)

    def _share(self, depth: int, given: int) -> float:
        base = [a for a, offered in self.rounds if offered >= depth and (given == depth or a >= given)]
        return sum(a >= depth for a in base) / len(base) if base else 0.0

    def __str__(self) -> str:
        lossless = "lossless" if self.lossless else "LOSSY"
        split = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        depth = " ".join(f"{share:.2f}" for share in self.accepted_by_depth) or "-"
        lines = [
            f"{self.tokens} tokens in {self.passes} passes: {self.tokens_per_pass:.2f} tokens per pass "
            f"({self.drafter}, rule {self.rule}, {lossless})",
            f"accepted by depth {depth}; {self.tokens_per_second:.1f} tokens/s; {split}",
        ]
        return "\n".join(lines + self.notes)


class Clock:
    """Splits wall time between named parts: each ``lap`` charges the time since the last one."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        """Charges the time since the last lap to ``part``."""
        now = perf_counter()
        self._report.seconds[part] += now - self._last
        self._last = now
