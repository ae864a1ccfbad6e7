"""The order of rows: from the seed alone, every row once an epoch, any place reachable directly."""

from __future__ import annotations

import pytest
import torch

from headstart.train.batches import Stream, collate, epoch_order
from headstart.train.masking import Masked


def rows(count: int) -> list[Masked]:
    return [Masked([10 + i] * (3 + i % 5), [False] + [True] * (2 + i % 5)) for i in range(count)]


def test_every_row_once_an_epoch_in_an_order_of_the_seed() -> None:
    lengths = [3 + i % 7 for i in range(101)]
    one, again, other = epoch_order(lengths, 4, 0, 0), epoch_order(lengths, 4, 0, 0), epoch_order(lengths, 4, 1, 0)
    assert one == again != other != epoch_order(lengths, 4, 0, 1)
    assert sorted(i for batch in one for i in batch) == list(range(101))


def test_batches_hold_rows_of_similar_length() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 400, (512,), generator=generator).tolist()
    grouped = epoch_order(lengths, 8, 0, 0)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in grouped)
    assert padded < 1.15 * sum(lengths)


def test_any_micro_batch_can_be_asked_for_without_those_before_it() -> None:
    walked = Stream(rows(10), 2, 0)
    seen = [walked[i].rows for i in range(15)]  # three epochs
    assert [Stream(rows(10), 2, 0)[i].rows for i in (14, 7, 0)] == [seen[14], seen[7], seen[0]]
    for epoch in range(3):
        assert sorted(i for batch in seen[5 * epoch : 5 * epoch + 5] for i in batch) == list(range(10))


def test_fewer_rows_than_a_batch_still_train_and_none_is_an_error() -> None:
    """FC-044."""
    stream = Stream(rows(3), 8, 0)
    assert stream.steps(1.0, 4) == 1 and sorted(stream[0].rows) == [0, 1, 2]
    with pytest.raises(ValueError, match="no row to train on"):
        Stream([], 8, 0)


def test_padding_is_neither_supervised_nor_a_document() -> None:
    batch = collate(rows(5), [0, 4])
    assert batch.tokens.tolist() == [[10] * 3 + [0] * 4, [14] * 7]
    assert batch.supervised.tolist() == [[False, True, True] + [False] * 4, [False] + [True] * 6]
    assert batch.document.tolist() == [[0, 0, 0, -1, -1, -1, -1], [1] * 7]
