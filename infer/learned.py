"""What was seen of a source's guesses: how far its claims hold, what its trees bring and cost; kept from call to call.

Legend: B rows, n nodes, k path length, d depth, D depths known, C classes of claims, S sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.infer.plan import CLASSES, SIZES, classes, expected
from headstart.infer.tree import DraftTree

START = 2.0  # plain steps that guesses may lose before anything is known of them
MEMORY = 0.96  # what a drafted step leaves of the evidence before it: about twenty-five steps count
FORGET = 0.8  # the same in a probe: evidence from before the guesses were given up is old news
SLOWEST = 0.05  # weight of a step in the moving averages, once there were twenty
OFF, ON = 0.98, 1.02  # speed over plain steps below which drafting is given up, and above which it is taken up again
FIRST, LONGEST = 4, 64  # plain steps between two probes: doubled by each that fails
ONWARD = (1.5, 2.0)  # evidence to begin with that a kept guess has a right child: three in four


@dataclass
class Learned:
    """What was seen of a source's guesses, from call to call."""

    claimed: Tensor  # [D, C] guesses that should have been kept, by their claims
    kept: Tensor  # [D, C] guesses that were
    onward: Tensor  # [D, 2] of kept nodes with children, by the children's depth: how many had a right one, how many
    forecast: Tensor  # [D, S] tokens a row of drawn trees of that depth and size; NaN = not seen
    tokens: float = 1.0  # a row and drafted step, moving average
    cost: float = 1.0  # of a drafted step in plain steps, moving average
    steps: int = 0  # drafted
    purse: float = START  # plain steps that guesses may still lose
    on: bool = True
    wait: int = 0  # plain steps until the next probe
    pause: int = FIRST  # as many after the next probe that fails

    @classmethod
    def nothing(cls, depth: int) -> Learned:
        """Before the first guess of a source that guesses ``depth`` tokens: claims are trusted."""
        depth = max(depth, 1)
        tables = (torch.zeros(depth, CLASSES), torch.zeros(depth, CLASSES), torch.zeros(depth, 2))
        return cls(*tables, torch.full((depth, len(SIZES)), torch.nan))

    @property
    def speed(self) -> float:
        """Of drafted steps, over plain ones."""
        return self.tokens / self.cost

    def as_dict(self) -> dict[str, Any]:
        """For JSON, rounded: what is learned anew in every call need not be exact."""
        plain = {name: getattr(self, name) for name in ("tokens", "cost", "steps", "purse", "on", "wait", "pause")}
        tables = {name: getattr(self, name) for name in ("claimed", "kept", "onward", "forecast")}
        rows = {name: [[round(x, 4) for x in row] for row in table.tolist()] for name, table in tables.items()}
        rows["forecast"] = [[None if x != x else x for x in row] for row in rows["forecast"]]
        return rows | {name: round(value, 4) if isinstance(value, float) else value for name, value in plain.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], depth: int) -> Learned:
        """What ``as_dict`` gave, for a source that guesses ``depth`` tokens; what does not fit is left out."""
        found = cls.nothing(depth)
        for name, value in ((n, v) for n, v in data.items() if hasattr(found, n)):
            known = getattr(found, name)
            if isinstance(known, Tensor):
                rows = torch.tensor([[torch.nan if x is None else x for x in row] for row in value])
                if rows.ndim == 2 and rows.shape[1] == known.shape[1]:
                    known[: len(rows)] = rows[: len(known)]
            else:
                setattr(found, name, type(known)(value))
        return found

    def onward_of(self, depth: int) -> float:
        """Chance that a kept node of ``depth`` has a right child, where it has any."""
        right, of = self.onward[min(depth, len(self.onward) - 1)].tolist()
        return float((right + ONWARD[0]) / (of + ONWARD[1]))

    def observe(
        self, tree: DraftTree, path: Tensor, depth: Tensor, nodes: Tensor, counts: Sequence[int], usable: Sequence[bool]
    ) -> None:
        """Every verified guess of the rows ``usable`` [B] was kept or not.

        ``tree``, its claims ``path`` and its ``depth`` [B, n] on the CPU; ``nodes`` [B, k] the paths that were kept and
        ``counts`` [B] their lengths.
        """
        memory, of = MEMORY if self.on else FORGET, torch.tensor(usable)
        right = torch.zeros_like(tree.valid).scatter_(1, nodes.clamp(min=0), True)  # the root is no guess
        asked = tree.valid & (depth > 0) & of[:, None]
        place = ((depth.clamp(1, len(self.claimed)) - 1) * CLASSES + classes(path))[asked]
        for table, values in ((self.claimed, path.exp()), (self.kept, right.float())):
            more = torch.bincount(place, weights=values[asked], minlength=table.numel())
            table.mul_(memory).add_(more.reshape(table.shape))
        self.onward.mul_(memory)
        for row in of.nonzero()[:, 0].tolist():
            last, kept = int(nodes[row, counts[row] - 1]), counts[row] - 1
            tried = kept + bool((tree.valid[row] & (tree.parents[row] == last)).any())
            self.onward[:kept, 0] += 1
            self.onward[:tried, 1] += 1

    def foresee(self, chance: Tensor, depth: Tensor, idle: int) -> None:
        """What trees of drawn guesses are worth that are no deeper and larger than the one with ``chance`` [B, n] at
        ``depth`` [B, n]; ``idle`` rows have no guesses."""
        most = sum(size <= chance.shape[1] for size in SIZES)
        for d in range(1, min(int(depth.max()), len(self.forecast)) + 1):
            total = torch.tensor(expected(torch.where(depth <= d, chance, 0.0), SIZES[:most]))
            found, before = (total - idle) / (len(chance) - idle), self.forecast[d - 1, :most]
            self.forecast[d - 1, :most] = torch.where(before.isnan(), found, before + SLOWEST * (found - before))

    def weigh(self, tokens: float, cost: float) -> None:
        """A drafted step that brought ``tokens`` a row at ``cost`` plain steps: drafting is given up or taken up.

        What it brought counts, not what was expected of it: many small chances are each overrated a little.
        """
        self.steps += 1
        weight = max(SLOWEST, 1.0 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.cost += weight * (cost - self.cost)
        if self.on:
            self.on, self.wait, self.pause = self.speed >= OFF, FIRST, FIRST
        elif tokens > cost:  # a probe that paid is followed by another one
            self.on, self.wait, self.pause = self.speed > ON, 0, FIRST
        else:
            self.pause = min(2 * self.pause, LONGEST)
            self.wait = self.pause
