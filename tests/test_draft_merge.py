"""Merging: equal paths once, earlier sources first, nothing past the budget."""

from __future__ import annotations

import pytest
import torch

from headstart.heads import FAMILIES
from headstart.infer.draft_merge import Merged, merge
from headstart.infer.draft_ngram import PromptLookup, TokenRecycling, from_lists
from headstart.infer.speculator import Speculator
from headstart.infer.tree import DraftTree, validate
from tests.reference import path_of
from tests.toys import c64, llama

ROOT = torch.tensor([9, 8])
ONE = from_lists([([9, 1, 2, 3], [-1, 0, 1, 0]), ([8, 5], [-1, 0])], ROOT)  # 1-2, 3 | 5
TWO = from_lists([([9, 1, 4, 7], [-1, 0, 1, 2]), ([8, 6, 5], [-1, 0, 1])], ROOT)  # 1-4-7 | 6-5


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    return {tuple(tokens[i] for i in path_of(parents, n)[1:]) for n in range(1, len(tokens)) if tree.valid[row, n]}


def test_equal_paths_stand_once() -> None:
    tree = merge([ONE, TWO], 16)
    validate(tree, 10)
    assert paths(tree, 0) == {(1,), (1, 2), (3,), (1, 4), (1, 4, 7)}
    assert paths(tree, 1) == {(5,), (6,), (6, 5)}


def test_the_budget_cuts_the_later_tree_and_never_a_parent_alone() -> None:
    tree = merge([ONE, TWO], 5)
    validate(tree, 10)
    assert paths(tree, 0) == {(1,), (1, 2), (3,), (1, 4)}


def test_sampled_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="deterministic"):
        merge([ONE._replace(drawn=torch.zeros(2, 4)), TWO], 9)


def test_a_merge_accepts_what_either_source_knows() -> None:
    """Half of 16 nodes go to lookup, so the union is at least as good as lookup with 8."""
    model = c64()
    ids = torch.cat([torch.arange(64), torch.arange(5)])[None]
    mask = torch.ones_like(ids)
    found = {}
    for name, source, nodes in (("lookup", "prompt-lookup", 8), ("both", ["prompt-lookup", "token-recycling"], 16)):
        fast = Speculator(model, source, nodes=nodes)
        fast.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        found[name] = fast.report.tokens_per_pass
    assert found["both"] >= found["lookup"] > 3
    assert fast.report.drafter == "prompt-lookup + token-recycling"


def test_merges_that_cannot_be_are_refused() -> None:
    model = llama()
    last, middle = (FAMILIES["medusa"].from_target(model, features=[i]) for i in (4, 2))
    with pytest.raises(ValueError, match="read the same"):
        Speculator(model, [last, middle])
    with pytest.raises(ValueError, match="two sources"):
        Speculator(model, ["prompt-lookup"])
    with pytest.raises(ValueError, match="share"):
        Merged((PromptLookup(), TokenRecycling()), share=1.5).check(model)
    with pytest.raises(ValueError, match="unknown drafter"):
        Speculator(model, ["prompt-lookup", "x"])
