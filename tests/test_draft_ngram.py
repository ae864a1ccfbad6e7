"""Prompt lookup and token recycling: what they propose, and that it costs little."""

from __future__ import annotations

import time

import pytest
import torch

from headstart.infer.accept import Accepted
from headstart.infer.draft_ngram import PromptLookup, TokenRecycling
from headstart.infer.grow import Budget
from headstart.infer.target import Seen, Verified
from headstart.infer.tree import DraftTree, root_only, validate
from tests.reference import path_of
from tests.toys import c64

NO_ENDS = torch.zeros(0, dtype=torch.int64)


def lookup(
    text: list[int], nodes: int = 16, depth: int = 10, ends: list[int] | None = None, **options: int
) -> set[tuple[int, ...]]:
    """Paths proposed after ``text``."""
    drafter = PromptLookup(**options).drafter(None, torch.tensor(ends or [], dtype=torch.int64))
    drafter.start(torch.tensor([text]), torch.tensor([len(text)]), 99)
    tree = drafter.grow(torch.tensor([text[-1]]), Budget(nodes, depth, torch.tensor([depth])))
    validate(tree, 10_000)
    assert tree.tokens[0, 0] == text[-1] and tree.tokens.shape[1] <= nodes
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    leaves = set(range(1, len(tokens))) - set(parents)
    return {tuple(tokens[i] for i in path_of(parents, leaf)[1:]) for leaf in leaves}


def test_the_longest_match_comes_first() -> None:
    text = [1, 2, 3, 50, 51, 9, 3, 60, 61, 8, 1, 2, 3]
    assert lookup(text, nodes=3, longest=3) == {(50, 51)}
    assert lookup(text, depth=2) == {(50, 51), (60, 61)}


def test_several_continuations_share_a_trie() -> None:
    text = [7, 1, 2, 7, 1, 3, 7, 1, 2, 7]
    assert lookup(text, depth=2, longest=1) == {(1, 2), (1, 3)}


def test_nothing_is_proposed_past_an_end_token_or_the_text() -> None:
    assert lookup([7, 1, 2, 4, 7], ends=[2]) == {(1, 2)}
    assert lookup([7, 1, 7], depth=9) == {(1, 7)}


@pytest.mark.parametrize("text", [[5], [5, 6], [5, 6, 7]])
def test_without_a_match_only_the_root_is_left(text: list[int]) -> None:
    """FC-080: short prompts, distinct tokens, and a match that is the text's own end."""
    assert lookup(text, longest=3) == set()


def test_rows_have_their_own_texts() -> None:
    drafter = PromptLookup().drafter(None, NO_ENDS)
    drafter.start(torch.tensor([[1, 2, 1, 0], [3, 4, 5, 6]]), torch.tensor([3, 4]), 99)
    tree = drafter.grow(torch.tensor([1, 6]), Budget(8, 4, torch.tensor([4, 4])))
    validate(tree, 99)
    assert tree.valid.sum(1).tolist() == [3, 1] and tree.tokens[0, :3].tolist() == [1, 2, 1]
    path = torch.zeros(2, 2, dtype=torch.int64)
    Accepted(path, path, torch.tensor([2, 1]))
    drafter.observe(Seen(torch.tensor([[2, 9], [3, 0]]), torch.tensor([2, 1]), None, tree, None))
    tree = drafter.grow(torch.tensor([9, 3]), Budget(8, 4, torch.tensor([4, 4])))
    assert tree.valid.sum(1).tolist() == [1, 3] and tree.tokens[1].tolist() == [3, 4, 5]


def test_a_longer_match_reaches_further() -> None:
    """Two guesses for each token that matched, unless told otherwise."""
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3]])
    for reach, expected in ((1, [3, 4, 5]), (2, [3, 4, 5, 6, 7]), (9, [3, 4, 5, 6, 7, 8, 9, 2, 3])):
        drafter = PromptLookup(reach=reach).drafter(None, NO_ENDS)
        drafter.start(text, torch.tensor([11]), 99)
        tree = drafter.grow(torch.tensor([3]), Budget(16, 10, torch.tensor([10])))
        assert tree.tokens[0].tolist() == expected


def test_a_round_on_a_long_text_takes_milliseconds() -> None:
    """FC-140: 8,000 ids, windows up to 64, 200 rounds."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (1, 8000), generator=g)
    drafter = PromptLookup(longest=64).drafter(None, NO_ENDS)
    drafter.start(ids, torch.tensor([8000]), 9000)
    began = time.perf_counter()
    for token in ids[0, :200].tolist():
        tree = drafter.grow(torch.tensor([token]), Budget(16, 8, torch.tensor([8])))
        drafter.observe(Seen(torch.tensor([[token]]), torch.tensor([1]), None, tree, None))
    assert (time.perf_counter() - began) / 200 < 0.01


def test_recycling_learns_from_every_verified_row() -> None:
    model = c64()
    drafter = TokenRecycling(successors=2).drafter(model, NO_ENDS)
    budget = Budget(8, 3, torch.tensor([3]))
    assert not drafter.grow(torch.tensor([5]), budget).valid[0, 1:].any()
    tree = DraftTree(
        torch.tensor([[5, 6, 30, 0]]), torch.tensor([[-1, 0, 0, -1]]), torch.tensor([[True, True, True, False]])
    )
    logits = torch.zeros(1, 4, 64)
    for node, after in enumerate((6, 7, 31, 9)):
        logits[0, node, after] = 2.0
        logits[0, node, 40 + node] = 1.0
    drafter.observe(Seen(torch.tensor([[6]]), torch.tensor([1]), None, tree, Verified(logits, None)))
    grown = drafter.grow(torch.tensor([5]), budget)
    validate(grown, 64)
    parents, tokens = grown.parents[0].tolist(), grown.tokens[0].tolist()
    found = {tuple(tokens[i] for i in path_of(parents, n)) for n in range(1, 8) if grown.valid[0, n]}
    assert found == {(5, 6), (5, 40), (5, 6, 7), (5, 6, 41)}  # 30's successors wait; padding taught nothing
    assert drafter.grow(torch.tensor([0]), budget).valid.sum() == 1


@pytest.mark.parametrize(
    "source", [PromptLookup(shortest=3, longest=2), PromptLookup(depth=0), TokenRecycling(width=0)]
)
def test_sizes_that_make_no_sense_are_refused(source: PromptLookup | TokenRecycling) -> None:
    with pytest.raises(ValueError, match="needs"):
        source.check(None)


def test_plain_steps_where_there_is_no_room() -> None:
    drafter = TokenRecycling().drafter(c64(), NO_ENDS)
    root = torch.tensor([5])
    assert torch.equal(drafter.grow(root, Budget(8, 0, torch.tensor([0]))).tokens, root_only(root).tokens)
