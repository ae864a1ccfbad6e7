"""An oracle: knows what the target is going to say, and says it as often as asked.

It shows what drafting is worth on a machine at a given acceptance, and where a step's time goes, without trained heads.

Legend: B rows, P prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headstart.infer.draft_ngram import from_lists
from headstart.infer.drafter import Drafter
from headstart.infer.grow import Budget, Sampling
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree, root_only


@dataclass(frozen=True)
class Oracle:
    """``branch`` children on each of ``depth`` levels; with chance ``acceptance`` one of a level is the right one.

    All trees have one shape, right or wrong: below each level's right child, or one of its wrong ones, hangs the next.
    Where a text is none of ``texts``, or leaves it, every guess is wrong up to chance.
    """

    texts: list[list[int]]  # whole ones, prompts included
    acceptance: float  # of a guess, where the guesses above it were right
    depth: int = 5
    branch: int = 3
    seed: int = 0  # of the generator that every call begins with
    name: str = "oracle"
    wants: tuple[int, ...] = ()
    chain = False

    def check(self, model: Any) -> list[str]:
        """Fits every target; raises ValueError for sizes that make no sense."""
        vocab = model.config.get_text_config(decoder=True).vocab_size
        if not 0 <= self.acceptance <= 1 or self.depth < 1 or not 1 <= self.branch < vocab:
            raise ValueError(
                f"an oracle needs an acceptance from 0 to 1, a depth of at least 1 and 1 <= branch < {vocab} (the "
                f"vocabulary); got acceptance={self.acceptance}, depth={self.depth}, branch={self.branch}"
            )
        return []

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Drafter:
        """A drafter for one call; there is no law to draw from."""
        return _Foretelling(self, model.config.get_text_config(decoder=True).vocab_size, set(ends.tolist()))


class _Foretelling:
    """Where each row stands in the text it follows."""

    wants: tuple[int, ...] = ()

    def __init__(self, source: Oracle, vocab_size: int, ends: set[int]) -> None:
        self._source, self._vocab_size, self._ends = source, vocab_size, ends
        self._random = random.Random(source.seed)
        self._ahead: list[list[int]] = []  # of each row: what comes after its root; empty where that is not known

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """Finds the texts that begin with the prompts [B, P]."""
        prompts = [row[:n] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
        self._ahead = [next((t[len(p) :] for t in self._source.texts if t[: len(p)] == p), []) for p in prompts]

    def observe(self, seen: Seen) -> None:
        """Goes on by what a step emitted; the prompt is known from the start."""
        if seen.tree is not None:
            for row, (tokens, count) in enumerate(zip(seen.tokens.tolist(), seen.count.tolist(), strict=True)):
                followed = self._ahead[row][:count] == tokens[:count]
                self._ahead[row] = self._ahead[row][count:] if followed else []

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """A tree below root [B]."""
        if budget.depth < 1 or budget.nodes <= self._source.branch:
            return root_only(root)
        rooms = zip(root.tolist(), self._ahead, budget.room.tolist(), strict=True)
        trees = [self._tree(token, ahead, min(room, budget.depth), budget.nodes) for token, ahead, room in rooms]
        return from_lists(trees, root)

    def _tree(self, root: int, ahead: Sequence[int], depth: int, nodes: int) -> tuple[list[int], list[int]]:
        """Tokens and parents, the root first."""
        branch = self._source.branch
        tokens, parents, spine = [root], [-1], 0
        for d in range(min(depth, self._source.depth, (nodes - 1) // branch)):
            right = ahead[d] if d < len(ahead) else -1
            level = [t for t in self._random.sample(range(self._vocab_size), branch + 1) if t != right][:branch]
            place, told = self._random.randrange(branch), self._random.random() < self._source.acceptance
            if told and right >= 0:
                level[place] = right
            first = len(tokens)
            tokens += level
            parents += [spine] * branch
            spine = first + place
            if tokens[spine] in self._ends:
                break
        return tokens, parents
