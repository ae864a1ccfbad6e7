"""The decoding loop; the file to read first.

    prompt[:-1] --prefill--> the drafter sees it; the last prompt token is the first root
    loop:  grow a tree of guesses -> verify all of it in ONE forward -> a rule keeps a path -> commit it -> show it to
           the drafter

Legend: B rows, P prompt, n tree nodes, k path length, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.infer.accept import Accepted, Rule
from headstart.infer.drafter import Drafter
from headstart.infer.grow import Budget
from headstart.infer.report import Clock, Report
from headstart.infer.target import Seen, Target, Verified
from headstart.infer.tree import DraftTree, depths, pruned
from headstart.infer.visit import Emission


class Limits(NamedTuple):
    """What bounds a tree: its size, its depth, and the positions the target knows."""

    nodes: int
    depth: int
    positions: int


def decode(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    visit: Emission,
    ids: Tensor,
    lengths: Tensor,
    limits: Limits,
    known: Cache | None = None,
) -> Report:
    """Emits tokens through ``visit`` until every row has stopped.

    ``ids`` [B, P] left-aligned prompts and ``lengths`` [B] their true lengths; ``known`` a stock cache of their first
    tokens. Returns the counts of the call.
    """
    report = Report()
    clock = Clock(report)
    drafter.start(ids, lengths, ids.shape[1] + max(visit.wanted()))
    for seen in target.prefill(ids, lengths, known=known):
        drafter.observe(seen)
    report.prefill_forwards = target.forwards
    clock.lap("prefill")

    while any(wanted := visit.wanted()):
        budget = _budget(wanted, target, limits)
        tree = pruned(drafter.grow(visit.roots().to(ids.device), budget), budget.room, target.vocab_size)
        clock.lap("draft")

        verified = target.verify(tree)
        clock.lap("verify")

        visit.open(tree, verified)
        accepted = rule(tree, visit)
        target.commit(accepted)
        _count(report, tree, accepted, visit)
        clock.lap("other")

        drafter.observe(_seen(tree, verified, accepted))
        clock.lap("draft")

    report.forwards = target.forwards
    report.tokens -= visit.overshoot()
    return report


def _budget(wanted: list[int], target: Target, limits: Limits) -> Budget:
    """Guesses each row may use: one less than the tokens it wants (the last is a bonus), within the positions left."""
    cached = target.cache.lengths.tolist()  # = the root's position
    room = [max(0, min(w - 1, limits.positions - 1 - at)) for w, at in zip(wanted, cached, strict=True)]
    return Budget(limits.nodes, min(limits.depth, max(room)), torch.tensor(room, device=target.cache.lengths.device))


def _seen(tree: DraftTree, verified: Verified, accepted: Accepted) -> Seen:
    """The committed path as the drafter wants it: features [B, k, F] and the tokens [B, k] they led to."""
    features = verified.features
    if features is not None:
        path = accepted.nodes.clamp(min=0).to(features.device)
        features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
    return Seen(accepted.tokens.clamp(min=0), accepted.count, features, tree, verified)


def _count(report: Report, tree: DraftTree, accepted: Accepted, visit: Emission) -> None:
    """Adds one pass for every row that took part."""
    offered = torch.where(tree.valid, depths(tree.parents), 0).amax(1).tolist()
    going = visit.wanted()
    for row, count in enumerate(accepted.count.tolist()):
        if count:
            report.add(count - 1, offered[row], stopped=not going[row])
