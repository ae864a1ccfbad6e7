"""Lookahead decoding: the comb and its update by hand, what enters the pool, and tokens a pass on a counting target."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstart.infer.draft_lookahead import Lookahead, _Lookahead, moved
from headstart.infer.draft_merge import merge
from headstart.infer.draft_ngram import from_lists
from headstart.infer.grow import Budget
from headstart.infer.speculator import Speculator
from headstart.infer.target import Seen, Verified
from headstart.infer.tree import DraftTree, depths, validate
from tests.reference import path_of
from tests.toys import VOCAB, c64, llama

WINDOW = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
FULL = [3, 3, 3]
NEW = [13, 23, 33]


def made(text: list[int], ends: list[int] | None = None, **options: int) -> _Lookahead:
    """A drafter that has seen a prompt of one row."""
    drafter = Lookahead(**options).drafter(None, torch.tensor(ends or [], dtype=torch.int64))
    assert isinstance(drafter, _Lookahead)
    drafter.start(torch.tensor([text]), torch.tensor([len(text)]), 99)
    return drafter


def grown(drafter: _Lookahead, root: int, nodes: int = 64, depth: int = 9, room: int = 9) -> DraftTree:
    tree = drafter.grow(torch.tensor([root]), Budget(nodes, depth, torch.tensor([room])))
    validate(tree, 10_000)
    assert tree.tokens.shape[1] <= nodes and int(depths(tree.parents).max()) <= min(depth, room)
    return tree


def observed(drafter: _Lookahead, tree: DraftTree, say: Callable[[int], int], emitted: list[int]) -> None:
    """The target says ``say(token)`` after every node, and the step emitted these tokens."""
    logits = torch.zeros(*tree.tokens.shape, 1000)
    for node, token in enumerate(tree.tokens[0].tolist()):
        logits[0, node, say(token)] = 1.0
    drafter.observe(Seen(torch.tensor([emitted]), torch.tensor([len(emitted)]), None, tree, Verified(logits, None)))


def counting_fill() -> Callable[[int], list[int]]:
    """900, 901 ... so that it shows what was filled and in which order."""
    numbers = itertools.count(900)
    return lambda count: [next(numbers) for _ in range(count)]


def after(count: int, heights: list[int] = FULL, ends: frozenset[int] = frozenset()) -> list[list[int]]:
    return moved(WINDOW, heights, NEW, count, ends, counting_fill())


def test_the_window_is_a_comb() -> None:
    """Column by column: level 0 hangs on the one before, higher levels on their own column."""
    drafter = made([1, 2])
    drafter._rows[0].window = WINDOW
    tree = grown(drafter, 2)
    assert tree.tokens[0].tolist() == [2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 1, 4, 5, 4, 7, 8]
    assert depths(tree.parents)[0].tolist() == [0, 1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert tree.valid.all() and Lookahead(window=3, levels=3).depth == 5


def test_the_pool_comes_first_and_equal_paths_share_nodes() -> None:
    drafter = made([2, 10, 11, 40, 2])  # what followed the 2 begins as column 0 does
    drafter._rows[0].window = [[10, 11, 12], [11, 12, 50], [12, 50, 60]]
    tree = grown(drafter, 2)
    assert tree.tokens[0].tolist() == [2, 10, 11, 40, 12, 50, 60]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 2, 4, 5]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [[11, 12, 13], [21, 22, 23], [31, 32, 33]]),
        (2, [[21, 22, 23], [31, 32, 33], [900, 901, 902]]),
        (3, [[31, 32, 33], [900, 901, 902], [903, 904, 905]]),
        (4, [[900, 901, 902], [903, 904, 905], [906, 907, 908]]),
        (7, [[900, 901, 902], [903, 904, 905], [906, 907, 908]]),
    ],
)
def test_a_token_keeps_its_position_when_the_window_moves(count: int, expected: list[list[int]]) -> None:
    """Depth e becomes depth e - count: here the tens are a column, so level j of column i was at i + 1 + j."""
    assert after(count) == expected
    place = {token: i + 1 + j for i, column in enumerate(WINDOW) for j, token in enumerate([*column, NEW[i]])}
    for i, column in enumerate(after(count)):
        for j, token in enumerate(column):
            assert token >= 900 or place[token] - count == i + 1 + j


def test_a_column_that_was_cut_takes_its_newest_token_where_it_stood() -> None:
    """Column 0 stood two tokens high, column 1 one, column 2 was left out: its own tokens stay, the top is filled."""
    assert after(1, [2, 1, 0]) == [[11, 13, 900], [23, 22, 901], [31, 32, 902]]
    assert after(2, [3, 3, 0]) == [[21, 22, 23], [31, 32, 900], [901, 902, 903]]


def test_end_tokens_leave_the_window() -> None:
    assert after(1, ends=frozenset({13, 22})) == [[11, 12, 900], [21, 901, 23], [31, 32, 33]]


def test_full_columns_enter_the_pool_by_their_first_token() -> None:
    drafter = made([1, 2], prompt=False)
    row = drafter._rows[0]
    row.window = WINDOW
    observed(drafter, grown(drafter, 2), lambda token: token + 1, [7])
    pool = {key: list(rest) for key, rest in row._pool.items()}
    assert pool == {10: [(11, 12, 13)], 20: [(21, 22, 23)], 30: [(31, 32, 33)]}
    assert row.window == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]


def test_what_stands_on_the_root_is_kept_when_the_target_agrees() -> None:
    drafter = made([1, 2], prompt=False)
    row = drafter._rows[0]
    row.window = WINDOW
    observed(drafter, grown(drafter, 2), lambda token: token + 1, [10, 7])
    assert list(row._pool[2]) == [(10, 11, 12)]
    assert list(row._pool[1]) == [(2, 10, 7)]  # the text's own n-gram: 1, then what was emitted


@pytest.mark.parametrize(("learns", "expected"), [(True, {1: [(2, 3)], 2: [(3, 4), (3, 5)]}), (False, {2: [(3, 5)]})])
def test_text_enters_the_pool(learns: bool, expected: dict[int, list[tuple[int, int]]]) -> None:
    """Emitted text always, the prompt where it may."""
    drafter = made([1, 2, 3, 4, 2], levels=2, window=1, prompt=learns)
    pool = drafter._rows[0]._pool
    drafter._rows[0].window = [[50, 51]]
    observed(drafter, grown(drafter, 2), lambda token: 99, [3, 5])
    kept = {key: list(pool[key]) for key in (1, 2) if key in pool}
    assert kept == expected


def test_the_latest_n_grams_are_kept_and_tried_first() -> None:
    row = (drafter := made([7, 1, 7, 2, 7, 3, 7, 1, 7], levels=1, window=1, guesses=2, pool=2))._rows[0]
    assert list(row._pool[7]) == [(3,), (1,)] and row.guesses(7) == [(1,), (3,)]
    assert row.guesses(8) == []
    row.window = [[60]]
    assert grown(drafter, 7).tokens[0].tolist() == [7, 1, 3, 60]


def test_nothing_is_guessed_below_an_end_token() -> None:
    drafter = made([5, 6, 2, 8, 9, 5], ends=[2])
    assert drafter._rows[0].guesses(5) == [(6, 2)]
    drafter._rows[0].window = [[10, 2, 12], [2, 21, 22], [30, 31, 32]]
    tree = grown(drafter, 5)
    assert tree.tokens[0].tolist() == [5, 6, 2, 10, 2]  # column 1 shares the 2; column 2 would stand on it


@pytest.mark.parametrize("nodes", range(1, 9))
@pytest.mark.parametrize("room", range(7))
def test_small_budgets_keep_the_pool_then_columns_then_levels(nodes: int, room: int) -> None:
    drafter = made([2, 70, 71, 72, 2])
    row = drafter._rows[0]
    row.window = [list(column) for column in WINDOW]
    tree = grown(drafter, 2, nodes=nodes, depth=5, room=room)
    whole = [(-1, 2), (0, 70), (1, 71), (2, 72), (0, 10), (4, 11), (5, 12), (4, 20)]  # (parent, token)
    found = list(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True))
    if room >= 3:
        assert found == whole[:nodes]
    assert len(found) == 1 if room == 0 else len(found) > min(1, nodes - 1)
    observed(drafter, tree, lambda token: token + 1, [500])
    assert [len(column) for column in row.window] == [3, 3, 3]
    if nodes >= 8 and room >= 3:
        assert row.window[0] == [11, 12, 13] and row.window[1][:2] == [21, 22]


def test_a_column_too_low_for_the_budget_still_teaches_a_shorter_n_gram() -> None:
    drafter = made([1, 2], prompt=False)
    row = drafter._rows[0]
    row.window = WINDOW
    observed(drafter, grown(drafter, 2, nodes=3), lambda token: token + 1, [7])
    assert {key: list(rest) for key, rest in row._pool.items()} == {10: [(11, 12)]}


@pytest.mark.parametrize("prompt", [[5], [5, 6], [2], [2, 2]])
def test_short_prompts_fill_the_window(prompt: list[int]) -> None:
    """One token, fewer tokens than a column, and nothing but end tokens."""
    drafter = made(prompt, ends=[2])
    row = drafter._rows[0]
    assert {token for column in row.window for token in column} <= set(prompt)
    for _ in range(3):
        tree = grown(drafter, row._text[-1])
        observed(drafter, tree, lambda token: 2 if token == 9 else token + 1, [row._text[-1] + 1])


def test_rows_of_a_batch_are_rows_on_their_own() -> None:
    """Different lengths, a finished row that stays as it is, and a window that does not know its place in the batch."""
    drafter = Lookahead().drafter(None, torch.tensor([2]))
    assert isinstance(drafter, _Lookahead)
    drafter.start(torch.tensor([[5, 6, 7, 5, 6], [9, 8, 0, 0, 0], [5, 6, 7, 5, 6]]), torch.tensor([5, 2, 5]), 99)
    budget = Budget(16, 5, torch.tensor([5, 2, 0]))
    tree = drafter.grow(torch.tensor([6, 8, 6]), budget)
    validate(tree, 320)
    assert tree.valid.sum(1).tolist()[2] == 1 and int(torch.where(tree.valid, depths(tree.parents), 0)[1].max()) == 2
    alone = made([5, 6, 7, 5, 6], ends=[2])
    single = grown(alone, 6, nodes=16, depth=5, room=5)
    size = single.tokens.shape[1]
    assert tree.tokens[0, :size].tolist() == single.tokens[0].tolist() and tree.valid[0].sum() == size
    before = [list(column) for column in drafter._rows[2].window]
    verified = Verified(torch.randn(*tree.tokens.shape, 320, generator=torch.Generator().manual_seed(0)), None)
    emitted = torch.tensor([[7, 5], [4, 0], [0, 0]])
    drafter.observe(Seen(emitted, torch.tensor([2, 1, 0]), None, tree, verified))
    assert drafter._rows[2].window == before and drafter._rows[2]._text == [5, 6, 7, 5, 6]
    assert drafter._rows[0]._text[-2:] == [7, 5] and drafter._rows[1]._text == [9, 8, 4]


def test_sizes_that_make_no_sense_are_refused() -> None:
    for source in (Lookahead(window=0), Lookahead(levels=0), Lookahead(guesses=0), Lookahead(guesses=5, pool=4)):
        with pytest.raises(ValueError, match="lookahead needs"):
            source.check(None)


def watched(monkeypatch: pytest.MonkeyPatch, size: int) -> list[DraftTree]:
    """Every tree that is grown from here on, validated."""
    trees: list[DraftTree] = []
    grow = _Lookahead.grow

    def noted(self: _Lookahead, root: Tensor, budget: Budget) -> DraftTree:
        tree = grow(self, root, budget)
        validate(tree, size)
        assert tree.tokens.shape[1] <= budget.nodes
        deepest = torch.where(tree.valid, depths(tree.parents), 0).amax(1)
        assert (deepest <= budget.room.clamp(max=budget.depth)).all()
        for child, real in zip(tree.parents * size + tree.tokens, tree.valid, strict=True):
            assert child[real].unique().numel() == int(real.sum()), "a path stands twice"
        trees.append(tree)
        return tree

    monkeypatch.setattr(_Lookahead, "grow", noted)
    return trees


def test_a_counting_target_that_repeats_itself_is_guessed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jacobi cannot outrun a target that looks at one token; once round, the pool knows what follows every token."""
    model, ids = c64(), torch.arange(6)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    trees = watched(monkeypatch, 64)
    fast = Speculator(model, "lookahead", nodes=16)
    assert fast.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    assert len(trees) == fast.report.passes
    assert min(accepted + 1 for accepted, _ in fast.report.rounds[64:-1]) >= 4


