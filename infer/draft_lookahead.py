"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target writes its own guesses, in parallel, while it verifies.

A window of W columns and L levels holds tokens that may come. It stands in the tree as a comb: level 0 is a chain from
the root, the higher levels of column i are a chain that hangs on its level 0 (W = 3, L = 3):

    root - 0 ---- 0 ---- 0          column i, level j: depth i + 1 + j
            \\      \\      \\
             1      1      1
              \\      \\      \\
               2      2      2      below every top stands the column's newest token, read from the same forward

A column with its newest token is an n-gram of L + 1 tokens and joins the pool; the pool's n-grams that begin with the
last known token are guesses, verified as chains from the root in that same forward. No second mask, no other model.

Legend: B rows, P prompt, n nodes, W columns, L levels, V target vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headstart.infer.draft_ngram import from_lists
from headstart.infer.drafter import Drafter
from headstart.infer.grow import Budget, Sampling
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree

Child = Callable[[int, int], int]
"""(node, token) -> the child of that token, -1 = there is none; nothing hangs on node -1."""


@dataclass(frozen=True)
class Lookahead:
    """n-grams of ``levels`` + 1 tokens from a Jacobi window of ``window`` columns.

    A pass has up to 1 + ``guesses`` * ``levels`` + ``window`` * ``levels`` nodes, fewer where paths agree. With a
    smaller budget the pool's chains stand first, and the window has fewer columns, then fewer levels.
    """

    window: int = 3  # columns
    levels: int = 3  # tokens a column = tokens a guess
    guesses: int = 2  # n-grams verified a pass, the latest ones first
    pool: int = 16  # n-grams kept a first token, the latest ones
    prompt: bool = True  # n-grams of the prompt are guesses too; those of the emitted text always are
    name: str = "lookahead"
    wants: tuple[int, ...] = ()
    chain = False

    @property
    def depth(self) -> int:
        """The top of the last column."""
        return self.window + self.levels - 1

    def check(self, model: Any) -> list[str]:
        """Fits every target; raises ValueError for sizes that make no sense."""
        if self.window < 1 or self.levels < 1 or not 1 <= self.guesses <= self.pool:
            raise ValueError(
                f"lookahead needs window and levels of at least 1 and 1 <= guesses <= pool (n-grams verified a pass, "
                f"n-grams kept a token); got {self}"
            )
        return []

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Drafter:
        """A drafter for one call; its guesses are deterministic, so there is no law to draw from."""
        return _Lookahead(self, frozenset(ends.tolist()))


class _Lookahead:
    """A window and a pool for every row."""

    wants: tuple[int, ...] = ()

    def __init__(self, source: Lookahead, ends: frozenset[int]) -> None:
        self._source, self._ends = source, ends
        self._rows: list[_Row] = []

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """Windows filled from the prompts [B, P], which the pools learn if they may."""
        prompts = zip(ids.tolist(), lengths.tolist(), strict=True)
        self._rows = [_Row(self._source, self._ends, tokens[:length]) for tokens, length in prompts]

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """Below root [B]: a trie of the pool's chains, then the comb; what both say stands once."""
        trees = []
        for row, token, room in zip(self._rows, root.tolist(), budget.room.tolist(), strict=True):
            trie = _Trie(token, budget.nodes, min(room, budget.depth), self._ends)
            for guess in row.guesses(token):
                node = 0
                for after in guess:
                    node = trie.child(node, after)
            comb(row.window, trie.child)
            trees.append((trie.tokens, trie.parents))
        return from_lists(trees, root)

    def observe(self, seen: Seen) -> None:
        """Reads the newest token of every column at its top node and moves the windows on.

        The comb is looked up in the tree that was verified: a merge numbers nodes its own way and may cut some.
        """
        if seen.tree is None or seen.verified is None:
            return
        counts = seen.count.tolist()
        tokens, parents, valid = (x.tolist() for x in seen.tree[:3])
        lists = zip(tokens, parents, valid, strict=True)
        combs = [comb(row.window, _among(*tree)) for row, tree in zip(self._rows, lists, strict=True)]
        tops = [(at, top) for at, columns in enumerate(combs) for _, top in columns if top >= 0 and counts[at]]
        newest = iter(_likeliest(seen.verified.logits, tops))
        for at, (row, columns, emitted) in enumerate(zip(self._rows, combs, seen.tokens.tolist(), strict=True)):
            if counts[at]:  # a finished row stays as it is
                new = [next(newest) if top >= 0 else -1 for _, top in columns]
                row.advance([height for height, _ in columns], new, emitted[: counts[at]])


