"""Who decides what a step may spend on guesses: nobody (Fixed), or the costs and what was seen (Adaptive).

Adaptive, before a step: draft or not; while it drafts: one level more or not; after it: how many of the guesses to
verify. None of it touches what comes out: a rule is exact for any tree, as long as no *drawn* guess is dropped or kept
for what it is. Trees of drawn guesses are therefore never cut once they are grown, nor ended while they grow: their
size is chosen beforehand, from the steps before.

It cannot cost much: a purse holds the plain steps that guesses may still lose. It begins with START, every token adds
SHARE of a plain step, what guesses gain or lose goes in or out, and no step may risk more than is there. However bad
the guesses and however wrong the estimates, a text of T tokens takes at most START + (1 + SHARE) T plain steps, in
measured costs: 3 % from 134 tokens on, over all calls of a Speculator that choose tokens in one way. Rows of a batch
count by their mean.

Legend: B rows, n nodes, w frontier, k path length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headstart.infer.accept import Accepted
from headstart.infer.grow import Budget, taken
from headstart.infer.learned import FIRST, Learned
from headstart.infer.plan import SIZES, Costs, Plan, best_size, expected
from headstart.infer.tree import DraftTree
from headstart.infer.worth import Guesses, Table, chances, claims, ratios, worth

SHARE, CAP = 0.015, 16.0  # of the purse, in plain steps: what each token adds, and what it holds at most
PROBE = (4, 2)  # nodes and depth of a probe
CHILDREN = (0.6, 0.2, 0.1)  # chances of a kept node's children before they are drafted, set right by what levels bring


class Planner(Protocol):
    """One object lives for one call."""

    name: str
    plain_steps: int  # steps run without guesses because none would have paid
    reads: int  # times the host waited for the device on the planner's behalf

    def open(self, budget: Budget, context: int, going: int) -> Budget:
        """A step begins: what it may spend of ``budget``, with ``context`` tokens cached and ``going`` rows left."""

    def cut(self, tree: DraftTree) -> DraftTree:
        """What of the grown tree [B, n] is verified."""

    def learn(self, accepted: Accepted, going: Sequence[bool]) -> None:
        """What became of it, on the CPU, and which rows [B] go on."""


class Fixed:
    """Always the whole budget, whatever it brings: a call can be repeated to the bit."""

    name = "fixed"
    plain_steps = 0
    reads = 0

    def open(self, budget: Budget, context: int, going: int) -> Budget:
        """All of it."""
        return budget

    def cut(self, tree: DraftTree) -> DraftTree:
        """All of it."""
        return tree

    def learn(self, accepted: Accepted, going: Sequence[bool]) -> None:
        """Nothing."""


class Adaptive:
    """Spends where it pays."""

    name = "adaptive"

    def __init__(self, costs: Costs, learned: Learned, rows: int, drawn: bool = False) -> None:
        """``learned`` is gone on with; ``rows`` B of the call; ``drawn``: trees may hold drawn guesses."""
        self.plain_steps, self.reads = 0, 0
        self.learned = learned
        self._costs, self._rows, self._drawn = costs, rows, drawn
        self._ratio: Table = []  # [D, C] what claims are multiplied with in this step
        self._told = learned  # what this step goes by
        self._least = 2  # nodes of the least tree this source can be asked for
        self._passes: dict[tuple[int, int], float] = {}  # (context, nodes) -> seconds but for drafting
        self._drafting: dict[int, float] = {}  # depth -> seconds
        self._begin(0, rows)

    def _begin(self, context: int, going: int) -> None:
        """What holds of a step before anything is drafted."""
        self._context, self._going = context // 64 * 64, max(going, 1)
        self._plain = self._seconds(1, 0)
        self._rate = 0.0  # tokens a second, all rows together, that seconds would give elsewhere
        self._drafts = self._asked = False
        self._depth, self._most = 0, 1  # levels of a tree of drawn guesses, nodes that may be verified
        self._grown: list[list[float]] = []  # [B, n] chances of the root and of every frontier drafted so far
        self._hoped: dict[int, float] = {}  # guesses to be kept of a level, by the depth above it
        self._cost = 1.0  # of this step, in plain steps
        self._seen: Guesses | None = None  # what is verified

    def open(self, budget: Budget, context: int, going: int) -> Budget:
        """Plain where nothing pays, but for a probe now and then, and where the purse does not hold a tree."""
        self._begin(context, going)
        if budget.depth < 1 or budget.nodes < 2:
            return budget  # no room for guesses: nothing to decide
        known = self.learned
        probe, depth = not known.on, self._deepest(budget.depth)
        if (probe and known.wait > 0) or depth < 1:
            if known.on:  # what could be lost is lost
                known.on, known.wait, known.pause = False, FIRST, FIRST
            known.wait -= 1
            self.plain_steps += 1
            return budget._replace(depth=0)
        self._drafts, self._most, self._told = True, budget.nodes, known
        if probe:  # a small tree tells as well what guesses are worth now; who claims nothing comes whole or not at all
            self._told = Learned.nothing(len(known.kept))
            self._most, depth = min(budget.nodes, PROBE[0]), min(depth, PROBE[1])
        self._ratio = ratios(self._told.claimed, self._told.kept)
        self._rate = self._going * (1.0 if probe else max(1.0, known.speed)) / self._plain
        budget = budget._replace(depth=depth)
        if self._drawn:
            budget = self._beforehand(budget._replace(nodes=self._most))
            self._depth = budget.depth
            return budget
        return budget._replace(more=self._more)

    def cut(self, tree: DraftTree) -> DraftTree:
        """The likeliest nodes, as many as pay; a tree whose guesses claim no chances stays whole or goes whole."""
        if not self._drafts:
            return tree
        guesses, n = self._on_host(tree), tree.parents.shape[1]
        deepest = max(map(max, guesses.depth))
        chance = worth(guesses, self._ratio)
        whole = self._drawn or tree.logq is None
        self._least = n if tree.logq is None and n > 1 else 2
        most = n if whole else min(n, self._most)
        sizes = [n] if self._drawn else [s for s in ((1,) if whole else SIZES) if s < most] + [most]
        drafted = 1 + len(self._hoped) if self._asked else max(deepest, self._depth, 1)  # or whole paths at once
        sizes = [s for s in sizes if s == 1 or self._drawn or self._affordable(s, drafted)]
        spent = [self._seconds(size, drafted) for size in sizes]
        best = len(sizes) - 1 if whole else best_size(expected(chance, sizes), spent, self._rate)
        size = sizes[best]
        self._cost = spent[best] / self._plain
        if n == 1:  # the source had nothing to say
            return tree
        self.plain_steps += size == 1
        if self._drawn:
            self.learned.foresee(chance, guesses.depth, self._rows - self._going)
        if size < n:
            kept = [sorted(sorted(range(n), key=row.__getitem__, reverse=True)[:size]) for row in chance]  # stable
            tree = taken(tree, torch.tensor(kept).to(tree.parents.device, non_blocking=True))
            guesses = guesses.taken(kept)
        self._seen = guesses
        return tree

    def learn(self, accepted: Accepted, going: Sequence[bool]) -> None:
        """Into the purse, and into what is known of the guesses."""
        counts = accepted.count.tolist()
        tokens = sum(counts) / max(sum(count > 0 for count in counts), 1)
        known = self.learned
        known.purse = min(CAP, known.purse + (1.0 + SHARE) * tokens - self._cost)
        if self._seen is not None:
            usable = [count > 0 and on for count, on in zip(counts, going, strict=True)]  # a stop cuts what was offered
            known.observe(self._seen, accepted.nodes.tolist(), counts, usable, self._hoped)
            known.weigh(tokens, self._cost)

    def _more(self, path: Tensor, depth: int) -> bool:
        """Whether a level below the frontier [B, w] of ``depth``, with its claims, gives more than its seconds would
        elsewhere; asked by who grows a tree."""
        if depth == 1:
            self._grown = [[1.0]] * len(path)  # of several sources in a merge, each asks for its own
        self._asked = True
        self.reads += path.device.type != "cpu"
        fresh = chances(path.tolist(), self._ratio[min(depth, len(self._ratio)) - 1])
        self._grown = [above + row for above, row in zip(self._grown, fresh, strict=True)]
        brings = self._told.brings(depth)
        below = [[chance * share * brings for chance in row for share in CHILDREN] for row in fresh]
        together = [above + row for above, row in zip(self._grown, below, strict=True)]
        worth_now, _ = self._best(self._grown, depth)
        worth_then, size = self._best(together, depth + 1)
        if worth_then < worth_now:
            return False
        hoped = 0.0
        for above, row in zip(self._grown, below, strict=True):
            ranked = sorted([*((chance, True) for chance in above), *((chance, False) for chance in row)], reverse=True)
            hoped += sum(chance for chance, old in ranked[:size] if not old)
        self._hoped[depth] = self._hoped.get(depth, 0.0) + hoped / brings
        return True

    def _best(self, chance: Sequence[Sequence[float]], depth: int) -> tuple[float, int]:
        """What the best tree of nodes with ``chance`` [B, n] gives over what its seconds would elsewhere; its size."""
        most = min(self._most, len(chance[0]))
        sizes = [*(size for size in SIZES if size < most), most]
        tokens, seconds = expected(chance, sizes), [self._seconds(size, depth) for size in sizes]
        best = best_size(tokens, seconds, self._rate)
        return tokens[best] - self._rate * seconds[best], sizes[best]

    def _beforehand(self, budget: Budget) -> Budget:
        """Depth and nodes of a tree of drawn guesses: the best of those whose worth was seen, at first the largest."""
        seen, found = self.learned.forecast, []
        for depth in range(1, budget.depth + 1):
            sizes = [size for size in SIZES if 1 < size < budget.nodes] + [budget.nodes]
            for size in (s for s in sizes if self._affordable(s, depth)):
                tokens = seen[depth - 1][SIZES.index(size)] if size in SIZES else math.nan
                found.append((0.0 if math.isnan(tokens) else tokens / self._seconds(size, depth), depth, size))
        _, depth, size = max(found, default=(0.0, 1, 2))
        return budget._replace(nodes=size, depth=depth)

    def _deepest(self, depth: int) -> int:
        """Levels, ``depth`` at most, whose drafting the purse allows with the least tree; 0 for none."""
        while depth and not self._affordable(self._least, depth):
            depth -= 1
        return depth

    def _affordable(self, nodes: int, depth: int) -> bool:
        """Whether the purse holds what a tree would lose if none of its guesses were kept."""
        return self._seconds(nodes, depth) / self._plain - 1.0 <= self.learned.purse

    def _seconds(self, nodes: int, depth: int) -> float:
        """Of a step like this one."""
        key = (self._context, nodes)
        if key not in self._passes:
            self._passes[key] = self._costs.verify(self._rows, self._context, nodes) + self._costs.overhead
        return self._passes[key] + self._draft(depth)

    def _draft(self, depth: int) -> float:
        if depth not in self._drafting:
            self._drafting[depth] = self._costs.draft(self._rows, depth)
        return self._drafting[depth]

    def _on_host(self, tree: DraftTree) -> Guesses:
        """Structure and claims, in one read of a device; tokens and laws are of no interest here."""
        if tree.parents.device.type == "cpu":
            return claims(tree.parents.tolist(), tree.valid.tolist(), None if tree.logq is None else tree.logq.tolist())
        self.reads += 1
        parts = [tree.parents.float(), tree.valid.float(), *([] if tree.logq is None else [tree.logq.float()])]
        parents, valid, *logq = torch.stack(parts).tolist()
        return claims([[int(parent) for parent in row] for row in parents], valid, logq[0] if logq else None)


class Planning:
    """What the calls of a Speculator plan with: nothing (``plan`` None), or costs and what earlier calls saw."""

    def __init__(self, plan: Plan | None, depth: int) -> None:
        """``depth`` guesses on a path at most."""
        self.plan, self._depth = plan, depth
        self.learned: dict[str, Learned] = {}

    def begin(self, kind: str, rows: int, drawn: bool) -> Planner:
        """A planner for a call of a kind (how its tokens are chosen), which goes on, on its own, where the last one of
        that kind ended."""
        if self.plan is None:
            return Fixed()
        learned = self.learned.get(kind)
        if learned is None:
            tuned = self.plan.learned
            learned = Learned.nothing(self._depth) if tuned is None else Learned.from_dict(tuned, self._depth)
            if kind != "greedy":
                learned.doubt()  # plans are tuned greedily
        return Adaptive(self.plan.costs, copy.deepcopy(learned), rows, drawn)

    def end(self, kind: str, planner: Planner) -> None:
        """The call has ended: the next one of its kind knows what it saw."""
        if isinstance(planner, Adaptive):
            self.learned[kind] = planner.learned