def test_the_window_finds_what_the_text_has_never_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 30 in the window is counted on from while the text comes up from 20: 31, 32 ... are known on arrival."""
    model, ids = c64(), torch.tensor([[30, 20]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    watched(monkeypatch, 64)
    fast = Speculator(model, Lookahead(prompt=False), nodes=16)
    assert fast.generate(ids, **options)[0, 2:].tolist() == list(range(21, 41))
    assert fast.report.tokens_per_pass > 1.4


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 64])
def test_any_size_of_tree_gives_the_same_text(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().double()
    ids = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :5], mask[1, :5], ids[2, :8], mask[2, :8] = 0, 0, 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **options)
    watched(monkeypatch, VOCAB)
    for source in (Lookahead(), Lookahead(window=5, levels=2, guesses=4), Lookahead(window=1, levels=1, guesses=1)):
        state = torch.get_rng_state()
        assert Speculator(model, source, nodes=nodes).generate(ids, **options).tolist() == expected.tolist()
        assert torch.equal(torch.get_rng_state(), state)


def test_in_a_merge_the_comb_is_found_wherever_it_stands() -> None:
    """The union numbers nodes its own way, and cuts column 2 after one token."""
    drafter = made([1, 2])
    row = drafter._rows[0]
    row.window = WINDOW
    other = from_lists([([2, 10, 99, 98], [-1, 0, 0, 1])], torch.zeros(1))
    tree = merge([other, grown(drafter, 2)], 10)
    assert tree.tokens[0].tolist() == [2, 10, 99, 98, 11, 12, 20, 21, 22, 30]
    observed(drafter, tree, lambda token: token + 1, [7])
    assert row.window[:2] == [[11, 12, 13], [21, 22, 23]] and row.window[2][:2] == [31, 32]
    assert row._pool[30] == {(31,): None}


def test_the_newest_tokens_are_read_at_the_tops_only() -> None:
    """Each column's own top, whatever the other nodes say."""
    drafter = made([1, 2])
    row = drafter._rows[0]
    row.window = [[10, 11, 12], [11, 12, 40], [12, 40, 50]]  # the columns share all nodes they can
    tree = grown(drafter, 2)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    logits = torch.zeros(1, len(tokens), 1000)
    for node in range(len(tokens)):
        logits[0, node, 100 + node] = 1.0
    drafter.observe(Seen(torch.tensor([[7]]), torch.tensor([1]), None, tree, Verified(logits, None)))
    for column, path in zip(row.window, ([10, 11, 12], [10, 11, 12, 40], [10, 11, 12, 40, 50]), strict=True):
        assert [tokens[i] for i in path_of(parents, column[-1] - 100)[1:]] == path
