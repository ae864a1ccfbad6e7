"""From next-token laws to a tree. Pure: the laws come from a function, one call a level.

Legend: B rows, w frontier, c children per frontier node, n nodes of the tree, m nodes generated so far, D draft
vocabulary, V target vocabulary, R flattened rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.infer.tree import DraftTree, root_only


class Children(NamedTuple):
    """What a frontier node offers: w is 1 where the law does not depend on the path."""

    logq: Tensor  # [B, w, c] log-probability given the parent, deterministic ones best first
    ids: Tensor  # [B, w, c] target ids
    law: Tensor | None = None  # [B, w, V] as drawn from: where given, the last child was drawn from it, and it alone


Expand = Callable[[Tensor, Tensor, int], Children]
"""(tokens [B, w], index into the level above [B, w], depth) -> the children of the frontier."""


class Sampling(NamedTuple):
    """How one child a node is drawn, for the rule "rejection"."""

    pick: Callable[[Tensor], Tensor]  # [R, V] probabilities -> [R] tokens, from a generator of the drafter's own
    warpers: tuple[Callable[[Any, Tensor], Tensor], ...] = ()  # the call's temperature, top-k ...: they see scores only


class Budget(NamedTuple):
    """What a step may spend."""

    nodes: int  # with the root
    depth: int  # guesses after the root, on the longest path
    room: Tensor  # [B] the same, per row: tokens still wanted and positions still left
    more: Callable[[Tensor, int], bool] | None = None  # whether to grow a level below the frontier: asked with its path
    # log-probabilities [B, w], -inf where nothing may grow, and its depth


class Shape(NamedTuple):
    """A tree fixed beforehand: node i is the ``ranks[i]``-th best child of ``parents[i]``; node 0 is the root."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> Shape:
        """From paths of ranks, as Medusa writes its choices: [0], [1], [0, 0] ... Prefixes are added."""
        wanted = {tuple(path[:i]) for path in paths for i in range(1, len(path) + 1)}
        order = sorted(wanted, key=lambda path: (len(path), path))
        index = {path: i + 1 for i, path in enumerate(order)} | {(): 0}
        return cls((-1, *(index[path[:-1]] for path in order)), (0, *(path[-1] for path in order)))


def offered(
    logits: Tensor,
    branch: int,
    *,
    ids: Tensor | None = None,
    vocab_size: int,
    sampling: Sampling | None = None,
) -> Children:
    """The ``branch`` best children of nodes with draft ``logits`` [B, w, D]; D is mapped to target ids by ``ids`` [D].

    With ``sampling`` the last of them is drawn from what the others leave of the warped law (decoding by the mixed
    rule: deterministic children D and one child from the complement of D), and that law [B, w, V] comes along.
    """
    if sampling is not None:
        flat = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
        for warper in sampling.warpers:
            flat = warper(None, flat)
        logits = flat.reshape(logits.shape)
    deterministic = min(branch, logits.shape[-1]) - (sampling is not None)
    top = logits.topk(deterministic, dim=-1)
    logq = top.values.float() - torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    best = top.indices if ids is None else ids[top.indices]
    if sampling is None:
        return Children(logq, best)
    rest = torch.softmax(logits, -1).nan_to_num(0.0).scatter(-1, top.indices, 0.0)  # [B, w, D]
    mass = rest.sum(-1, keepdim=True)
    rest = torch.where(mass > 0, rest / mass, 1.0 / rest.shape[-1])  # nothing left: its place has no chance to be kept
    law = rest.new_zeros(*rest.shape[:-1], vocab_size)
    law[..., ids if ids is not None else slice(rest.shape[-1])] = rest
    drawn = sampling.pick(law.reshape(-1, vocab_size)).reshape(*law.shape[:-1], 1)
    return Children(torch.cat([logq, mass.log()], -1), torch.cat([best, drawn], -1), law)


