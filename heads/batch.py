"""What heads are taught from and what they answer, and which slot stands for which label. Pure.

Legend: B rows, T tokens, M slots, K depths, F features, Ht target hidden size. Slot t at depth d predicts token
t + 2 + d.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Teacher-forced training rows, right padded; a row may hold several documents one after the other."""

    tokens: Tensor  # [B, T] int64
    supervised: Tensor  # [B, T] bool: this token is a label
    document: Tensor  # [B, T] int64, -1 = padding; a slot and its label must share it
    features: Tensor  # [B, T, F] what the heads read
    last: Tensor  # [B, T, Ht] the teacher: last hidden state after the final norm


class Losses(NamedTuple):
    """Sums, not means: the caller divides by counts taken over all ranks and micro-batches."""

    total: Tensor  # [] weighted sum over supervised predictions, what ``extra`` adds included; differentiable
    loss: Tensor  # [K] unweighted sums per depth
    correct: Tensor  # [K] how often the head's first guess is the target's argmax
    alpha: Tensor  # [K] summed acceptance, sum_v min(p_v, q_v)
    count: Tensor  # type: ignore[assignment]  # [K] int64 supervised predictions per depth
    target: Tensor | None = None  # [2] where the target learns too: summed KL(original || adapted), and of how many


def predictions(batch_supervised: Tensor, document: Tensor, depth: int) -> Tensor:
    """[B, T] bool: predicted positions s whose slot s - 2 - depth exists in the same document."""
    shift = 2 + depth
    if document.shape[1] <= shift:
        return torch.zeros_like(batch_supervised)
    ok = batch_supervised & (document >= 0)
    ok[:, :shift] = False
    ok[:, shift:] &= document[:, shift:] == document[:, :-shift]
    return ok


def positions(document: Tensor) -> Tensor:
    """[B, T] -> [B, T] int64: places of tokens in their own document, which begins where the number changes."""
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def slot_table(slots: Tensor, length: int) -> Tensor:
    """[B, M] slots -> [B * T] flat table: position -> index into M (0 where no slot stands; callers mask)."""
    table = torch.zeros(slots.shape[0], length, dtype=torch.int64, device=slots.device)
    return table.scatter_(1, slots, torch.arange(slots.shape[1], device=slots.device).expand_as(slots)).flatten()
