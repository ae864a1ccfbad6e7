"""Attention by groups is the stock one: same sums, for the length of a forward, and everything else as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headstart.heads.attention import GROUPED_ROWS, grouped
from headstart.infer import Speculator
from headstart.infer.costs import key_of
from headstart.infer.grouped import NAME, attention, attention_of, by_groups, has_groups
from headstart.infer.target import Target
from headstart.infer.tree import DraftTree
from tests.toys import VOCAB, gpt2, llama, mistral, qwen3


def name_of(model: Any) -> str:
    name: str = model.config._attn_implementation
    return name


def inputs(heads: int = 6, shared: int = 2, n: int = 5, slots: int = 19, width: int = 8, rows: int = 3) -> list[Any]:
    """Queries, keys, values of another width than theirs, and an additive mask of each row's own."""
    torch.manual_seed(0)
    q = torch.randn(rows, heads, n, width, dtype=torch.float64)
    k, v = (torch.randn(rows, shared, slots, w, dtype=torch.float64) for w in (width, width + 3))
    mask = torch.zeros(rows, 1, n, slots, dtype=torch.float64)
    mask[torch.rand(mask.shape) < 0.4] = torch.finfo(torch.float64).min
    mask[..., 0] = 0.0
    return [q, k, v, mask]


@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("rows", [1, 3])
def test_groups_give_what_repeated_keys_give(shared: int, scale: float | None, rows: int) -> None:
    q, k, v, mask = inputs(shared=shared, rows=rows)
    one_mask = mask[:1]  # as of a text alone: for all rows
    for seen in (mask, one_mask):
        scores = q @ k.repeat_interleave(6 // shared, 1).transpose(2, 3) * (scale or 8**-0.5) + seen
        slow = scores.softmax(-1) @ v.repeat_interleave(6 // shared, 1)
        assert torch.allclose(grouped(q, k, v, seen, scale), slow, atol=1e-12)


class Layer:
    """What the stock function asks a layer for."""

    num_key_value_groups, is_causal, training = 3, True, False


@pytest.mark.parametrize("n", [1, 5, GROUPED_ROWS + 1])
@pytest.mark.parametrize("masked", [True, False])
def test_the_function_gives_what_the_stock_one_gives(n: int, masked: bool) -> None:
    q, k, _, mask = inputs(n=n, slots=n + 7)
    v = k.flip(2)
    given = mask if masked else None
    mine = attention(Layer(), q, k, v, given, 0.0, None)[0]
    stock = sdpa_attention_forward(Layer(), q, k, v, given, 0.0, None)[0]  # type: ignore[arg-type]
    assert mine.shape == stock.shape and mine.is_contiguous()
    assert torch.allclose(mine, stock, atol=1e-12)


def test_a_bias_by_position_is_left_to_the_stock_function() -> None:
    q, k, _, mask = inputs()
    bias = torch.randn(1, 6, 5, 19, dtype=torch.float64)
    mine = attention(Layer(), q, k, k, mask, position_bias=bias)[0]
    stock = sdpa_attention_forward(Layer(), q, k, k, mask, position_bias=bias)[0]  # type: ignore[arg-type]
    assert torch.equal(mine, stock)
    with pytest.raises(ValueError, match="softcap"):
        attention(Layer(), q, k, k, mask, softcap=30.0)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of a branching tree under a text, and of a plain forward over the text."""
    ids = torch.arange(1, 13)[None] % VOCAB
    target = Target(model)
    for _ in target.prefill(ids, torch.tensor([12])):
        pass
    parents = torch.tensor([[-1, 0, 0, 2, 1, 1]])
    tree = DraftTree(torch.tensor([[5, 6, 7, 8, 9, 10]]), parents, torch.ones_like(parents, dtype=torch.bool))
    found: torch.Tensor = torch.cat([target.verify(tree).logits, model(ids).logits], 1)
    return found


@pytest.mark.parametrize("toy", [llama, qwen3, mistral])
def test_a_forward_goes_by_groups_and_the_model_is_as_before(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = toy().double(), []
    assert has_groups(model)

    def counted(*given: Any) -> torch.Tensor:
        calls.append(given[0].shape[2])
        return grouped(*given)

    monkeypatch.setattr("headstart.infer.grouped.grouped", counted)
    mine = logits(model)
    assert calls.count(6) == model.config.num_hidden_layers and name_of(model) == "sdpa"
    monkeypatch.setattr("headstart.infer.grouped.has_groups", lambda model: False)
    assert torch.allclose(mine, logits(model), atol=1e-12)


def test_where_nothing_is_shared_or_attention_is_the_users_own_nothing_changes() -> None:
    alone = llama(num_key_value_heads=llama().config.num_attention_heads)
    eager = llama()
    eager.set_attn_implementation("eager")
    for model, name in ((alone, "sdpa"), (gpt2(), "sdpa"), (eager, "eager")):
        with by_groups(model):
            assert name_of(model) == name
        assert name_of(model) == name and not has_groups(model)


def test_the_name_comes_back_after_an_error_and_when_the_last_of_several_is_done() -> None:
    model = llama()
    with by_groups(model):
        assert name_of(model) == NAME and attention_of(model) == "sdpa"
    with pytest.raises(ZeroDivisionError), by_groups(model):
        _ = 1 / 0
    assert name_of(model) == "sdpa"
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with by_groups(model):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with by_groups(model):
        pass
    assert name_of(model) == NAME  # the other one's forward is still under way
    fast = Speculator(model, "prompt-lookup")  # and nobody is in the way of it
    fast.generate(torch.tensor([[1, 2, 3, 1, 2]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert fast.report.attention == "sdpa" and name_of(model) == NAME
    leave.set()
    thread.join()
    assert name_of(model) == "sdpa"


def test_costs_by_groups_are_kept_apart() -> None:
    assert key_of(Speculator(llama(), "prompt-lookup"))["attention"] == "sdpa, by groups"
    assert key_of(Speculator(gpt2(), "prompt-lookup"))["attention"] == "sdpa"
