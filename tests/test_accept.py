"""The rule "match" without a model: what it emits, in which order it asks, and its exact law by enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.infer.accept import Accepted, match
from headstart.infer.tree import DraftTree


class Script:
    """A visit whose draws are fixed per node and row; records what it was asked."""

    def __init__(
        self, draws: list[dict[int, int]], stops: set[int] | None = None, finished: set[int] | None = None
    ) -> None:
        self.draws, self.stops, self.finished = draws, stops or set(), finished or set()
        self.asked: list[list[int]] = []

    def law(self, node: Tensor) -> Tensor:
        self.asked.append(node.tolist())
        return node[:, None].double()

    def draw(self, scores: Tensor, wanted: Tensor) -> Tensor:
        return torch.tensor([row.get(int(at), 0) for row, at in zip(self.draws, scores[:, 0], strict=True)])

    def coin(self, p: Tensor) -> Tensor:
        raise AssertionError("match never asks for a coin")

    def emit(self, token: Tensor) -> Tensor:
        return torch.tensor([t >= 0 and t not in self.stops for t in token.tolist()])

    def running(self) -> Tensor:
        return torch.tensor([b not in self.finished for b in range(len(self.draws))])


def tree(rows: int = 1) -> DraftTree:
    """root -> 5, 6, 7;  6 -> 8, 9;  9 -> 5."""
    tokens = torch.tensor([[1, 5, 6, 7, 8, 9, 5]]).expand(rows, -1)
    parents = torch.tensor([[-1, 0, 0, 0, 2, 2, 5]]).expand(rows, -1)
    return DraftTree(tokens, parents, torch.ones_like(tokens).bool())


def test_follows_the_guessed_path_and_adds_a_bonus() -> None:
    accepted = match(tree(), Script([{0: 6, 2: 9, 5: 5, 6: 42}]))
    assert accepted.nodes.tolist() == [[0, 2, 5, 6]]
    assert accepted.tokens.tolist() == [[6, 9, 5, 42]]
    assert accepted.count.tolist() == [4]


def test_leaves_the_tree_at_the_first_token_nobody_guessed() -> None:
    script = Script([{0: 6, 2: 3}])
    accepted = match(tree(), script)
    assert accepted.tokens.tolist() == [[6, 3]] and accepted.nodes.tolist() == [[0, 2]]
    assert script.asked == [[0], [2]]  # nodes that are not visited are never asked: no draw is wasted


def test_stops_at_the_stop_even_if_it_was_guessed() -> None:
    accepted = match(tree(), Script([{0: 6, 2: 9, 5: 5}], stops={9}))
    assert accepted.tokens.tolist() == [[6, 9]] and accepted.count.tolist() == [2]


def test_padding_is_never_followed() -> None:
    hidden = tree()._replace(valid=torch.tensor([[True, True, False, True, False, False, False]]))
    assert match(hidden, Script([{0: 6}])).count.tolist() == [1]


def test_rows_go_their_own_ways_and_finished_rows_stay_silent() -> None:
    accepted = match(tree(3), Script([{0: 6, 2: 9, 5: 1}, {0: 3}, {}], finished={2}))
    assert accepted.nodes.tolist() == [[0, 2, 5], [0, -1, -1], [-1, -1, -1]]
    assert accepted.tokens.tolist() == [[6, 9, 1], [3, -1, -1], [-1, -1, -1]]
    assert accepted.count.tolist() == [3, 1, 0]


def test_the_law_is_the_targets_for_any_tree() -> None:
    """Exact enumeration over V = 3, depth 2: the law of the first two tokens is p(a) p(b | a), whatever was guessed."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    given = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.4, 0.2], [0.25, 0.25, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(law_of(match, p, given), p[:, None] * given)


def test_a_rule_that_follows_the_first_guess_fails_the_same_enumeration() -> None:
    """Negative control: going down the first child whatever was drawn does not give the target's law."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    given = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.4, 0.2], [0.25, 0.25, 0.5]], dtype=torch.float64)

    def biased(tree: DraftTree, visit: Any) -> Accepted:
        first = visit.draw(visit.law(torch.tensor([0])), torch.tensor([True]))
        visit.emit(first)
        second = visit.draw(visit.law(torch.tensor([1])), torch.tensor([True]))
        return Accepted(torch.tensor([[0, 1]]), torch.stack([first, second], 1), torch.tensor([2]))

    with pytest.raises(AssertionError):
        torch.testing.assert_close(law_of(biased, p, given), p[:, None] * given)


def law_of(rule: Any, p: Tensor, given: Tensor) -> Tensor:
    """The law [3, 3] of the first two tokens, every outcome of every draw weighed: guesses 0 and 2, and 1 after 2."""
    guessed = DraftTree(torch.tensor([[9, 0, 2, 1]]), torch.tensor([[-1, 0, 0, 2]]), torch.ones(1, 4).bool())
    law = torch.zeros(3, 3, dtype=torch.float64)
    for first, after_0, after_2, later, alone in itertools.product(range(3), repeat=5):
        weight = p[first] * given[0, after_0] * given[2, after_2] * given[1, later]
        accepted = rule(guessed, Script([{0: first, 1: after_0, 2: after_2, 3: later}])).tokens[0].tolist()
        # where the pass ended after one token, the next pass draws the second at its root
        text = accepted if len(accepted) > 1 else [*accepted, alone]
        law[text[0], text[1]] += weight * (given[first, alone] if len(accepted) == 1 else 1 / 3)
    return law
