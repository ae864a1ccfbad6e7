"""What was seen of a source's guesses: how far its claims hold, what its trees bring and cost; kept from call to call.

Legend: B rows, n nodes, k path length, d depth, D depths known, C classes of claims, S sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.infer.plan import SIZES, expected
from headstart.infer.worth import CLASSES, Guesses, Table

START = 2.0  # plain steps that guesses may lose before anything is known of them
MEMORY = 0.98  # what a drafted step leaves of the evidence before it: about fifty steps count
FORGET = 0.8  # the same in a probe: evidence from before the guesses were given up is old news
SLOWEST = 0.02  # weight of a step in the moving averages, once there were fifty
OFF, ON = 0.98, 1.05  # speed over plain steps below which drafting is given up, and with which it is taken up
TRIED = 10  # steps that this speed counts for at first
FIRST, LONGEST = 4, 64  # plain steps between two probes: doubled by each that fails
HOPE = 1.0  # evidence to begin with that a level brings as much as was hoped
DOUBT = 0.1  # what evidence weighs that is of tokens chosen in another way


@dataclass
class Learned:
    """What was seen of a source's guesses, from call to call."""

    claimed: Table  # [D, C] guesses that should have been kept, by their claims
    kept: Table  # [D, C] guesses that were
    brought: Table  # [D, 2] of levels by the depth above them: guesses that were kept, and that were hoped to be
    forecast: Table  # [D, S] tokens a row of drawn trees of that depth and size; NaN = not seen
    tokens: float = ON  # a row and drafted step, moving average
    cost: float = 1.0  # of a drafted step in plain steps, moving average
    steps: int = 0  # drafted since they were taken up
    purse: float = START  # plain steps that guesses may still lose
    on: bool = True
    wait: int = 0  # plain steps until the next probe
    pause: int = FIRST  # as many after the next probe that fails

    @classmethod
    def nothing(cls, depth: int) -> Learned:
        """Before the first guess of a source that guesses ``depth`` tokens: claims are trusted."""
        depth = max(depth, 1)
        claimed, kept, brought, forecast = (
            [[value] * wide for _ in range(depth)]
            for wide, value in ((CLASSES, 0.0), (CLASSES, 0.0), (2, 0.0), (len(SIZES), math.nan))
        )
        return cls(claimed, kept, brought, forecast)

    @property
    def speed(self) -> float:
        """Of drafted steps, over plain ones."""
        return self.tokens / self.cost

    def as_dict(self) -> dict[str, Any]:
        """For JSON, rounded: what is learned anew in every call need not be exact."""
        plain = {name: getattr(self, name) for name in ("tokens", "cost", "steps", "purse", "on", "wait", "pause")}
        tables = {name: getattr(self, name) for name in ("claimed", "kept", "brought", "forecast")}
        rows = {name: [[round(x, 4) for x in row] for row in table] for name, table in tables.items()}
        rows["forecast"] = [[None if x != x else x for x in row] for row in rows["forecast"]]
        return rows | {name: round(value, 4) if isinstance(value, float) else value for name, value in plain.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], depth: int) -> Learned:
        """What ``as_dict`` gave, for a source that guesses ``depth`` tokens; what does not fit is left out."""
        found = cls.nothing(depth)
        for name, value in ((n, v) for n, v in data.items() if hasattr(found, n)):
            known = getattr(found, name)
            if isinstance(known, list):
                rows = [[math.nan if x is None else float(x) for x in row] for row in value]
                if all(len(row) == len(known[0]) for row in rows):
                    known[: len(rows)] = rows[: len(known)]
            else:
                setattr(found, name, type(known)(value))
        found.purse = min(found.purse, START)  # what was gained elsewhere is not to be lost here
        return found

    def doubt(self) -> None:
        """What was seen is of tokens chosen in another way: it weighs little, and drafting is on trial again."""
        for table in (self.claimed, self.kept, self.brought):
            for at, row in enumerate(table):
                table[at] = [DOUBT * value for value in row]
        self.forecast = [[math.nan] * len(row) for row in self.forecast]
        self.tokens, self.cost, self.steps, self.on, self.wait, self.pause = ON, 1.0, 0, True, 0, FIRST

    def brings(self, depth: int) -> float:
        """What the guesses hoped for in a level below a frontier of ``depth`` are to be multiplied with."""
        right, hoped = self.brought[min(depth, len(self.brought) - 1)]
        return (right + HOPE) / (hoped + HOPE)

    def observe(
        self,
        guesses: Guesses,
        nodes: Sequence[Sequence[int]],
        counts: Sequence[int],
        usable: Sequence[bool],
        hoped: Mapping[int, float] | None = None,
    ) -> None:
        """Every verified guess of the rows ``usable`` [B] was kept or not.

        ``nodes`` [B, k] the paths that were kept and ``counts`` [B] their lengths; ``hoped`` guesses to be kept of the
        levels that were drafted, by the depth above them. A level whose nodes were not worth verifying brought nothing.
        """
        memory = MEMORY if self.on else FORGET
        for table in (self.claimed, self.kept, self.brought):
            for at, row in enumerate(table):
                table[at] = [memory * value for value in row]
        rows = [b for b, use in enumerate(usable) if use]
        for b in rows:
            own = (guesses.parents[b], guesses.depth[b], guesses.claimed[b], guesses.kind[b])
            self._one(*own, nodes[b][: counts[b]])
        share = len(rows) / max(sum(count > 0 for count in counts), 1)
        for depth, hope in ({} if hoped is None else hoped).items():
            if depth < len(self.brought):
                self.brought[depth][0] += sum(counts[b] > 1 + depth for b in rows)
                self.brought[depth][1] += share * hope

    def _one(
        self,
        parents: Sequence[int],
        depths: Sequence[int],
        claims: Sequence[float],
        kinds: Sequence[int],
        path: Sequence[int],
    ) -> None:
        """The guesses of one row, of which those on ``path``, root included, were right."""
        last = len(self.claimed) - 1
        for node, depth in enumerate(depths):
            if depth:
                at, kind = depth - 1 if depth <= last else last, kinds[node]
                self.claimed[at][kind] += claims[node]
                self.kept[at][kind] += node in path

    def foresee(self, chance: Sequence[Sequence[float]], depth: Sequence[Sequence[int]], idle: int) -> None:
        """What trees of drawn guesses are worth that are no deeper and larger than the one with ``chance`` [B, n] at
        ``depth`` [B, n]; ``idle`` rows have no guesses."""
        sizes = [size for size in SIZES if size <= len(chance[0])]
        for d, seen in enumerate(self.forecast[: max(map(max, depth))], 1):
            rows = zip(chance, depth, strict=True)
            shallow = [[c if at <= d else 0.0 for c, at in zip(*row, strict=True)] for row in rows]
            for i, total in enumerate(expected(shallow, sizes)):
                found = (total - idle) / (len(chance) - idle)
                seen[i] = found if math.isnan(seen[i]) else seen[i] + SLOWEST * (found - seen[i])

    def weigh(self, tokens: float, cost: float) -> None:
        """A drafted step that brought ``tokens`` a row at ``cost`` plain steps: drafting is given up or taken up.

        What it brought counts, not what was expected of it: many small chances are each overrated a little.
        """
        self.steps += 1
        weight = max(SLOWEST, 1.0 / (TRIED + self.steps))
        self.tokens += weight * (tokens - self.tokens)
        self.cost += weight * (cost - self.cost)
        if self.on:
            self.on, self.wait = self.speed >= OFF, self.pause
            self.pause = FIRST if self.steps >= 1 / SLOWEST else self.pause
        elif tokens > cost:  # a probe that paid: guesses are taken up, and given up again soon if that was luck
            self.on, self.steps, self.tokens = True, 0, max(self.tokens, ON * self.cost)
            self.brought = [[0.0, 0.0] for _ in self.brought]
        else:
            self.pause = min(2 * self.pause, LONGEST)
            self.wait = self.pause
