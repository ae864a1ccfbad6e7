"""The oracle: right as often as asked, on trees of one shape, and the text stays the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.infer.draft_oracle import Oracle
from headstart.infer.grow import Budget
from headstart.infer.speculator import Speculator
from headstart.infer.tree import DraftTree, validate
from tests.toys import llama

NEW = 160


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(eos_token_id=None).double()


@pytest.fixture(scope="module")
def call(model: Any) -> dict[str, Any]:
    ids = torch.tensor([[7, 11, 13, 5]])
    return {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def plain(model: Any, call: dict[str, Any]) -> Tensor:
    text: Tensor = model.generate(**call)
    return text


def grown(source: Oracle, prompt: list[int], depth: int = 9, nodes: int = 99, ends: tuple[int, ...] = ()) -> DraftTree:
    drafter = source.drafter(llama(), torch.tensor(ends, dtype=torch.int64))
    drafter.start(torch.tensor([prompt]), torch.tensor([len(prompt)]), 99)
    tree = drafter.grow(torch.tensor([prompt[-1]]), Budget(nodes, depth, torch.tensor([depth])))
    validate(tree, 320)
    return tree


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_it_is_right_as_often_as_asked(model: Any, call: dict[str, Any], plain: Tensor, acceptance: float) -> None:
    fast = Speculator(model, Oracle([plain[0].tolist()], acceptance), nodes=16)
    assert torch.equal(fast.generate(**call), plain)
    depths = fast.report.depths
    kept = sum(d.kept for d in depths) / sum(d.reached for d in depths)
    assert kept == acceptance if acceptance in (0.0, 1.0) else abs(kept - acceptance) < 0.12
    assert fast.report.passes == {0.0: NEW, 1.0: -(-NEW // 6)}.get(acceptance, fast.report.passes)


def test_the_same_call_again_is_the_same(model: Any, call: dict[str, Any], plain: Tensor) -> None:
    """Its random numbers are its own: the global ones stay as they are."""
    fast = Speculator(model, Oracle([plain[0].tolist()], 0.5), nodes=16)
    state = torch.get_rng_state()
    rounds = []
    for _ in range(2):
        fast.generate(**call)
        rounds.append(fast.report.rounds)
    assert rounds[0] == rounds[1] and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("text", [[1, 2, 3, 10, 11, 12, 13, 14], [1, 2, 4, 10, 11]])
def test_all_trees_have_one_shape(text: list[int]) -> None:
    """Also where the text is another one, and nothing is known."""
    tree = grown(Oracle([text], 1.0, depth=4, branch=3), [1, 2, 3])
    assert tree.tokens.shape == (1, 13) and bool(tree.valid.all())
    level = [tree.tokens[0, 1 + 3 * d : 4 + 3 * d].tolist() for d in range(4)]
    assert [token in level[d] for d, token in enumerate([10, 11, 12, 13])] == [text[2] == 3] * 4
    assert all(len(set(tokens)) == 3 for tokens in level)


def test_budget_and_end_tokens_end_it() -> None:
    source = Oracle([[1, 2, 3, 10, 11, 12]], 1.0, depth=5, branch=3)
    assert grown(source, [1, 2], nodes=9).tokens.shape[1] == 7
    assert grown(source, [1, 2], depth=2).tokens.shape[1] == 7
    assert grown(source, [1, 2], nodes=3).tokens.shape[1] == 1
    assert grown(source, [1, 2], ends=(10,)).tokens.shape[1] == 7


def test_each_row_follows_its_own_text(model: Any) -> None:
    ids = torch.tensor([[7, 11, 13, 5], [9, 8, 7, 6]])
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = model.generate(ids, **call)
    fast = Speculator(model, Oracle(plain.tolist(), 1.0), nodes=16)
    assert torch.equal(fast.generate(ids, **call), plain)
    assert fast.report.tokens_per_pass == 6.0


@pytest.mark.parametrize("wrong", [{"acceptance": 1.5}, {"depth": 0}, {"branch": 320}])
def test_sizes_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"acceptance from 0 to 1.*branch < 320"):
        Speculator(llama(), Oracle([], **({"acceptance": 0.5} | wrong)))
