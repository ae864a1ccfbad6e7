"""Trees from laws: the likeliest paths, fixed shapes, rooms, end tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.infer.grow import Budget, Children, Expand, Shape, best_first, static
from headstart.infer.tree import depths, validate
from tests.reference import likeliest_paths, path_of

LAWS = [[0.5, 0.3, 0.15, 0.05], [0.6, 0.25, 0.1, 0.05], [0.4, 0.35, 0.2, 0.05]]


def marginals(laws: list[list[float]], batch: int = 1, path_free: bool = True) -> Expand:
    """Laws that depend on the depth alone; child r at depth d is token 10 d + r + 1."""

    def expand(tokens: Tensor, above: Tensor, depth: int) -> Children:
        w = 1 if path_free else tokens.shape[1]
        logq = torch.tensor(laws[depth]).log().expand(batch, w, -1)
        ids = (10 * depth + 1 + torch.arange(len(laws[depth]))).expand(batch, w, -1)
        return Children(logq, ids)

    return expand


def test_a_law_that_sums_to_more_than_one_leaves_the_root_in_place() -> None:
    """The place of a drawn child has a chance of one, which may round up: paths must not rise above their root."""

    def expand(tokens: Tensor, above: Tensor, depth: int) -> Children:
        return Children(torch.full((1, 1, 1), 1e-6), torch.full((1, 1, 1), 10 + depth), torch.ones(1, 1, 20) / 20)

    tree = best_first(torch.tensor([7]), expand, budget(4, 5), width=1)
    assert tree.tokens.tolist() == [[7, 10, 11, 12]] and tree.parents.tolist() == [[-1, 0, 1, 2]]
    validate(tree, 20)


def budget(nodes: int, depth: int, *rooms: int) -> Budget:
    return Budget(nodes, depth, torch.tensor(rooms or (depth,)))


def paths(tree: object, row: int = 0) -> set[tuple[int, ...]]:
    """The valid paths of a tree as ranks."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()  # type: ignore[attr-defined]
    nodes = [i for i in range(1, len(parents)) if tree.valid[row, i]]  # type: ignore[attr-defined]
    return {tuple((tokens[i] - 1) % 10 for i in path_of(parents, node)[1:]) for node in nodes}


@pytest.mark.parametrize("nodes", [2, 5, 9, 16, 30])
@pytest.mark.parametrize("path_free", [True, False])
def test_best_first_keeps_the_largest_products(nodes: int, path_free: bool) -> None:
    tree = best_first(torch.tensor([7]), marginals(LAWS, path_free=path_free), budget(nodes, 3), width=64)
    validate(tree, 100)
    assert tree.tokens[0, 0] == 7
    assert paths(tree) == likeliest_paths(LAWS, nodes)
    assert tree.logq is not None
    path = path_of(tree.parents[0].tolist(), nodes - 1)
    product = tree.logq[0, path].sum().exp()
    expected = torch.tensor([LAWS[d][(int(tree.tokens[0, n]) - 1) % 10] for d, n in enumerate(path[1:])]).prod()
    assert torch.allclose(product, expected)


def test_a_narrow_frontier_still_gives_a_tree() -> None:
    tree = best_first(torch.tensor([7]), marginals(LAWS), budget(40, 3), width=1)
    validate(tree, 100)
    assert {p for p in paths(tree) if len(p) == 3} == {(0, 0, r) for r in range(4)}


def test_ties_prefer_the_shallow_so_that_parents_come_first() -> None:
    certain = [[1.0], [1.0], [1.0]]
    tree = best_first(torch.tensor([7]), marginals(certain), budget(3, 3), width=4)
    validate(tree, 100)
    assert tree.parents[0].tolist() == [-1, 0, 1]


def test_each_row_keeps_to_its_own_room() -> None:
    tree = best_first(torch.tensor([7, 8, 9]), marginals(LAWS, 3), budget(16, 3, 0, 1, 3), width=8)
    validate(tree, 100)
    deepest = torch.where(tree.valid, depths(tree.parents), 0).amax(1)
    assert deepest.tolist() == [0, 1, 3]


def test_nothing_grows_below_an_end_token() -> None:
    tree = best_first(torch.tensor([7]), marginals(LAWS), budget(30, 3), width=64, barren=torch.tensor([1, 12]))
    validate(tree, 100)
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    above = {tokens[parents[i]] for i in range(1, len(tokens)) if tree.valid[0, i]}
    assert 1 in tokens and 12 in tokens
    assert not above & {1, 12}


def test_growth_ends_when_more_says_so() -> None:
    asked = []

    def more(logq: Tensor, depth: int) -> bool:
        asked.append((logq.shape, depth))
        return depth < 2

    tree = best_first(torch.tensor([7]), marginals(LAWS), budget(30, 3)._replace(more=more), width=8)
    assert int(depths(tree.parents).max()) == 2 and asked == [((1, 4), 1), ((1, 8), 2)]


def test_a_shape_is_filled_as_drawn() -> None:
    shape = Shape.of([[0], [2], [0, 1], [2, 0, 3]])
    assert shape.parents == (-1, 0, 0, 1, 2, 4) and shape.ranks == (0, 0, 2, 1, 0, 3)
    tree = static(torch.tensor([7]), marginals(LAWS, path_free=False), budget(6, 3), shape)
    validate(tree, 100)
    assert paths(tree) == {(0,), (2,), (0, 1), (2, 0), (2, 0, 3)}


def test_a_shape_keeps_to_room_depth_and_end_tokens() -> None:
    shape = Shape.of([[0, 0, 0], [1]])
    tree = static(torch.tensor([7, 8]), marginals(LAWS, 2), budget(8, 2, 2, 1), shape)
    assert paths(tree, 0) == {(0,), (1,), (0, 0)}
    assert paths(tree, 1) == {(0,), (1,)}
    ended = static(torch.tensor([7]), marginals(LAWS), budget(8, 3), shape, barren=torch.tensor([1]))
    assert paths(ended) == {(0,), (1,)}


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the budget allows 2"):
        static(torch.tensor([7]), marginals(LAWS), budget(2, 3), Shape.of([[0], [1]]))
    with pytest.raises(ValueError, match="only 4 were offered"):
        static(torch.tensor([7]), marginals(LAWS), budget(8, 3), Shape.of([[5]]))


def test_rows_without_room_are_not_asked_about() -> None:
    """Where one row may still grow, the claims of the others' frontiers are none."""
    paths = []

    def expand(tokens: Tensor, above: Tensor, depth: int) -> Children:
        return Children(torch.tensor([[[0.5, 0.4]]]).log().expand(3, tokens.shape[1], -1), torch.ones(3, 1, 2).long())

    def more(path: Tensor, depth: int) -> bool:
        paths.append(path.exp().sum(1))
        return True

    best_first(torch.tensor([7, 7, 7]), expand, Budget(32, 3, torch.tensor([1, 3, 2]), more), width=4)
    assert [[round(float(x), 2) for x in path] for path in paths] == [[0.0, 0.9, 0.9], [0.0, 0.81, 0.0]]
