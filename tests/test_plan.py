"""The cost model in numbers: fits, expected tokens, and the best tree against every tree there is."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from headstart.infer.grow import Shape
from headstart.infer.learned import START, Learned
from headstart.infer.plan import (
    SIZES,
    Best,
    Costs,
    Curve,
    Draft,
    Plan,
    best_size,
    best_static,
    conditional,
    expected,
    isotonic,
    likeliest,
)
from headstart.infer.report import Report
from headstart.infer.worth import CLASSES, ratios, worth
from tests.test_worth import claimed_by, nothing, random_tree

KEY = {"machine": "none"}


def made(slope: float = 0.03, level: float = 0.1, nodes: int = 64, depth: int = 8, step: float = 1.0) -> Costs:
    """Plain steps of ``step`` seconds, of which each node more takes ``slope`` and each level of drafting ``level``."""
    sizes = (*(size for size in SIZES if size < nodes), nodes)
    curve = Curve(1, 64, tuple(step * (0.9 + slope * (size - 1)) for size in sizes))
    return Costs(sizes, (curve,), (Draft(1, tuple(step * level * d for d in range(depth + 1))),), 0.1 * step)


def closed(parents: list[int]) -> list[tuple[int, ...]]:
    """Every set of nodes that holds the root and, with a node, its parent."""
    found = []
    for count in range(len(parents)):
        for nodes in itertools.combinations(range(1, len(parents)), count):
            if all(parents[node] in (0, *nodes) for node in nodes):
                found.append((0, *nodes))
    return found


# fits ----------------------------------------------------------------------------------------------------------------


def test_isotonic_is_the_nearest_rising_sequence() -> None:
    """Against the min-max formula, value by value."""
    assert isotonic([3.0, 1.0, 2.0]) == [2.0, 2.0, 2.0] and isotonic([]) == []
    assert isotonic([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    g = torch.Generator().manual_seed(0)
    for n in range(1, 12):
        values = torch.rand(n, generator=g).tolist()
        means = {(i, j): sum(values[i : j + 1]) / (j + 1 - i) for i in range(n) for j in range(i, n)}
        slow = [max(min(means[i, j] for j in range(at, n)) for i in range(at + 1)) for at in range(n)]
        assert isotonic(values) == pytest.approx(slow)


def test_costs_between_and_past_what_was_measured() -> None:
    sizes = (1, 2, 4)
    curves = (Curve(1, 100, (1.0, 1.2, 2.0)), Curve(1, 200, (2.0, 2.2, 3.0)), Curve(4, 100, (3.0, 4.0, 6.0)))
    costs = Costs(sizes, curves, (Draft(1, (0.0, 0.5, 0.7)), Draft(4, (0.0, 1.0, 2.0))), 0.25)
    assert costs.verify(1, 100, 3) == pytest.approx(1.6)  # between two sizes
    assert costs.verify(1, 150, 2) == pytest.approx(1.7)  # between two contexts
    assert costs.verify(1, 300, 1) == pytest.approx(3.0)  # past the last context, as steep as before
    assert costs.verify(1, 10, 4) == pytest.approx(2.0)  # before the first
    assert costs.verify(1, 100, 6) == pytest.approx(2.8)  # past the last size
    assert costs.verify(2, 100, 2) == pytest.approx(2.0)  # rows that were not measured: as many tokens
    assert costs.verify(8, 100, 2) == pytest.approx(6.0)
    assert costs.draft(4, 1) == 1.0 and costs.draft(2, 2) == 0.7 and costs.draft(1, 4) == pytest.approx(1.1)
    assert costs.step(1, 100, 2, 1) == pytest.approx(1.95) and costs.plain(4, 100) == pytest.approx(3.25)


def test_a_plan_comes_back_whole_and_another_version_is_refused() -> None:
    learned = Learned.nothing(3)
    learned.claimed[1][2], learned.forecast[0][1], learned.purse, learned.on = 3.5, 1.25, 4.0, False
    best = Best(Shape.of([[0], [0, 1]]), 2, 1.9, 1.4)
    plan = Plan(KEY, made(nodes=12), learned.as_dict(), best)
    read = Plan.from_dict(json.loads(json.dumps(plan.as_dict())))
    assert read == plan and read.best is not None and read.best.nodes == 3
    again = Learned.from_dict(read.learned or {}, 5)  # a source that guesses deeper
    assert [len(row) for row in again.claimed] == [CLASSES] * 5 and again.claimed[1][2] == 3.5
    assert sum(map(sum, again.claimed)) == 3.5 and again.forecast[0][1] == 1.25
    assert sum(math.isnan(x) for row in again.forecast for x in row) == 5 * len(SIZES) - 1
    assert again.purse == START and again.on is False and again.steps == 0
    for broken in ({}, [], plan.as_dict() | {"version": 99}, plan.as_dict() | {"costs": {}}, {"version": 1}):
        with pytest.raises(ValueError, match="headstart tune"):
            Plan.from_dict(broken)  # type: ignore[arg-type]


# trees of a step -----------------------------------------------------------------------------------------------------


def brute_force(parents: list[int], chance: list[float], seconds: list[float], rate: float, sizes: list[int]) -> float:
    """The most of tokens - rate x seconds over every tree that is part of this one and has one of the ``sizes``."""
    trees = [nodes for nodes in closed(parents) if len(nodes) in sizes]
    return max(sum(chance[node] for node in nodes) - rate * seconds[len(nodes) - 1] for nodes in trees)


@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_nodes_of_the_best_size_are_the_best_of_all_trees(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tree = random_tree(9, g)
    chance = worth(claimed_by(tree), ratios(nothing(3), nothing(3)))
    seconds = torch.rand(9, generator=g).cumsum(0).tolist()
    for rate in (0.05, 0.5, 2.0):
        for sizes in ([1, 2, 4, 6, 8, 9], [1, 9], list(range(1, 10))):
            tokens = expected(chance, sizes)
            at = best_size(tokens, [seconds[size - 1] for size in sizes], rate)
            found = tokens[at] - rate * seconds[sizes[at] - 1]
            assert found == pytest.approx(brute_force(tree.parents[0].tolist(), chance[0], seconds, rate, sizes))


def test_rows_of_a_batch_are_worth_what_they_are_worth_together() -> None:
    chance = [[1.0, 0.2, 0.5], [1.0, 0.0, 0.0]]
    assert expected(chance, [1, 2, 3]) == pytest.approx([2.0, 2.5, 2.7])
    assert expected(chance, [8]) == pytest.approx([2.7])


# static trees --------------------------------------------------------------------------------------------------------


def all_paths(acceptance: list[list[float]]) -> list[tuple[int, ...]]:
    return [
        path
        for length in range(1, len(acceptance) + 1)
        for path in itertools.product(*(range(len(ranks)) for ranks in acceptance[:length]))
    ]


@pytest.mark.parametrize("seed", range(10))
def test_the_best_static_tree_is_the_fastest_of_all_trees(seed: int) -> None:
    """Every tree over two depths of two ranks and a third of one, with costs that have steps."""
    g = torch.Generator().manual_seed(seed)
    acceptance = [(torch.rand(width, generator=g) * 0.9).tolist() for width in (2, 2, 1)]
    paths = all_paths(acceptance)
    index = {path: i for i, path in enumerate(paths, 1)} | {(): 0}
    parents = [-1, *(index[path[:-1]] for path in paths)]
    seconds = (0.3 * torch.rand(11, generator=g)).cumsum(0) + 1.0
    levels = (0.2 * torch.rand(4, generator=g)).cumsum(0)
    costs = Costs(
        tuple(range(1, 12)),
        (Curve(1, 9, tuple(seconds.tolist())),),
        (Draft(1, (0.0, *levels[1:].tolist())),),
        0.1,
    )

    def speed(nodes: tuple[int, ...]) -> float:
        kept = [paths[node - 1] for node in nodes if node]
        tokens = 1.0 + sum(math.prod(acceptance[d][r] for d, r in enumerate(path)) for path in kept)
        return tokens / costs.step(1, 9, len(nodes), max(map(len, kept), default=0))

    for most in (2, 5, 11):
        trees = [nodes for nodes in closed(parents) if len(nodes) <= most]
        expected_speed = max(map(speed, trees)) * costs.plain(1, 9)
        found = best_static(acceptance, costs, 1, 9, most)
        assert (found.speedup if found else 1.0) == pytest.approx(expected_speed)
        if found:
            assert found.nodes <= most and len(found.shape.parents) == found.nodes


def test_likeliest_paths_come_in_order_and_after_their_parents() -> None:
    acceptance = [[0.3, 0.6], [0.5, 0.0, 0.4]]
    found = likeliest(acceptance, 99)
    products = {path: math.prod(acceptance[d][r] for d, r in enumerate(path)) for path in all_paths(acceptance)}
    assert {path: chance for chance, path in found} == pytest.approx(
        {path: chance for path, chance in products.items() if chance}
    )
    chances = [chance for chance, _ in found]
    assert chances == sorted(chances, reverse=True)
    seen: set[tuple[int, ...]] = {()}
    for _, path in found:
        assert path[:-1] in seen
        seen.add(path)
    assert likeliest([], 3) == [] and likeliest([[]], 3) == []


def test_nothing_pays_where_passes_over_several_nodes_are_dear() -> None:
    assert best_static([[0.5, 0.2], [0.5]], made(slope=0.6), 1, 64, 16) is None
    assert best_static([[0.5, 0.2], [0.5]], made(slope=0.01, level=0.01), 1, 64, 16) is not None
    assert best_static([], made(), 1, 64, 16) is None


def test_acceptance_by_rank_is_read_from_reports() -> None:
    """Ten passes that offered two levels: six kept the first guess, two the second; of the eight three went on."""
    report = Report()
    for accepted, ranks in ((2, [0, 1]),) * 3 + ((1, [0]),) * 3 + ((1, [1]),) * 2 + ((0, []),) * 2:
        report.add(accepted, 2, stopped=False, ranks=ranks)
    found = conditional(dict(report.ranks), report.rounds)
    assert found == [[0.6, 0.2], [0.0, 3 / 8]]
    assert conditional({}, []) == []
