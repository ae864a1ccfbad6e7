"""The tree and its functions against the slow reference."""

from __future__ import annotations

import pytest
import torch

from headstart.infer.tree import (
    DraftTree,
    _pruned,
    _pruned_on_host,
    ancestors,
    depths,
    path_to,
    pruned,
    root_only,
    validate,
    visible,
)
from tests.reference import depth_of, path_of, random_parents


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 33])
def test_depths_ancestors_and_paths_equal_the_reference(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    rows = [random_parents(n, generator) for _ in range(4)]
    parents = torch.tensor(rows)
    depth, reach = depths(parents), ancestors(parents)
    for b, row in enumerate(rows):
        for node in range(n):
            path = path_of(row, node)
            assert depth[b, node] == depth_of(row, node)
            assert reach[b, node].nonzero().flatten().tolist() == sorted(path)
    node = torch.randint(n, (4,), generator=generator)
    found = path_to(parents, node, n)
    for b, row in enumerate(rows):
        path = path_of(row, int(node[b]))
        assert found[b].tolist() == path + [-1] * (n - len(path))


def test_a_chain_is_as_deep_as_it_is_long() -> None:
    parents = torch.arange(-1, 63)[None]
    assert depths(parents)[0].tolist() == list(range(64))
    assert torch.equal(ancestors(parents)[0], torch.ones(64, 64, dtype=torch.bool).tril())


def test_padding_sees_itself_only_and_nobody_sees_it() -> None:
    tree = DraftTree(
        torch.zeros(1, 4).long(), torch.tensor([[-1, 0, -1, -1]]), torch.tensor([[True, True, False, False]])
    )
    seen = visible(tree)[0]
    assert seen[2].tolist() == [False, False, True, False]
    assert seen[:, 2].tolist() == [False, False, True, False]
    assert seen[1].tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("parents", "valid", "tokens", "what"),
    [
        ([-1, 1, 0], [1, 1, 1], [0, 0, 0], "before its child"),
        ([-1, -1, 0], [1, 1, 1], [0, 0, 0], "before its child"),
        ([0, 0, 0], [1, 1, 1], [0, 0, 0], "before its child"),
        ([-1, 0, 1], [1, 0, 1], [0, 0, 0], "hangs on padding"),
        ([-1, 0, 1], [1, 1, 1], [0, 9, 0], "outside 0..8"),
    ],
)
def test_validate_names_what_is_wrong(parents: list[int], valid: list[int], tokens: list[int], what: str) -> None:
    tree = DraftTree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([valid]).bool())
    with pytest.raises(ValueError, match=what):
        validate(tree, 9)


def test_validate_takes_good_trees() -> None:
    validate(root_only(torch.tensor([3, 4])), 9)
    generator = torch.Generator().manual_seed(0)
    parents = torch.tensor([random_parents(12, generator) for _ in range(3)])
    validate(DraftTree(torch.zeros_like(parents), parents, torch.ones_like(parents).bool()), 9)


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_pruned_alike_on_the_host_and_by_operations(seed: int) -> None:
    """Anything may stand in them: parents that come later, padding, tokens outside, paths too long for a row."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (3, 12), generator=generator)

    good = torch.tensor([random_parents(12, generator) for _ in range(3)])
    parents = torch.where(drawn(0, 4) == 0, drawn(-1, 14), good)
    tree = DraftTree(drawn(-1, 21), parents, drawn(0, 6) > 0, logq=torch.zeros(3, 12))
    room = torch.tensor([0, 2, 20])
    slow, fast = _pruned(tree, room, 20), _pruned_on_host(tree, room, 20)
    for field in ("tokens", "parents", "valid"):
        assert torch.equal(getattr(slow, field), getattr(fast, field)), field
        assert getattr(slow, field).dtype == getattr(fast, field).dtype


def test_a_tree_that_may_stay_is_handed_on_as_it_is() -> None:
    parents = torch.tensor([random_parents(8, torch.Generator().manual_seed(0))] * 2)
    tree = DraftTree(torch.ones_like(parents), parents, torch.ones_like(parents, dtype=torch.bool))
    assert pruned(tree, torch.tensor([8, 8]), 20) is tree
