"""Guesses without a model: prompt lookup (what followed the same words before) and token recycling (what the target
itself thought likely after a token).

Legend: B rows, P prompt, n nodes, k path length, w frontier, c children, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.infer.drafter import Drafter
from headstart.infer.grow import Budget, Children, Sampling, best_first
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree, root_only


@dataclass(frozen=True)
class PromptLookup:
    """Continuations of the longest earlier match of the last tokens, several of them as a trie (Saxena 2023).

    The longest match comes first, among equals the latest one; all of them share the nodes of the budget.
    """

    longest: int = 4  # tokens of a match
    shortest: int = 1
    matches: int = 8  # continuations looked at
    reach: int = 2  # guesses for each token of the match: a short one says little about what comes later
    depth: int = 10  # guesses on a path at most
    name: str = "prompt-lookup"
    wants: tuple[int, ...] = ()
    chain = False

    def check(self, model: Any) -> list[str]:
        """Fits every target; raises ValueError for sizes that make no sense."""
        if not 1 <= self.shortest <= self.longest or min(self.matches, self.reach, self.depth) < 1:
            raise ValueError(
                f"prompt lookup needs 1 <= shortest <= longest and matches, reach and depth of at least 1; got {self}"
            )
        return []

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Drafter:
        """A drafter for one call; there is no law to draw from."""
        return _Lookup(self, set(ends.tolist()))


class _Lookup:
    """An index of every n-gram of each row's text, kept up to date token by token."""

    wants: tuple[int, ...] = ()

    def __init__(self, source: PromptLookup, ends: set[int]) -> None:
        self._source, self._ends = source, ends
        self._texts: list[list[int]] = []
        self._places: list[dict[tuple[int, ...], list[int]]] = []  # n-gram -> where its continuations begin

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """Indexes the prompts [B, P]."""
        self._texts, self._places = [[] for _ in ids], [{} for _ in ids]
        for row, (tokens, length) in enumerate(zip(ids.tolist(), lengths.tolist(), strict=True)):
            self._extend(row, tokens[:length])

    def observe(self, seen: Seen) -> None:
        """Adds the tokens a step emitted; the prompt is known from the start."""
        if seen.tree is not None:
            for row, (tokens, count) in enumerate(zip(seen.tokens.tolist(), seen.count.tolist(), strict=True)):
                self._extend(row, tokens[:count])

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """A trie of continuations below root [B]."""
        rooms = enumerate(budget.room.tolist())
        tries = [self._trie(row, min(room, budget.depth), budget.nodes) for row, room in rooms]
        return from_lists([trie[:2] for trie in tries], root, [claimed for _, _, claimed in tries])

    def _extend(self, row: int, tokens: Sequence[int]) -> None:
        text, places = self._texts[row], self._places[row]
        for token in tokens:
            text.append(token)
            for n in range(self._source.shortest, min(self._source.longest, len(text)) + 1):
                places.setdefault(tuple(text[-n:]), []).append(len(text))

    def _trie(self, row: int, depth: int, nodes: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and claimed log-probabilities, the root first.

        A match of m tokens claims 1 - 2^-m of what the guesses before it left at a node: rough, but a longer match
        claims more, and that is what a plan calibrates.
        """
        text, places = self._texts[row], self._places[row]
        tokens, parents, claimed, left = [text[-1]], [-1], [0.0], [1.0]
        children: dict[tuple[int, int], int] = {}
        looked: set[int] = set()
        for n in range(min(self._source.longest, len(text)), self._source.shortest - 1, -1):
            for begin in reversed(places.get(tuple(text[-n:]), [])):
                if len(looked) >= self._source.matches or len(tokens) >= nodes:
                    return tokens, parents, claimed
                if begin in looked or begin >= len(text):
                    continue  # seen as part of a longer match, or the text's own end
                looked.add(begin)
                at = 0
                for token in text[begin : begin + min(depth, self._source.reach * n)]:
                    if (at, token) not in children:
                        if len(tokens) >= nodes:
                            break
                        children[at, token] = len(tokens)
                        tokens.append(token)
                        parents.append(at)
                        claimed.append(math.log(max(left[at] * (1 - 0.5**n), 1e-9)))
                        left[at] *= 0.5**n
                        left.append(1.0)
                    at = children[at, token]
                    if token in self._ends:
                        break
        return tokens, parents, claimed


@dataclass(frozen=True)
class TokenRecycling:
    """The target's own runners-up, kept by token: every verified row, accepted or not, says what may follow its token
    (Luo et al., arXiv 2408.08696). The table lives for one call."""

    successors: int = 8  # kept a token
    width: int = 8  # nodes expanded a level
    depth: int = 6
    name: str = "token-recycling"
    wants: tuple[int, ...] = ()
    chain = False

    def check(self, model: Any) -> list[str]:
        """Fits every target; raises ValueError for sizes that make no sense."""
        if self.successors < 1 or self.width < 1 or self.depth < 1:
            raise ValueError(f"token recycling needs successors, width and depth of at least 1; got {self}")
        return []

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Drafter:
        """A drafter for one call; there is no law to draw from."""
        return _Recycler(self, model.config.get_text_config(decoder=True).vocab_size, ends)


class _Recycler:
    """Table [V, c] of each token's likeliest successors, -1 = unknown; rows of a batch share it."""

    wants: tuple[int, ...] = ()

    def __init__(self, source: TokenRecycling, vocab_size: int, ends: Tensor) -> None:
        self._source, self._ends = source, ends
        c = min(source.successors, vocab_size)
        self._table = torch.full((vocab_size, c), -1, dtype=torch.int64, device=ends.device)
        share = 0.5 ** torch.arange(1, c + 1, device=ends.device)  # how likely the successor of a rank is, roughly
        self._logq = share.log()

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """Nothing is known before the first pass."""

    def observe(self, seen: Seen) -> None:
        """Top successors of every verified node [B, n]; padding is left out."""
        if seen.tree is None or seen.verified is None:
            return
        best = seen.verified.logits.topk(self._table.shape[1], dim=-1).indices.to(self._table.device)
        valid = seen.tree.valid.to(self._table.device)
        self._table[seen.tree.tokens.to(self._table.device)[valid]] = best[valid]

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """The likeliest chains of successors below root [B]."""
        if budget.depth < 1 or budget.nodes < 2:
            return root_only(root)
        return best_first(root, self._expand, budget, self._source.width, self._ends)

    def _expand(self, tokens: Tensor, above: Tensor, depth: int) -> Children:
        """Successors of the frontier [B, w]."""
        ids = self._table[tokens]
        return Children(self._logq.expand_as(ids).masked_fill(ids < 0, -torch.inf), ids.clamp(min=0))


def from_lists(
    trees: Sequence[tuple[list[int], list[int]]], like: Tensor, claimed: Sequence[list[float]] | None = None
) -> DraftTree:
    """One (tokens, parents) a row, the root first -> a tree [B, n] on the device of ``like``, short rows padded.

    ``claimed`` log-probabilities of the same nodes given their parents.
    """
    n = max(len(tokens) for tokens, _ in trees)
    tokens = [row + [0] * (n - len(row)) for row, _ in trees]
    parents = [row + [-1] * (n - len(row)) for _, row in trees]
    valid = [[i < len(row) for i in range(n)] for row, _ in trees]
    logq = None if claimed is None else torch.tensor([x + [0.0] * (n - len(x)) for x in claimed], device=like.device)
    return DraftTree(*(torch.tensor(x, device=like.device) for x in (tokens, parents, valid)))._replace(logq=logq)
