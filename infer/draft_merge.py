"""Several sources of guesses as one: the union of their trees, the first source's guesses first.

Legend: B rows, n nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.infer.draft_ngram import from_lists
from headstart.infer.drafter import Drafter, Source
from headstart.infer.grow import Budget, Sampling
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree


@dataclass(frozen=True)
class Merged:
    """A union of deterministic sources. They share the nodes of a pass: each may fill what those before it left, and
    the first at most ``share`` of them where others follow."""

    sources: tuple[Source, ...]
    share: float = 0.5

    @property
    def name(self) -> str:
        """All names."""
        return " + ".join(source.name for source in self.sources)

    @property
    def depth(self) -> int:
        """The deepest of them."""
        return max(source.depth for source in self.sources)

    @property
    def wants(self) -> tuple[int, ...]:
        """The features of the one source that reads any."""
        return next((source.wants for source in self.sources if source.wants), ())

    def first(self, nodes: int) -> int:
        """How many of ``nodes`` the first source may fill, its root included."""
        return min(nodes, max(2, round(self.share * nodes)))

    def check(self, model: Any) -> list[str]:
        """All must fit; two that read features must read the same."""
        readers = {source.wants for source in self.sources if source.wants}
        if len(self.sources) < 2 or len(readers) > 1 or not 0 < self.share < 1:
            raise ValueError(
                f"a merge needs two sources or more, of which those that read features read the same ones, and a share "
                f"between 0 and 1; got {self.name or 'none'}, features {sorted(readers)}, share {self.share}"
            )
        return [note for source in self.sources for note in source.check(model)]

    chain = False

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Drafter:
        """A drafter for one call. Nothing is drawn: only deterministic trees can be merged."""
        return _Union([source.drafter(model, ends) for source in self.sources], self)


class _Union:
    """Asks every drafter and merges what they say."""

    def __init__(self, drafters: Sequence[Drafter], source: Merged) -> None:
        self.wants = source.wants
        self._drafters, self._first = drafters, source.first
        self._depths = [part.depth for part in source.sources]

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """All begin with the same prompt."""
        for drafter in self._drafters:
            drafter.start(ids, lengths, room)

    def observe(self, seen: Seen) -> None:
        """All see everything, also what another one guessed."""
        for drafter in self._drafters:
            drafter.observe(seen)

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """The union below root [B], at most ``budget.nodes`` nodes."""
        first = self._first(budget.nodes)
        trees = []
        for place, (drafter, depth) in enumerate(zip(self._drafters, self._depths, strict=True)):
            nodes = first if place == 0 else budget.nodes
            trees.append(drafter.grow(root, budget._replace(nodes=nodes, depth=min(depth, budget.depth))))
        return merge(trees, budget.nodes)


def merge(trees: Sequence[DraftTree], nodes: int) -> DraftTree:
    """Union of deterministic trees [B, n_i] of the same roots, cut at ``nodes``; earlier trees first, no path twice.

    A node claims the most that any tree claims for it; nothing is claimed where a tree makes no claims.
    """
    if any(tree.drawn is not None for tree in trees):
        raise ValueError(
            "only deterministic trees can be merged: a sampled guess is tied to the siblings it was drawn with"
        )
    root, merged = trees[0].tokens[:, 0], []
    told = all(tree.logq is not None or tree.tokens.shape[1] == 1 for tree in trees)
    claims = [torch.zeros_like(tree.tokens) if tree.logq is None else tree.logq for tree in trees]
    lists = [
        (tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist(), logq.tolist())
        for tree, logq in zip(trees, claims, strict=True)
    ]
    claimed = []
    for row in range(root.shape[0]):
        tokens, parents, chances = [int(root[row])], [-1], [0.0]
        children: dict[tuple[int, int], int] = {}
        for all_tokens, all_parents, all_valid, all_claims in lists:
            place = {0: 0}  # node of this tree -> node of the union
            for node in range(1, len(all_tokens[row])):
                parent = place.get(all_parents[row][node])
                if not all_valid[row][node] or parent is None:
                    continue
                key = (parent, all_tokens[row][node])
                if key not in children:
                    if len(tokens) >= nodes:
                        continue
                    children[key] = len(tokens)
                    tokens.append(key[1])
                    parents.append(parent)
                    chances.append(-math.inf)
                place[node] = at = children[key]
                chances[at] = max(chances[at], all_claims[row][node])
        merged.append((tokens, parents))
        claimed.append(chances)
    return from_lists(merged, root, claimed if told else None)
