"""What guesses are worth, against slow and obvious ways to say it; what is kept of them moves it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headstart.infer.learned import FORGET, MEMORY, SLOWEST, Learned
from headstart.infer.tree import DraftTree
from headstart.infer.worth import CLASSES, TRUST, Guesses, Table, chances, claims, class_of, ratios, worth
from tests.reference import depth_of, path_of, random_parents


def random_tree(n: int, generator: torch.Generator, rows: int = 1) -> DraftTree:
    """Any tree with claims, the last nodes of every row but the first padded."""
    parents = torch.tensor([random_parents(n, generator) for _ in range(rows)])
    valid = torch.ones(rows, n, dtype=torch.bool)
    for row in range(1, rows):
        valid[row, n - row :] = False
    parents = torch.where(valid, parents, -1)
    logq = torch.rand(rows, n, generator=generator).clamp(min=0.01).log()
    return DraftTree(torch.zeros_like(parents), parents, valid, logq)


def claimed_by(tree: DraftTree) -> Guesses:
    """A tree on the host."""
    return claims(tree.parents.tolist(), tree.valid.tolist(), None if tree.logq is None else tree.logq.tolist())


def nothing(depth: int) -> Table:
    """No evidence."""
    return [[0.0] * CLASSES for _ in range(depth)]


def some(depth: int, generator: torch.Generator) -> Table:
    table: Table = (10 * torch.rand(depth, CLASSES, generator=generator)).tolist()
    return table


def share(right: float, should: float, before: float, trust: float) -> float:
    return (right + trust * before) / (should + trust)


def slow(path: float, depth: int, claimed: Table, kept: Table) -> float:
    """Chance of a guess by the definition: the claim, times what was kept of its kind over what should have been; that
    begins as it is for all guesses of its depth, and that as for all guesses."""
    at, kind = min(depth, len(claimed)) - 1, min(math.floor(-2 * math.log2(math.exp(path))), CLASSES - 1)
    overall = share(sum(map(sum, kept)), sum(map(sum, claimed)), 1.0, TRUST[0])
    level = share(sum(kept[at]), sum(claimed[at]), overall, TRUST[1])
    return min(1.0, math.exp(path) * share(kept[at][kind], claimed[at][kind], level, TRUST[2]))


def test_claims_are_products_along_paths() -> None:
    g = torch.Generator().manual_seed(1)
    for n in (1, 2, 5, 17):
        tree = random_tree(n, g, rows=2 if n > 2 else 1)
        found = claimed_by(tree)
        for row, (parents, depths, claimed, kinds) in enumerate(zip(*found, strict=True)):
            for node in range(n):
                if not tree.valid[row, node]:
                    assert (claimed[node], depths[node]) == (0.0, 0)
                    continue
                assert tree.logq is not None
                path = float(tree.logq[row, path_of(parents, node)[1:]].double().sum())
                assert claimed[node] == pytest.approx(math.exp(path)) and kinds[node] == class_of(path)
                assert depths[node] == depth_of(parents, node)


def test_without_probabilities_a_claim_goes_by_the_place_among_siblings() -> None:
    """Padding among the siblings takes no place."""
    found = claims([[-1, 0, 0, 1, 1, 0, 0]], [[True] * 5 + [False, True]], None)
    assert found.claimed[0] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 4, 1 / 8, 0, 1 / 8])
    assert found.kind[0] == [0, 2, 4, 4, 6, 0, 6]  # powers of two stand where a class begins, whatever the rounding


def test_a_claim_that_is_no_probability_is_none() -> None:
    found = claims([[-1, 0, 1, 0]], [[True] * 4], [[0.0, math.nan, -0.5, 1e-3]])
    assert found.claimed[0] == [1.0, 0.0, 0.0, 1.0] and found.kind[0] == [0, CLASSES - 1, CLASSES - 1, 0]
    assert worth(found, ratios(nothing(2), nothing(2))) == [[1.0, 0.0, 0.0, 1.0]]


def test_a_calibration_begins_with_the_claim_and_goes_to_what_is_seen() -> None:
    chain = claims([[-1, 0, 1, 2]], [[True] * 4], [[0.0, math.log(0.9), 0.0, 0.0]])
    assert worth(chain, ratios(nothing(2), nothing(2)))[0] == pytest.approx([1.0, 0.9, 0.9, 0.9])
    claimed, kept = nothing(2), nothing(2)
    claimed[1][class_of(math.log(0.9))], kept[1][class_of(math.log(0.9))] = 9000.0, 500.0
    found = worth(chain, ratios(claimed, kept))[0]  # what is deeper than known is as the deepest
    assert found == pytest.approx([1.0, *[0.9 * 500 / 9000] * 3], rel=0.02)  # and a depth that is not known, as others
    claimed[0][class_of(math.log(0.9))], kept[0][class_of(math.log(0.9))] = 9000.0, 8000.0
    found = worth(chain, ratios(claimed, kept))[0]
    assert found == pytest.approx([1.0, 0.8, *[0.9 * 500 / 9000] * 2], rel=0.02)
    claimed[0][3], kept[0][3] = 0.001, 1.0  # one that was lucky says little
    assert ratios(claimed, kept)[0][3] == pytest.approx(8000 / 9000, abs=0.2)
    kept = [[1e6] * CLASSES] * 2
    assert worth(chain, ratios(claimed, kept))[0] == [1.0] * 4  # a chance, whatever the ratio
    assert [class_of(path) for path in (0.0, -0.1, -1e9, -math.inf)] == [0, 0, CLASSES - 1, CLASSES - 1]
    for half in range(2 * CLASSES):  # half a factor of two each
        assert class_of(-math.log(2.0) * (half + 0.5) / 2) == min(half, CLASSES - 1)


def test_no_node_is_worth_more_than_its_parent() -> None:
    """Against the least chance on its path, by the definition."""
    g = torch.Generator().manual_seed(2)
    guesses, evidence = claimed_by(random_tree(12, g, rows=3)), (some(4, g), some(4, g))
    found = worth(guesses, ratios(*evidence))
    for chance, parents, depths, claimed, _ in zip(found, *guesses, strict=True):
        for node, depth in enumerate(depths):
            above = path_of(parents, node)[1:]
            raw = [slow(math.log(claimed[i]), depths[i], *evidence) for i in above if depth]
            assert chance[node] == pytest.approx(min([1.0, *raw]) if depth or node == 0 else 0.0)
            assert depth == 0 or chance[node] <= chance[parents[node]]


def test_guesses_of_a_frontier_have_the_chances_of_their_depth() -> None:
    g = torch.Generator().manual_seed(4)
    evidence = (some(3, g), some(3, g))
    paths: Table = torch.rand(2, 8, generator=g).log().mul(3).tolist()
    found = chances(paths, ratios(*evidence)[1])
    for row, claimed in zip(found, paths, strict=True):
        assert row == pytest.approx([slow(path, 2, *evidence) for path in claimed])
    assert chances([[-math.inf, 0.0]], [9.0] * CLASSES) == [[0.0, 1.0]]


def test_part_of_a_tree_keeps_its_claims() -> None:
    guesses = claims([[-1, 0, 0, 1, 2], [-1, 0, 1, -1, -1]], [[True] * 5, [True] * 3 + [False] * 2], None)
    found = guesses.taken([[0, 2, 4], [0, 1, 3]])
    assert found.parents == [[-1, 0, 1], [-1, 0, -1]] and found.depth == [[0, 1, 2], [0, 1, 0]]
    for part, whole in ((found.claimed, guesses.claimed), (found.kind, guesses.kind)):
        assert part == [[whole[0][i] for i in (0, 2, 4)], [whole[1][i] for i in (0, 1, 3)]]


@pytest.mark.parametrize("on", [True, False])
def test_evidence_is_a_sum_that_fades(on: bool) -> None:
    """Ten steps of three rows, one of them unusable, against sums written out guess by guess."""
    g = torch.Generator().manual_seed(3)
    known, sums = Learned.nothing(3), [nothing(3), nothing(3), [[0.0, 0.0] for _ in range(3)]]
    known.on, memory = on, MEMORY if on else FORGET
    for _ in range(10):
        tree = random_tree(9, g, rows=3)
        guesses = claimed_by(tree)
        nodes: list[Any] = [path_of(guesses.parents[row], int(torch.randint(6, (1,), generator=g))) for row in range(3)]
        hoped = {depth: float(torch.rand((), generator=g)) for depth in (1, 2, 3)}  # of depth 3 nothing is kept
        paths = [path + [-1] * 9 for path in nodes]
        known.observe(guesses, paths, [len(path) for path in nodes], [True, False, True], hoped)
        sums = [[[memory * x for x in row] for row in table] for table in sums]
        for row in (0, 2):
            for node in range(1, 9):
                depth, claim = guesses.depth[row][node], guesses.claimed[row][node]
                if tree.valid[row, node]:
                    sums[0][min(depth, 3) - 1][class_of(math.log(claim))] += claim
                    sums[1][min(depth, 3) - 1][class_of(math.log(claim))] += node in nodes[row]
            for depth in (1, 2):
                sums[2][depth][0] += len(nodes[row]) - 1 > depth
                sums[2][depth][1] += hoped[depth] / 3  # of three rows together
    for fast, other in zip((known.claimed, known.kept, known.brought), sums, strict=True):
        assert [x for row in fast for x in row] == pytest.approx([x for row in other for x in row])


def test_drawn_trees_are_foreseen_by_depth_and_size() -> None:
    """Two rows, one of them idle: what the best 1, 2 and 4 nodes no deeper than d give the other."""
    known = Learned.nothing(2)
    chance, depth = [[1.0, 0.5, 0.25, 0.125], [1.0, 0.0, 0.0, 0.0]], [[0, 1, 2, 1], [0, 0, 0, 0]]
    known.foresee(chance, depth, 1)
    assert known.forecast[0][:3] == [1.0, 1.5, 1.625] and known.forecast[1][:3] == [1.0, 1.5, 1.875]
    assert all(math.isnan(x) for row in known.forecast for x in row[3:])
    known.foresee([[1.0, 0.1, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], depth, 1)
    assert known.forecast[1][1] == pytest.approx(1.5 + SLOWEST * (1.1 - 1.5))
