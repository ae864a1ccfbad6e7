"""The tree of guesses. ``parents`` is the only truth: depths, ancestors, paths and masks are functions of it.

Legend: B rows, n nodes (node 0 = root), d depth, k path length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """Guesses to verify in one forward. Node 0 is the last known token; its key and value are not cached yet."""

    tokens: Tensor  # [B, n] int64
    parents: Tensor  # [B, n] int64; parents[:, 0] = -1, every other < its own index
    valid: Tensor  # [B, n] bool; padding attends to itself only
    logq: Tensor | None = (
        None  # [B, n] draft log-probability given the parent: for plans and pictures, never acceptance
    )
    drawn: Tensor | None = None  # [B, n] row of `law` a child was sampled from, -1 = deterministic
    law: Tensor | None = None  # [B, r, V] exactly as sampled from, in target ids


def sent(values: Sequence[int], device: torch.device) -> Tensor:
    """A list as a tensor on ``device``, without waiting for what the device still has to do."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def root_only(root: Tensor) -> DraftTree:
    """The tree that guesses nothing: root [B] -> one node a row; verifying it is a plain decoding step."""
    tokens = root[:, None]
    return DraftTree(tokens, torch.full_like(tokens, -1), torch.ones_like(tokens, dtype=torch.bool))


def depths(parents: Tensor) -> Tensor:
    """[B, n] parents -> [B, n] depth of each node, root 0. No loop over nodes and no host sync.

    Pointer jumping: after i rounds a node knows its ancestor 2^i steps up and how many steps that was.
    """
    n = parents.shape[1]
    up, steps = parents.clamp(min=0), (parents >= 0).long()
    for _ in range(max(1, n - 1).bit_length()):
        steps = steps + steps.gather(1, up)
        up = up.gather(1, up)
    return steps


def ancestors(parents: Tensor) -> Tensor:
    """[B, n] parents -> [B, n, n] bool: [b, i, j] = j is i itself or one of its ancestors."""
    batch, n = parents.shape
    reach = torch.eye(n, dtype=torch.bool, device=parents.device).expand(batch, n, n).clone()
    reach.scatter_(2, parents.clamp(min=0)[:, :, None], True)
    root = parents < 0  # the clamp pointed the root at itself, which is already set; other roots are padding
    if n > 1:
        reach[:, 1:, 0] &= ~root[:, 1:]
    for _ in range(max(1, n - 1).bit_length()):
        reach = (reach.float() @ reach.float()) > 0  # paths of twice the length
    return reach


def visible(tree: DraftTree) -> Tensor:
    """[B, n, n] bool: what each node may see of the tree. Padding sees itself only, and nobody sees padding."""
    seen = ancestors(tree.parents) & tree.valid[:, None, :] & tree.valid[:, :, None]
    eye = torch.eye(tree.tokens.shape[1], dtype=torch.bool, device=tree.tokens.device)
    return seen | eye


def pruned(tree: DraftTree, room: Tensor, vocab_size: int) -> DraftTree:
    """The tree without what cannot be verified: tokens outside 0..``vocab_size`` - 1, nodes deeper than ``room`` [B],
    nodes that do not come after their parent, and all that hangs on those. Node 0 stays. No host sync."""
    if tree.tokens.shape[1] == 1:
        return tree._replace(parents=torch.full_like(tree.parents, -1), valid=torch.ones_like(tree.valid))
    return (_pruned_on_host if tree.tokens.device.type == "cpu" else _pruned)(tree, room, vocab_size)


def _pruned(tree: DraftTree, room: Tensor, vocab_size: int) -> DraftTree:
    """By operations on [B, n], for where reading a tensor means to wait."""
    index = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    misplaced = (tree.parents >= index) | ((tree.parents < 0) & (index > 0))
    parents = torch.where(misplaced, -1, tree.parents)
    parents[:, 0] = -1
    bad = ~tree.valid | misplaced | (tree.tokens < 0) | (tree.tokens >= vocab_size)
    above = ancestors(parents)
    bad |= above.sum(2) > room[:, None] + 1  # a node of depth d has d ancestors, and is one itself
    bad[:, 0] = False
    valid = ~(above & bad[:, None, :]).any(2)
    return tree._replace(tokens=torch.where(valid, tree.tokens, 0), parents=parents, valid=valid)


