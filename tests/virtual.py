"""Plans without a model: made-up texts, made-up claims about what comes next, and time as costs say it passes.

A place of a text holds what a drafter would say there, level by level: laws whose likeliest tokens are right as often
as they claim, times ``honest``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.infer.accept import Accepted
from headstart.infer.grow import Budget, Children, best_first
from headstart.infer.learned import Learned
from headstart.infer.plan import Costs
from headstart.infer.planner import Adaptive, Fixed
from headstart.infer.tree import DraftTree, pruned

VOCAB, WIDTH, BRANCH = 1000, 8, 8
LEFT = 0.35


@dataclass(frozen=True)
class Kind:
    """How a drafter guesses: a chance is drawn from Beta(a, b), each next token has LEFT of what is left."""

    a: float
    b: float
    honest: float  # how often claims hold
    depth: int = 5


Place = list[tuple[Tensor, Tensor]]  # of each level: log-probabilities and tokens [w, c]


def made_up(kind: Kind, tokens: int, seed: int) -> tuple[list[int], list[Place]]:
    """A text and its places."""
    dice = random.Random(seed)
    text = [dice.randrange(VOCAB) for _ in range(tokens)]
    return text, [[_level(kind, dice, text, at + depth, depth) for depth in range(kind.depth)] for at in range(tokens)]


def _level(kind: Kind, dice: random.Random, text: Sequence[int], at: int, depth: int) -> tuple[Tensor, Tensor]:
    """What the nodes of a frontier say of the token ``at`` of a text."""
    laws, words = [], []
    for _ in range(WIDTH if depth else 1):
        law = [dice.betavariate(kind.a, kind.b)]
        while len(law) < BRANCH:
            law.append((1.0 - sum(law)) * LEFT)
        law.sort(reverse=True)
        row = [dice.randrange(VOCAB, 2 * VOCAB) for _ in law]  # wrong ones
        draw = dice.random() / kind.honest
        right = next((i for i in range(BRANCH) if draw < sum(law[: i + 1])), None)
        if right is not None and at < len(text):
            row[right] = text[at]
        laws.append([math.log(max(chance, 1e-9)) for chance in law])
        words.append(row)
    return torch.tensor(laws), torch.tensor(words)


class Step(NamedTuple):
    """What one cost and brought."""

    context: int
    nodes: int
    levels: int
    tokens: int


def played(texts: Sequence[tuple[list[int], list[Place]]], nodes: int, depth: int, costs: Costs | None) -> list[Step]:
    """Steps of trees of up to ``nodes`` nodes and ``depth`` levels: what pays by ``costs``, or (None) all of them."""
    learned, steps = Learned.nothing(depth), []
    for text, places in texts:
        planner = Fixed() if costs is None else Adaptive(costs, learned, 1)
        at = 0
        while at < len(text):
            room = torch.tensor([len(text) - at - 1])
            budget = planner.open(Budget(nodes, min(depth, int(room)), room), at, 1)
            tree, levels = _grown(places[at], budget)
            tree = planner.cut(tree)
            path, tokens = _kept(tree, text[at:])
            steps.append(Step(at, tree.tokens.shape[1], levels, len(tokens)))
            at += len(tokens)
            accepted = Accepted(torch.tensor([path]), torch.tensor([tokens]), torch.tensor([len(tokens)]))
            planner.learn(accepted, [at < len(text)])
        learned = planner.learned if isinstance(planner, Adaptive) else learned
    return steps


def speed(steps: Sequence[Step], costs: Costs) -> float:
    """Over plain steps."""
    plain = sum(costs.plain(1, step.context) * step.tokens for step in steps)
    return plain / sum(costs.step(1, step.context, step.nodes, step.levels) for step in steps)


def _grown(place: Place, budget: Budget) -> tuple[DraftTree, int]:
    """The tree a drafter grows at a place, and how many levels it drafted."""
    drafted = [0]

    def expand(tokens: Tensor, above: Tensor, depth: int) -> Children:
        drafted[0] += 1
        logq, ids = place[depth]
        return Children(logq[None], ids[None])

    tree = best_first(torch.tensor([0]), expand, budget, WIDTH)
    return pruned(tree, budget.room, 2 * VOCAB), drafted[0]


def _kept(tree: DraftTree, text: Sequence[int]) -> tuple[list[int], list[int]]:
    """Nodes of the tree that are right, root included, and the tokens emitted: as many, the last one is a bonus."""
    path, tokens = [0], [text[0]]
    parents, words, valid = tree.parents[0].tolist(), tree.tokens[0].tolist(), tree.valid[0].tolist()
    while len(tokens) < len(text):
        fits = [n for n in range(1, len(parents)) if valid[n] and parents[n] == path[-1] and words[n] == tokens[-1]]
        if not fits:
            break
        path.append(fits[0])
        tokens.append(text[len(tokens)])
    return path, tokens
