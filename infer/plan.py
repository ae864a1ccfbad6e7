"""The cost model: what a step takes, what its guesses are worth, and the tree that pays best. Pure.

    tokens per second = expected tokens of a pass / (verify(n) + draft(d) + overhead)

By linearity the expected tokens of a pass are 1 + the sum over its nodes of the chance that each is kept, so the best n
nodes are the n most likely ones, whatever the tree. How many of them, and how deep to draft for them, follows from the
costs. Within a step tokens minus rate x seconds is maximised, where the rate is what the seconds would give elsewhere:
the steps together are then as fast as they can be, although they differ (an easy step may take more, a hard one less).

Legend: B rows, n nodes (node 0 = root), d depth.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from headstart.infer.grow import Shape

VERSION = 1  # of what ``Plan.as_dict`` writes
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # nodes at which passes are measured, and trees are cut


class Curve(NamedTuple):
    """Seconds of a verifying forward, one for each of the sizes."""

    rows: int
    context: int  # tokens cached a row
    seconds: tuple[float, ...]


class Draft(NamedTuple):
    """Seconds of drafting to depths 0, 1, 2 ...: taking in what was accepted, and growing a tree."""

    rows: int
    seconds: tuple[float, ...]


class Costs(NamedTuple):
    """What was measured on one machine, for one target, dtype, attention and source of guesses."""

    sizes: tuple[int, ...]  # nodes a row, ascending from 1
    curves: tuple[Curve, ...]
    drafts: tuple[Draft, ...]
    overhead: float  # seconds of a step outside of both: accepting, committing, counting

    def verify(self, rows: int, context: int, nodes: int) -> float:
        """Seconds of a forward over ``nodes`` nodes a row.

        Linear between what was measured, and past it as steep as its last part. A number of rows that was not measured
        is read from the largest smaller one, at as many tokens altogether.
        """
        known = _nearest([curve.rows for curve in self.curves], rows)
        curves = sorted(curve for curve in self.curves if curve.rows == known)
        places = [curve.context for curve in curves]
        return interpolated(
            places, [interpolated(self.sizes, curve.seconds, nodes * rows / known) for curve in curves], context
        )

    def draft(self, rows: int, depth: int) -> float:
        """Seconds of drafting to ``depth``."""
        known = _nearest([draft.rows for draft in self.drafts], rows)
        seconds = next(draft.seconds for draft in self.drafts if draft.rows == known)
        return interpolated(range(len(seconds)), seconds, depth)

    def step(self, rows: int, context: int, nodes: int, depth: int) -> float:
        """Seconds of a step that drafts to ``depth`` and verifies ``nodes`` nodes a row."""
        return self.verify(rows, context, nodes) + self.draft(rows, depth) + self.overhead

    def plain(self, rows: int, context: int) -> float:
        """Seconds of a step without guesses: the unit in which other steps are dear or cheap."""
        return self.step(rows, context, 1, 0)


class Best(NamedTuple):
    """A static tree and what it brings."""

    shape: Shape
    depth: int
    tokens: float  # expected a pass
    speedup: float  # over plain steps

    @property
    def nodes(self) -> int:
        """With the root."""
        return len(self.shape.parents)


class Plan(NamedTuple):
    """What ``headstart tune`` writes: costs, and what was learned about the guesses."""

    key: dict[str, str]  # what the costs hold for
    costs: Costs
    learned: dict[str, Any] | None = None  # of an Adaptive planner, see planner.py
    best: Best | None = None  # the static tree that paid best: for compiled passes, which want one shape

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = None if self.best is None else self.best._asdict() | {"shape": self.best.shape._asdict()}
        costs = {
            "sizes": self.costs.sizes,
            "curves": [curve._asdict() for curve in self.costs.curves],
            "drafts": [draft._asdict() for draft in self.costs.drafts],
            "overhead": self.costs.overhead,
        }
        return {"version": VERSION, "key": self.key, "costs": costs, "learned": self.learned, "best": best}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """What ``as_dict`` gave. Raises ValueError for another version or anything that is not a plan."""
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(f"a plan of version {VERSION} was expected, this one is of {version}: run headstart tune")
        try:
            costs, best = data["costs"], data["best"]
            read = Costs(
                tuple(costs["sizes"]),
                tuple(Curve(c["rows"], c["context"], tuple(c["seconds"])) for c in costs["curves"]),
                tuple(Draft(d["rows"], tuple(d["seconds"])) for d in costs["drafts"]),
                float(costs["overhead"]),
            )
            if best is not None:
                shape = Shape(tuple(best["shape"]["parents"]), tuple(best["shape"]["ranks"]))
                best = Best(shape, best["depth"], best["tokens"], best["speedup"])
            whole = read.sizes[0] == 1 and read.drafts and all(len(c.seconds) == len(read.sizes) for c in read.curves)
            if not (whole and read.curves):
                raise ValueError("sizes, curves and drafts do not fit together")
            return cls(dict(data["key"]), read, data["learned"], best)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"this is no whole plan ({error!r}): run headstart tune") from error


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in squares: pool adjacent violators (Ayer et al. 1955).

    A pass over more nodes takes no less time; what was measured says so only up to noise.
    """
    pools: list[tuple[float, int]] = []  # sum, count
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            before, many = pools.pop()
            total, count = total + before, count + many
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def interpolated(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Piecewise linear; the first value before the first place, past the last one as steep as the last part."""
    if at <= places[0] or len(places) == 1:
        return values[0]
    i = min(bisect_right(places, at), len(places) - 1)
    share = (at - places[i - 1]) / (places[i] - places[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def _nearest(known: Sequence[int], rows: int) -> int:
    """The largest number of rows up to ``rows``, or the smallest there is."""
    return max((r for r in known if r <= rows), default=min(known))


# trees ---------------------------------------------------------------------------------------------------------------


def expected(chance: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[float]:
    """Expected tokens of a pass, all rows together, with the best 1, 2 ... of ``sizes`` nodes of each row."""
    ordered = (sorted(row, reverse=True) for row in chance)
    total = list(itertools.accumulate(map(sum, zip(*ordered, strict=True))))
    return [total[min(size, len(total)) - 1] for size in sizes]


def best_size(tokens: Sequence[float], seconds: Sequence[float], rate: float) -> int:
    """Which choice gives most tokens over what its seconds would give elsewhere, at ``rate`` tokens a second.

    Of equals the first.
    """
    return max(range(len(tokens)), key=lambda i: (tokens[i] - rate * seconds[i], -i))


def best_static(acceptance: Sequence[Sequence[float]], costs: Costs, rows: int, context: int, most: int) -> Best | None:
    """The static tree of at most ``most`` nodes that gives most tokens a second; None where plain steps give more.

    ``acceptance[d][r]`` is the chance that the r-th best guess at depth d + 1 is right where the one above it was. As
    in Medusa (arXiv 2401.10774) that is taken to be the same on every path, and the tree grows by its likeliest node.
    """
    found, plain = None, costs.plain(rows, context)
    for depth in range(1, len(acceptance) + 1):
        paths, tokens = [], 1.0
        for chance, path in likeliest(acceptance[:depth], most - 1):
            paths.append(path)
            tokens += chance
            deepest = max(map(len, paths))
            speedup = tokens * plain / costs.step(rows, context, 1 + len(paths), deepest)
            if speedup > (1.0 if found is None else found.speedup):
                found = Best(Shape.of(paths), deepest, tokens, speedup)
    return found


def likeliest(acceptance: Sequence[Sequence[float]], count: int) -> list[tuple[float, tuple[int, ...]]]:
    """The ``count`` likeliest paths of ranks with their chances, the likeliest first; no path before its parent."""
    ordered = [sorted(range(len(ranks)), key=lambda r, of=ranks: -of[r]) for ranks in acceptance]  # type: ignore[misc]
    # (-chance, length, places in the order of each depth): a sibling comes after the place before it
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    if acceptance and acceptance[0]:
        heap.append((-acceptance[0][ordered[0][0]], 1, (0,)))
    found: list[tuple[float, tuple[int, ...]]] = []
    while heap and len(found) < count:
        chance, length, places = heapq.heappop(heap)
        path = tuple(ordered[d][place] for d, place in enumerate(places))
        if chance == 0.0:
            break
        found.append((-chance, path))
        own = acceptance[length - 1][path[-1]]
        if places[-1] + 1 < len(ordered[length - 1]):
            sibling = acceptance[length - 1][ordered[length - 1][places[-1] + 1]]
            heapq.heappush(heap, (chance / own * sibling, length, (*places[:-1], places[-1] + 1)))
        if length < len(acceptance) and acceptance[length]:
            first = acceptance[length][ordered[length][0]]
            heapq.heappush(heap, (chance * first, length + 1, (*places, 0)))
    return found


def conditional(ranks: dict[tuple[int, int], int], rounds: Sequence[tuple[int, int]]) -> list[list[float]]:
    """``acceptance`` for ``best_static``, by depth and place among siblings, from a Report's ``ranks``, ``rounds``."""
    found = []
    for depth in range(1, max((offered for _, offered in rounds), default=0) + 1):
        reached = sum(kept >= depth - 1 for kept, offered in rounds if offered >= depth)
        widest = max((r for d, r in ranks if d == depth), default=-1)
        found.append([ranks.get((depth, r), 0) / max(reached, 1) for r in range(widest + 1)])
    return found