def best_first(root: Tensor, expand: Expand, budget: Budget, width: int, barren: Tensor | None = None) -> DraftTree:
    """The tree of the ``budget.nodes`` likeliest paths among those generated (EAGLE-2, arXiv 2406.16858).

    Each level expands its ``width`` likeliest nodes. A path's probability falls along it, so the best n are connected.
    ``root`` [B]; nothing grows below the tokens ``barren`` [e] (end tokens).

    A drawn child stands in this order with the chance of its *place*, all that the law leaves to draw from, never with
    that of the token that was drawn: whether it stays in the tree says nothing about which token it is, so it keeps
    the law it was drawn from and the rule may rely on that.
    """
    batch, device = root.shape[0], root.device
    tokens, parents = root[:, None], torch.full((batch, 1), -1, device=device)  # [B, m]
    scores = torch.zeros(batch, 1, device=device)  # [B, m] log-probability of the path
    drawn = torch.full_like(parents, -1)  # [B, m] row of the laws a node was drawn from
    laws: list[Tensor] = []
    frontier, above = torch.zeros(batch, 1, dtype=torch.int64, device=device), torch.zeros_like(root[:, None])
    path = scores  # [B, w] of the frontier; -inf where nothing may grow
    for depth in range(budget.depth):
        if depth and budget.more is not None:
            going = path.masked_fill(budget.room[:, None] <= depth, -torch.inf)  # rows that have no room for more
            if not budget.more(going, depth):
                break
        logq, ids, law = expand(tokens.gather(1, frontier), above, depth)
        w, c = frontier.shape[1], logq.shape[2]
        logq = torch.nan_to_num(logq, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).clamp(
            max=0.0
        )  # heads that overflowed guess nothing; a sum that rounds above one must not raise a path
        fresh = (path[:, :, None] + logq).reshape(batch, w * c)
        fresh = fresh.masked_fill(budget.room[:, None] <= depth, -torch.inf)
        fresh_ids = ids.expand(-1, w, -1).reshape(batch, w * c)
        first = tokens.shape[1]
        tokens = torch.cat([tokens, fresh_ids], 1)
        parents = torch.cat([parents, frontier.repeat_interleave(c, 1)], 1)
        scores = torch.cat([scores, fresh], 1)
        origin = torch.full((w, c), -1, device=device)
        if law is not None:
            origin[:, -1] = torch.arange(law.shape[1], device=device) + sum(x.shape[1] for x in laws)
            laws.append(law)
        drawn = torch.cat([drawn, origin.reshape(1, w * c).expand(batch, -1)], 1)
        alive = fresh if barren is None else fresh.masked_fill(torch.isin(fresh_ids, barren), -torch.inf)
        path, best = alive.topk(min(width, w * c), dim=1)
        frontier, above = best + first, best // c
    tree, kept = _likeliest(tokens, parents, scores, budget.nodes)
    return tree._replace(drawn=drawn.gather(1, kept), law=torch.cat(laws, 1)) if laws else tree


def _likeliest(tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int) -> tuple[DraftTree, Tensor]:
    """The root and the ``nodes`` - 1 likeliest of the generated nodes [B, m], renumbered in order of generation.

    Returns the tree and which nodes [B, n] were kept.
    """
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values  # [B, n]
    tree = taken(DraftTree(tokens, parents, scores > -torch.inf, scores), kept)
    assert tree.logq is not None
    logq = tree.logq - tree.logq.gather(1, tree.parents.clamp(min=0))
    return tree._replace(logq=torch.where(tree.valid & (tree.parents >= 0), logq, 0.0)), kept


def taken(tree: DraftTree, kept: Tensor) -> DraftTree:
    """The nodes ``kept`` [B, n] of a deterministic tree [B, m], ascending and each with its ancestors, renumbered."""
    number = torch.full_like(tree.parents, -1)
    number.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    old = tree.parents.gather(1, kept)
    parents = torch.where(old >= 0, number.gather(1, old.clamp(min=0)), -1)
    logq = None if tree.logq is None else tree.logq.gather(1, kept)
    return DraftTree(tree.tokens.gather(1, kept), parents, tree.valid.gather(1, kept), logq)


def static(root: Tensor, expand: Expand, budget: Budget, shape: Shape, barren: Tensor | None = None) -> DraftTree:
    """A tree of one fixed ``shape``; nodes deeper than the budget allows, or below an end token, are padding."""
    level, batch, device = [0], root.shape[0], root.device
    if len(shape.parents) > budget.nodes:
        raise ValueError(f"the shape has {len(shape.parents)} nodes, the budget allows {budget.nodes}: raise nodes")
    tokens = [root]
    logq = [torch.zeros(batch, device=device)]
    valid = [torch.ones(batch, dtype=torch.bool, device=device)]
    above = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    for depth in range(budget.depth):
        next_level = [i for i, parent in enumerate(shape.parents) if parent in level]
        if not next_level:
            break
        laws, ids, _ = expand(torch.stack([tokens[i] for i in level], 1), above, depth)
        for i in next_level:
            at = level.index(shape.parents[i]) if laws.shape[1] > 1 else 0
            if shape.ranks[i] >= laws.shape[2]:
                raise ValueError(f"the shape wants child {shape.ranks[i]} of a node, only {laws.shape[2]} were offered")
            tokens.append(ids[:, at, shape.ranks[i]])
            logq.append(laws[:, at, shape.ranks[i]])
            over = valid[shape.parents[i]] & (budget.room > depth)
            ended = torch.zeros_like(over) if barren is None else torch.isin(tokens[shape.parents[i]], barren)
            valid.append(over & ~(ended & (shape.parents[i] > 0)))
        above = torch.tensor([[level.index(shape.parents[i]) for i in next_level]], device=device).expand(batch, -1)
        level = next_level
    if len(tokens) == 1:
        return root_only(root)
    parents = torch.tensor(shape.parents[: len(tokens)], device=device).expand(batch, -1)
    return DraftTree(torch.stack(tokens, 1), parents, torch.stack(valid, 1), torch.stack(logq, 1))
