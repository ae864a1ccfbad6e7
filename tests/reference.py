"""Slow, obvious implementations to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def depth_of(parents: Sequence[int], node: int) -> int:
    """Steps from ``node`` up to the root."""
    return 0 if parents[node] < 0 else 1 + depth_of(parents, parents[node])


def path_of(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to ``node``."""
    return [node] if parents[node] < 0 else [*path_of(parents, parents[node]), node]


def random_parents(n: int, generator: torch.Generator) -> list[int]:
    """Any tree of n nodes: every node hangs on one that came before it."""
    return [-1] + [int(torch.randint(i, (1,), generator=generator)) for i in range(1, n)]


def sequential_logits(model: Any, prefix: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits [V] after prefix + path, from one plain forward over all of it."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([[*prefix, *path]])).logits[0, -1]
    return logits


def likeliest_paths(laws: Sequence[Sequence[float]], nodes: int) -> set[tuple[int, ...]]:
    """The ``nodes`` - 1 paths of ranks with the largest products, the law at a depth being laws[depth]."""
    scored = [
        (torch.tensor([laws[d][r] for d, r in enumerate(path)]).prod().item(), path)
        for length in range(1, len(laws) + 1)
        for path in itertools.product(*(range(len(law)) for law in laws[:length]))
    ]
    scored.sort(key=lambda pair: -pair[0])
    return {path for _, path in scored[: nodes - 1]}


def medusa_loss(heads: Any, batch: Any, tie: Any, weights: Sequence[float]) -> tuple[float, list[int]]:
    """The loss of Medusa heads written slot by slot, label by label: summed loss and predictions per depth."""
    total, counts = 0.0, [0] * len(weights)
    rows, length = batch.tokens.shape
    for b in range(rows):
        for depth, weight in enumerate(weights):
            for slot in range(length):
                label = slot + 2 + depth
                if label >= length or not batch.supervised[b, label]:
                    continue
                if batch.document[b, slot] != batch.document[b, label] or batch.document[b, label] < 0:
                    continue
                p = torch.softmax(tie.unembed(batch.last[b, label - 1]).double(), -1)
                hidden = heads.blocks[depth](batch.features[b, slot])
                logq = torch.log_softmax(heads.logits(hidden, batch.tokens[b, label - 1], depth, tie).double(), -1)
                p = p if heads.draft_ids is None else p[heads.draft_ids]
                total += weight * float(-(p * logq).sum().detach())
                counts[depth] += 1
    return total, counts
