"""The decoding loop; the file to read first.

    prompt[:-1] --prefill--> the drafter sees it; the last prompt token is the first root (who guesses without features
           lets the end of the prompt run together with the first tree)
    loop:  grow a tree of guesses, no larger than pays -> verify all of it in ONE forward -> a rule keeps a path ->
           commit it -> show it to the drafter

Legend: B rows, P prompt, n tree nodes, k path length, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.infer.accept import Accepted, Rule, on_host, walk
from headstart.infer.drafter import Drafter
from headstart.infer.grow import Budget
from headstart.infer.planner import Fixed, Planner
from headstart.infer.report import Clock, Report
from headstart.infer.target import Seen, Target, Verified
from headstart.infer.tree import DraftTree, depths, pruned, sent, siblings_before
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
    walking: bool = False,
    planner: Planner | None = None,
) -> Report:
    """Emits tokens through ``visit`` until every row has stopped.

    ``ids`` [B, P] left-aligned prompts and ``lengths`` [B] their true lengths; ``known`` a stock cache of their first
    tokens; ``walking`` accepts on the device by ``walk``, which stands for the rule "match" (see ``Emission.walks``);
    ``planner`` says what a step may spend (None = all of ``limits``). Returns the counts of the call.
    """
    planner = planner or Fixed()
    report = Report()
    clock = Clock(report.seconds, ids.device)
    drafter.start(ids, lengths, ids.shape[1] + max(visit.wanted()))
    for seen in target.prefill(ids, lengths, known=known, hold=any(visit.wanted())):
        drafter.observe(seen)
    report.prefill_forwards = target.forwards
    clock.lap("prefill")

    while any(wanted := visit.wanted()):
        budget = planner.open(_budget(wanted, target, limits), max(target.kept), sum(n > 0 for n in wanted))
        clock.lap("plan")
        tree = drafter.grow(visit.roots().to(ids.device), budget)
        clock.lap("draft")
        tree = planner.cut(pruned(tree, budget.room, target.vocab_size))
        clock.lap("plan")

        part = "prefill" if target.held else "verify"
        verified = target.verify(tree)
        clock.lap(part)
        report.verify_steps += part == "verify"

        visit.open(tree, verified)
        if walking:
            step = _read(tree, walk(tree, visit, budget.depth))  # the one sync of a step
            visit.settle(step.accepted)
        else:
            tree = on_host(tree)  # rules decide node by node: one sync here, and one for each draw
            step = _looked_at(tree, rule(tree, visit))
        _count(report, step, visit)
        clock.lap("accept")
        planner.learn(step.accepted, [n > 0 for n in visit.wanted()])
        clock.lap("plan")
        target.commit(step.accepted)
        clock.lap("commit")

        drafter.observe(_seen(tree, verified, step.accepted))
        clock.lap("draft")

    clock.stop()
    report.forwards, report.syncs = target.forwards, visit.reads + report.steps + planner.reads
    report.plan, report.plain_steps = planner.name, planner.plain_steps
    report.tokens -= visit.overshoot()
    return report


class Step(NamedTuple):
    """What a pass came to, all of it on the CPU."""

    accepted: Accepted
    ranks: list[list[int]]  # [B, k] places of the accepted guesses among their siblings
    offered: list[int]  # [B] depth of the tree
    nodes: list[int]  # [B] nodes that were verified, root included


def _read(tree: DraftTree, accepted: Accepted) -> Step:
    """Reads everything about a pass from the device at once."""
    offered = torch.where(tree.valid, depths(tree.parents), 0).amax(1)
    ranks = siblings_before(tree, accepted.nodes)
    parts = [accepted.nodes, accepted.tokens, ranks, torch.stack([accepted.count, offered, tree.valid.sum(1)], 1)]
    k = accepted.nodes.shape[1]
    read = torch.cat(parts, 1).cpu()
    nodes, tokens, ranks = read[:, :k], read[:, k : 2 * k], read[:, 2 * k : 3 * k]
    return Step(Accepted(nodes, tokens, read[:, -3]), ranks.tolist(), read[:, -2].tolist(), read[:, -1].tolist())


def _looked_at(tree: DraftTree, accepted: Accepted) -> Step:
    """The same where all of it is on the CPU: fewer operations."""
    rows = [_placed(*row) for row in zip(tree.parents.tolist(), tree.valid.tolist(), strict=True)]
    paths = zip(rows, accepted.nodes.tolist(), strict=True)
    ranks = [[places[node] if node >= 0 else 0 for node in path] for (places, _), path in paths]
    return Step(accepted, ranks, [deepest for _, deepest in rows], tree.valid.sum(1).tolist())


def _placed(parents: list[int], valid: list[bool]) -> tuple[list[int], int]:
    """Of one row: each node's place among its parent's valid children, and the depth of the deepest valid node."""
    places, depth, children = [0] * len(parents), [0] * len(parents), [0] * len(parents)
    for node, (parent, there) in enumerate(zip(parents, valid, strict=True)):
        if parent >= 0:
            places[node], depth[node] = children[parent], depth[parent] + 1
            children[parent] += there
    return places, max(d if there else 0 for d, there in zip(depth, valid, strict=True))


def _budget(wanted: list[int], target: Target, limits: Limits) -> Budget:
    """Guesses each row may use: one less than the tokens it wants (the last is a bonus), within the positions left."""
    room = [
        max(0, min(w - 1, limits.positions - 1 - at))  # `at` tokens are cached, so the root stands there
        for w, at in zip(wanted, target.kept, strict=True)
    ]
    return Budget(limits.nodes, min(limits.depth, max(room)), sent(room, target.cache.lengths.device))


def _seen(tree: DraftTree, verified: Verified, accepted: Accepted) -> Seen:
    """The committed path as the drafter wants it: features [B, k, F] and the tokens [B, k] they led to."""
    features = verified.features
    if features is not None:
        path = accepted.nodes.clamp(min=0).to(features.device, non_blocking=True)
        features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
    return Seen(accepted.tokens.clamp(min=0), accepted.count, features, tree, verified)


def _count(report: Report, step: Step, visit: Emission) -> None:
    """Adds one pass for every row that took part."""
    report.steps += 1
    going = visit.wanted()
    lists = (step.accepted.count.tolist(), step.offered, step.nodes, step.ranks)
    for row, (count, offered, nodes, ranks) in enumerate(zip(*lists, strict=True)):
        if count:
            report.add(count - 1, offered, stopped=not going[row], row=row, nodes=nodes, ranks=ranks[1:count])