class _Row:
    """One row's text, pool of n-grams and window [W][L]."""

    def __init__(self, source: Lookahead, ends: frozenset[int], prompt: Sequence[int]) -> None:
        self._source, self._ends = source, ends
        self._random = random.Random(0)  # alike for all rows: guesses must not depend on the place in the batch
        self._text: list[int] = []
        self._plain: list[int] = []  # the text without end tokens
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> continuations, the latest one last
        self._read(prompt, learn=source.prompt)
        self.window = [self._fill(source.levels) for _ in range(source.window)]

    def guesses(self, token: int) -> list[tuple[int, ...]]:
        """The continuations to try after ``token``, the latest one first."""
        return list(islice(reversed(self._pool.get(token, {})), self._source.guesses))

    def advance(self, heights: Sequence[int], new: Sequence[int], emitted: Sequence[int]) -> None:
        """After a step: column i stood ``heights[i]`` tokens high in the tree, and ``new[i]`` followed its top."""
        root, first = self._text[-1], self.window[0]
        self._read(emitted, learn=True)
        for column, height, token in reversed(list(zip(self.window, heights, new, strict=True))):
            if height:  # the nearest column comes last, so that its n-gram is the first one tried
                self._learn([*column[:height], token])
        if heights[0] and first[0] == emitted[0]:  # column 0 stands on the root, and the target agreed to that
            self._learn([root, *first[: heights[0]], new[0]][: self._source.levels + 1])
        self.window = moved(self.window, heights, new, len(emitted), self._ends, self._fill)

    def _read(self, tokens: Sequence[int], learn: bool) -> None:
        size = self._source.levels + 1
        for token in tokens:
            self._text.append(token)
            if token not in self._ends:
                self._plain.append(token)
            if learn and len(self._text) >= size:
                self._learn(self._text[-size:])

    def _learn(self, gram: Sequence[int]) -> None:
        """The n-gram becomes the latest one of its first token; nothing is kept past an end token."""
        key, *rest = gram
        end = next((i for i, token in enumerate(rest) if token in self._ends), len(rest))
        known = self._pool.setdefault(key, {})
        known.pop(tuple(rest[: end + 1]), None)
        known[tuple(rest[: end + 1])] = None
        if len(known) > self._source.pool:
            del known[next(iter(known))]

    def _fill(self, count: int) -> list[int]:
        """``count`` tokens that stand together somewhere in the row's own text."""
        text = self._plain or self._text
        begin = self._random.randrange(len(text))
        return [text[(begin + i) % len(text)] for i in range(count)]


class _Trie:
    """A row's tree while it grows; equal paths share their nodes."""

    def __init__(self, root: int, nodes: int, depth: int, ends: frozenset[int]) -> None:
        self.tokens, self.parents = [root], [-1]
        self._depths, self._children = [0], dict[tuple[int, int], int]()
        self._nodes, self._depth, self._ends = nodes, depth, ends

    def child(self, node: int, token: int) -> int:
        """A Child that makes the node where it is missing and may stand."""
        known = self._children.get((node, token), -1)
        if known >= 0 or node < 0 or len(self.tokens) >= self._nodes or self._depths[node] >= self._depth:
            return known
        if node and self.tokens[node] in self._ends:
            return -1
        self._children[node, token] = made = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(node)
        self._depths.append(self._depths[node] + 1)
        return made


def _among(tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]) -> Child:
    """A Child that looks nodes up in a tree, one row's lists [n] of it."""
    nodes = enumerate(zip(parents, tokens, valid, strict=True))
    children = {(parent, token): node for node, (parent, token, real) in nodes if node and real}
    return lambda node, token: children.get((node, token), -1)


def comb(window: Sequence[Sequence[int]], child: Child) -> list[tuple[int, int]]:
    """Climbs the columns of a window [W][L] from node 0; -> how high each one stands and its top node, -1 at height 0.

    With a ``child`` that makes nodes this grows the comb column by column, with one that looks them up it finds it.
    """
    base, columns = 0, []
    for column in window:
        base = node = child(base, column[0])
        height, top = 0, -1
        while node >= 0:
            height, top = height + 1, node
            node = child(node, column[height]) if height < len(column) else -1
        columns.append((height, top))
    return columns


def moved(
    window: Sequence[Sequence[int]],
    heights: Sequence[int],
    new: Sequence[int],
    count: int,
    ends: frozenset[int],
    fill: Callable[[int], list[int]],
) -> list[list[int]]:
    """The window [W][L] after ``count`` emitted tokens: what stood at depth e stands at depth e - count.

    Level j of column i was level j + 1 of column i + count - 1; ``new[i]`` stands above the ``heights[i]`` levels of
    column i that were in the tree. What the old window does not reach comes from ``fill``, and so does what replaces
    an end token: it would keep everything behind it out of the tree.
    """
    raised = [
        [*column[:height], token, *column[height + 1 :]] if height else list(column)
        for column, height, token in zip(window, heights, new, strict=True)
    ]
    size, fresh = len(window[0]), []
    for place in range(count - 1, count - 1 + len(window)):
        column = raised[place][1:] if place < len(raised) else []
        column += fill(size - len(column)) if len(column) < size else []
        fresh.append([fill(1)[0] if token in ends else token for token in column])
    return fresh


def _likeliest(logits: Tensor, nodes: Sequence[tuple[int, int]]) -> list[int]:
    """The argmax of ``logits`` [B, n, V] at (row, node) pairs; no other row is read."""
    if not nodes:
        return []
    rows, places = torch.tensor(nodes, device=logits.device).T
    likeliest: list[int] = logits[rows, places].argmax(-1).tolist()
    return likeliest
