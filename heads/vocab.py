"""The draft vocabulary: which target tokens a head can say, built from counts of what the target says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def count_tokens(rows: Iterable[tuple[Sequence[int], Sequence[bool]]], vocab_size: int) -> Tensor:
    """Counts [V] int64 of the supervised tokens of (ids, supervised) rows."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids, supervised in rows:
        chosen = torch.tensor([i for i, s in zip(ids, supervised, strict=True) if s], dtype=torch.int64)
        counts += torch.bincount(chosen, minlength=vocab_size)
    return counts


def choose(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """The ``size`` most frequent target ids, ascending, [D] int64.

    ``counts`` [V]; ``always`` are ids kept whatever their count (end tokens). Ties go to the smaller id. Raises
    ValueError where more is asked for than there is.
    """
    vocab_size = counts.numel()
    if not 0 < size <= vocab_size:
        raise ValueError(f"draft vocabulary of {size} tokens asked for, the target has {vocab_size}: choose 1..that")
    if len(set(always)) > size:
        raise ValueError(f"draft vocabulary of {size} cannot hold the {len(set(always))} tokens that must be in it")
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    order = torch.argsort(ranked, descending=True, stable=True)
    return order[:size].sort().values


def coverage(counts: Tensor, chosen: Tensor) -> float:
    """Share of the counted tokens [V] that lies inside the draft vocabulary ``chosen`` [D]; caps acceptance."""
    total = int(counts.sum())
    return float(counts[chosen].sum()) / total if total else 0.0


def check_draft_ids(draft_ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError unless ``draft_ids`` [D] are distinct ascending ids of the target vocabulary."""
    ids = draft_ids.tolist()
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(
            f"draft_ids must be distinct, ascending and in 0..{vocab_size - 1}; these tables are of other heads"
        )
