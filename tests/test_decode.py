"""What the loop reads off a tree on the host is what operations on tensors say."""

from __future__ import annotations

import torch

from headstart.infer.accept import _child, _children
from headstart.infer.decode import _placed
from headstart.infer.tree import DraftTree, depths, siblings_before
from tests.reference import random_parents


def test_places_depths_and_children_of_random_trees() -> None:
    generator = torch.Generator().manual_seed(7)
    for n in (1, 2, 9, 16):
        for _ in range(20):
            parents = torch.tensor([random_parents(n, generator) for _ in range(3)])
            valid = torch.rand(3, n, generator=generator) < 0.8
            valid[:, 0] = True
            tokens = torch.randint(0, 4, (3, n), generator=generator)
            tree = DraftTree(tokens, parents, valid)
            nodes = torch.arange(n).expand(3, -1)
            found = [_placed(*row) for row in zip(parents.tolist(), valid.tolist(), strict=True)]
            assert [places for places, _ in found] == siblings_before(tree, nodes).tolist()
            assert [deepest for _, deepest in found] == torch.where(valid, depths(parents), 0).amax(1).tolist()
            children = _children(tree)
            for node in range(n):
                for token in range(4):
                    expected = _child(tree, torch.full((3,), node), torch.full((3,), token)).tolist()
                    assert [row.get((node, token), -1) for row in children] == expected