def _pruned_on_host(tree: DraftTree, room: Tensor, vocab_size: int) -> DraftTree:
    """The same where reading a tensor is free: a tree that may stay as it is costs no operation."""
    before = (tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist())
    after: tuple[list[list[int]], list[list[int]], list[list[bool]]] = ([], [], [])
    for tokens, parents, valid, most in zip(*before, room.tolist(), strict=True):
        above, depth, stays = [-1] * len(parents), [0] * len(parents), [True] * len(parents)
        for node in range(1, len(parents)):
            parent = parents[node]
            placed = 0 <= parent < node
            if placed:
                above[node], depth[node] = parent, depth[parent] + 1
            fits = placed and stays[parent] and depth[node] <= most
            stays[node] = fits and valid[node] and 0 <= tokens[node] < vocab_size
        after[0].append([token if there else 0 for token, there in zip(tokens, stays, strict=True)])
        after[1].append(above)
        after[2].append(stays)
    if before == after:
        return tree
    like = (tree.tokens, tree.parents, tree.valid)
    fresh = (torch.tensor(x, dtype=old.dtype) for x, old in zip(after, like, strict=True))
    return tree._replace(**dict(zip(("tokens", "parents", "valid"), fresh, strict=True)))


def filled(tree: DraftTree, nodes: int) -> DraftTree:
    """The tree with padding behind it up to ``nodes``, where it has fewer: one width for a compiled forward."""
    short = nodes - tree.tokens.shape[1]
    if short <= 0:
        return tree
    tokens, parents, valid = (
        torch.nn.functional.pad(x, (0, short), value=v)
        for x, v in ((tree.tokens, 0), (tree.parents, -1), (tree.valid, False))
    )
    return DraftTree(tokens, parents, valid)


def siblings_before(tree: DraftTree, nodes: Tensor) -> Tensor:
    """[B, k] nodes -> [B, k] their rank: how many valid children of the same parent stand before each; 0 for -1."""
    parent = tree.parents.gather(1, nodes.clamp(min=0))
    index = torch.arange(tree.tokens.shape[1], device=nodes.device)
    before = tree.valid[:, None] & (tree.parents[:, None] == parent[:, :, None]) & (index < nodes[:, :, None])
    return (before & (parent >= 0)[:, :, None]).sum(2)


def path_to(parents: Tensor, node: Tensor, length: int) -> Tensor:
    """Path from the root to ``node`` [B] -> [B, length] node indices, -1 padded on the right."""
    steps = [node]
    for _ in range(length - 1):
        up = steps[-1]
        steps.append(torch.where(up >= 0, parents.gather(1, up.clamp(min=0)[:, None])[:, 0], -1))
    backwards = torch.stack(steps[::-1], dim=1)  # -1 ... -1, root, ..., node
    shift = (backwards < 0).sum(1, keepdim=True)
    index = torch.arange(length, device=parents.device)[None] + shift
    return torch.where(index < length, backwards.gather(1, index.clamp(max=length - 1)), -1)


def validate(tree: DraftTree, vocab_size: int) -> None:
    """Raises ValueError, naming row and node, unless ``tree`` is one. Reads tensors: for tests and new drafters."""
    batch, n = tree.tokens.shape
    if tree.parents.shape != (batch, n) or tree.valid.shape != (batch, n):
        raise ValueError(
            f"tokens are {(batch, n)}, parents {tuple(tree.parents.shape)}, valid {tuple(tree.valid.shape)}: "
            "all three must be [rows, nodes]"
        )
    index = torch.arange(n, device=tree.tokens.device)
    bad = (tree.parents >= index) | ((tree.parents < 0) & (index > 0) & tree.valid)
    bad[:, 0] = (tree.parents[:, 0] != -1) | ~tree.valid[:, 0]
    orphan = tree.valid & ~tree.valid.gather(1, tree.parents.clamp(min=0)) & (index > 0)
    outside = tree.valid & ((tree.tokens < 0) | (tree.tokens >= vocab_size))
    for wrong, what in (
        (bad, "a parent must come before its child, and only node 0 is a root"),
        (orphan, "a valid node hangs on padding"),
        (outside, f"a token lies outside 0..{vocab_size - 1}"),
    ):
        if bool(wrong.any()):
            row, node = (int(x) for x in wrong.nonzero()[0])
            raise ValueError(f"not a tree: {what} (row {row}, node {node})")
