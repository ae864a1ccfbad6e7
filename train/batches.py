"""Rows into batches, in an order that depends on the seed alone: not on the number of processes, not on where a run
was interrupted.

Legend: B rows, T tokens of the longest row in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.train.masking import Masked

POOL = 16  # batches sorted by length together: little padding, still well mixed


class Tokens(NamedTuple):
    """A batch before the target has seen it; ``rows`` are places in the training set, for naming."""

    tokens: Tensor  # [B, T] int64, 0 padded
    supervised: Tensor  # [B, T] bool
    document: Tensor  # [B, T] int64, the row's number in the batch, -1 = padding
    rows: list[int]


def epoch_order(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of row indices for one epoch: shuffled, then grouped by length in pools, then shuffled again."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), batch_size * POOL):
        pool = sorted(order[start : start + batch_size * POOL], key=lambda i: lengths[i])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


class Stream:
    """Micro-batch j of an endless run over the rows; any j can be asked for, so resuming needs the number alone."""

    def __init__(self, rows: Sequence[Masked], batch_size: int, seed: int) -> None:
        """Raises ValueError where there are no rows."""
        if not rows:
            raise ValueError("no row to train on: heads would be saved untrained")
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.lengths = [len(row.ids) for row in rows]
        self.per_epoch = -(-len(rows) // batch_size)
        self._order: tuple[int, list[list[int]]] = (-1, [])

    def __getitem__(self, index: int) -> Tokens:
        epoch, place = divmod(index, self.per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.lengths, self.batch_size, self.seed, epoch))
        return collate(self.rows, self._order[1][place])

    def steps(self, epochs: float, window: int) -> int:
        """Optimizer steps for ``epochs``, each over ``window`` micro-batches; at least one."""
        return max(1, round(epochs * self.per_epoch / window))


def collate(rows: Sequence[Masked], chosen: Sequence[int]) -> Tokens:
    """The ``chosen`` rows side by side, right padded."""
    width = max(len(rows[i].ids) for i in chosen)
    tokens = torch.zeros(len(chosen), width, dtype=torch.int64)
    supervised = torch.zeros(len(chosen), width, dtype=torch.bool)
    document = torch.full((len(chosen), width), -1, dtype=torch.int64)
    for place, i in enumerate(chosen):
        length = len(rows[i].ids)
        tokens[place, :length] = torch.tensor(rows[i].ids)
        supervised[place, :length] = torch.tensor(rows[i].supervised)
        document[place, :length] = place
    return Tokens(tokens, supervised, document, list(chosen))
