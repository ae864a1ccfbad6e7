"""What a tree's guesses are worth: the claims of who made them, set right by what was kept of guesses like them. Pure.

Trees of a step are small: Python's floats are done with one before a few operations on tensors have begun.

Legend: B rows, n nodes (node 0 = root), d depth, D depths known, C classes of claims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CLASSES = 16  # of claimed path probabilities, half a factor of two each; the last one holds all that is smaller
TRUST = (1.0, 3.0, 6.0)  # guesses kept as expected that a share starts from: of all guesses, of a depth, of a class
LN2 = math.log(2.0)
SMALL = -LN2 / 2 * (CLASSES - 1)  # logarithm of what falls into the last class

Table = list[list[float]]
"""[D, C], or as wide as said where it stands."""


class Guesses(NamedTuple):
    """A tree on the host, a list a row: what there is to decide by."""

    parents: list[list[int]]
    depth: list[list[int]]  # 0 at the root and on padding: what is deeper is a guess
    claimed: list[list[float]]  # probability of each node's path as the drafter claims it, 0 on padding
    kind: list[list[int]]  # class of that claim

    def taken(self, kept: Sequence[Sequence[int]]) -> Guesses:
        """The nodes ``kept`` of each row, ascending and each with its ancestors, renumbered."""
        parents = []
        for above, nodes in zip(self.parents, kept, strict=True):
            number = {node: at for at, node in enumerate(nodes)}
            parents.append([number.get(above[node], -1) for node in nodes])
        rows = list(enumerate(kept))
        depth = [[self.depth[row][node] for node in nodes] for row, nodes in rows]
        claimed = [[self.claimed[row][node] for node in nodes] for row, nodes in rows]
        kind = [[self.kind[row][node] for node in nodes] for row, nodes in rows]
        return Guesses(parents, depth, claimed, kind)


def claims(
    parents: list[list[int]], valid: Sequence[Sequence[bool]], logq: Sequence[Sequence[float]] | None
) -> Guesses:
    """What a tree of ``parents``, ``valid`` and ``logq`` (log-probabilities given the parent), a list a row, claims.

    A drafter without probabilities claims half for a first child, half of the rest for the next: after calibration
    that is a figure for each depth and place. A claim that is no number is none.
    """
    found = Guesses(parents, [], [], [])
    for row, above in enumerate(parents):
        path, depth, siblings = [0.0] * len(above), [0] * len(above), [0] * len(above)
        claimed, kind = [0.0] * len(above), [0] * len(above)
        claimed[0] = 1.0
        for node, (parent, there) in enumerate(zip(above, valid[row], strict=True)):
            if not there or parent < 0:
                continue
            siblings[parent] += 1
            own = -LN2 * siblings[parent] if logq is None else logq[row][node]
            path[node] = path[parent] + (own if own < 0.0 else 0.0 if own >= 0.0 else -math.inf)
            depth[node] = depth[parent] + 1
            claimed[node], kind[node] = math.exp(path[node]), class_of(path[node])
        found.depth.append(depth)
        found.claimed.append(claimed)
        found.kind.append(kind)
    return found


def class_of(path: float) -> int:
    """Class of a claimed path log-probability: half a factor of two each, whatever the rounding of a power of two."""
    return int(1e-6 - 2.0 / LN2 * path) if path > SMALL else CLASSES - 1


def ratios(claimed: Table, kept: Table) -> Table:
    """[D, C] what a claim of each depth and class is to be multiplied with to be the chance that the guess is kept.

    ``claimed`` and ``kept`` [D, C] say how many guesses of a depth and class should have been kept by their claims, and
    how many were. What is little known of a class is taken from its depth, of a depth from all guesses, and where
    nothing is known the claim stands: guesses that were never verified are no better than those that were.
    """
    of_all, of_depth, of_class = TRUST
    overall = (sum(map(sum, kept)) + of_all) / (sum(map(sum, claimed)) + of_all)
    found = []
    for right, should in zip(kept, claimed, strict=True):
        own = of_class * (sum(right) + of_depth * overall) / (sum(should) + of_depth)
        found.append([(r + own) / (s + of_class) for r, s in zip(right, should, strict=True)])
    return found


def worth(guesses: Guesses, ratio: Table) -> list[list[float]]:
    """Chance that each node is kept: 1 at the root, 0 on padding, and never above that of its parent.

    ``ratio`` [D, C]; what is deeper than known is as the deepest that is.
    """
    rows, last = [], len(ratio) - 1
    for parents, depths, claimed, kinds in zip(*guesses, strict=True):
        chance: list[float] = claimed[:]
        for node, depth in enumerate(depths):
            if depth:
                own = claimed[node] * ratio[depth - 1 if depth <= last else last][kinds[node]]
                above = chance[parents[node]]
                chance[node] = own if own < above else above
        rows.append(chance)
    return rows


def chances(paths: Sequence[Sequence[float]], ratio: Sequence[float]) -> list[list[float]]:
    """Chance that each guess of one depth is kept, by the claimed log-probabilities ``paths``, a list a row.

    ``ratio`` [C] of that depth.
    """
    return [[min(1.0, math.exp(path) * ratio[class_of(path)]) for path in row] for row in paths]
