"""Rules that turn a verified tree into emitted tokens. Pure: all they know of the target comes through a Visit.

Legend: B rows, n nodes, k path length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.infer.tree import DraftTree


class Accepted(NamedTuple):
    """The path that was kept. ``tokens[:, i]`` follows ``nodes[:, i]``; the last emitted token is the next root."""

    nodes: Tensor  # [B, k] path from the root, -1 padded
    tokens: Tensor  # [B, k] emitted tokens, -1 padded
    count: Tensor  # type: ignore[assignment]  # [B] tokens emitted; 0 = the row was finished before


class Visit(Protocol):
    """All a rule may ask. Built from generate's processors, stopping criteria and generator."""

    def law(self, node: Tensor) -> Tensor:
        """[B] nodes -> [B, V] processed float32 scores; -1 = the row is not visited. Each node once, in path order."""

    def draw(self, scores: Tensor) -> Tensor:
        """[B, V] scores -> [B] tokens; argmax when greedy. Only rows of the last ``law`` are drawn."""

    def coin(self, p: Tensor) -> Tensor:
        """[B] probabilities -> [B] bool; "match" never asks."""

    def emit(self, token: Tensor) -> Tensor:
        """[B] tokens, -1 = none -> [B] bool: the row goes on (budget, end tokens, criteria)."""

    def running(self) -> Tensor:
        """[B] bool: rows not finished when the step began."""


Rule = Callable[[DraftTree, Visit], Accepted]


def match(tree: DraftTree, visit: Visit) -> Accepted:
    """Draw from the target at every visited node, in order, and follow the child that was guessed.

    The target's own sampler decides, so the output is the target's own, token for token and draw for draw: rule (c)
    of recursive rejection sampling, in its "sample and match" form. Works for any tree and any processor.
    """
    node = torch.where(visit.running().to(tree.tokens.device), 0, -1)  # [B]
    nodes, tokens = [], []
    while bool((node >= 0).any()):
        token = torch.where(node >= 0, visit.draw(visit.law(node)).to(node.device), -1)
        goes_on = visit.emit(token)
        nodes.append(node)
        tokens.append(token)
        child = tree.valid & (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
        found = child.any(1) & (node >= 0) & goes_on
        node = torch.where(found, child.int().argmax(1), -1)
    path = torch.stack(nodes, 1) if nodes else torch.full_like(node[:, None], -1)
    emitted = torch.stack(tokens, 1) if tokens else path
    return Accepted(path, emitted, (path >= 0).sum(1))


RULES: dict[str, Rule] = {"match": match}
