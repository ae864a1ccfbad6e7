"""Rows into batches, in an order that depends on the seed alone: not on the number of processes, not on where a run
was interrupted.

A row of a batch, a line, holds one row of the training set, or, packed, as many as fit: documents that do not see each
other and whose positions begin at 0.

Legend: B lines, T tokens of the longest line in the batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.train.masking import Masked

POOL = 16  # batches sorted by length together: little padding, still well mixed


class Tokens(NamedTuple):
    """A batch before the target has seen it; ``rows`` are places in the training set, one a document."""

    tokens: Tensor  # [B, T] int64, 0 padded
    supervised: Tensor  # [B, T] bool
    document: Tensor  # [B, T] int64, index into ``rows``, -1 = padding
    rows: list[int]


def epoch_order(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of line indices for one epoch: shuffled, then grouped by length in pools, then shuffled again."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), batch_size * POOL):
        pool = sorted(order[start : start + batch_size * POOL], key=lambda i: lengths[i])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Lines of at most ``capacity`` tokens: each row, longest first, goes where it leaves the least room.

    Every epoch has the same lines, so that it also has as many micro-batches. Raises ValueError for a row that is too
    long.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a row of {max(lengths)} tokens does not fit into lines of {capacity}: cut it first")
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    lines: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens left -> lines
    rooms: list[int] = []  # the keys of which there are lines, ascending
    for row in sorted(order, key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[row])
        if at == len(rooms):
            line, room = len(lines), capacity
            lines.append([])
        else:
            room = rooms[at]
            line = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        lines[line].append(row)
        room -= lengths[row]
        others = with_room.setdefault(room, [])
        if not others:
            insort(rooms, room)
        others.append(line)
    return lines


class Stream:
    """Micro-batch j of an endless run over the rows; any j can be asked for, so resuming needs the number alone."""

    def __init__(self, rows: Sequence[Masked], batch_size: int, seed: int, capacity: int | None = None) -> None:
        """``batch_size`` lines a micro-batch; with a ``capacity`` they are packed up to so many tokens.

        Raises ValueError where there are no rows, or one is longer than ``capacity``.
        """
        if not rows:
            raise ValueError("no row to train on: heads would be saved untrained")
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        lengths = [len(row.ids) for row in rows]
        self.lines = [[i] for i in range(len(rows))] if capacity is None else pack(lengths, capacity, seed)
        self._lengths = [sum(lengths[i] for i in line) for line in self.lines]
        self.per_epoch = -(-len(self.lines) // batch_size)
        self._order: tuple[int, list[list[list[int]]]] = (-1, [])

    def __getitem__(self, index: int) -> Tokens:
        epoch, place = divmod(index, self.per_epoch)
        return packed(self.rows, self.epoch(epoch)[place])

    def epoch(self, number: int) -> list[list[list[int]]]:
        """The micro-batches of an epoch, as lines of places in ``rows``."""
        if self._order[0] != number:
            order = epoch_order(self._lengths, self.batch_size, self.seed, number)
            self._order = (number, [[self.lines[i] for i in batch] for batch in order])
        return self._order[1]

    def steps(self, epochs: float, window: int) -> int:
        """Optimizer steps for ``epochs``, each over ``window`` micro-batches; at least one."""
        return max(1, round(epochs * self.per_epoch / window))


def packed(rows: Sequence[Masked], lines: Sequence[Sequence[int]]) -> Tokens:
    """The rows of each of ``lines`` one after the other, the lines side by side, right padded."""
    width = max(sum(len(rows[i].ids) for i in line) for line in lines)
    tokens = torch.zeros(len(lines), width, dtype=torch.int64)
    supervised = torch.zeros(len(lines), width, dtype=torch.bool)
    document = torch.full((len(lines), width), -1, dtype=torch.int64)
    places: list[int] = []
    for b, line in enumerate(lines):
        start = 0
        for i in line:
            stop = start + len(rows[i].ids)
            tokens[b, start:stop] = torch.tensor(rows[i].ids)
            supervised[b, start:stop] = torch.tensor(rows[i].supervised)
            document[b, start:stop] = len(places)
            places.append(i)
            start = stop
    return Tokens(tokens, supervised, document, places)


def collate(rows: Sequence[Masked], chosen: Sequence[int]) -> Tokens:
    """The ``chosen`` rows side by side, right padded."""
    return packed(rows, [[i] for i in chosen])


def apart(batch: Tokens) -> Tokens:
    """The same documents in the same order, a line for each."""
    own = [batch.document == i for i in range(len(batch.rows))]
    lines = [torch.full((int(mask.sum()),), i) for i, mask in enumerate(own)]
    tokens, supervised = (pad_sequence([x[mask] for mask in own], batch_first=True) for x in batch[:2])
    document = pad_sequence(lines, batch_first=True, padding_value=-1)
    return Tokens(tokens, supervised, document, batch.rows)
