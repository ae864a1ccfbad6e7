"""Packed weights multiply as the layers do, for the length of a call, and are given back whatever happens in it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from headstart.heads import FAMILIES
from headstart.infer import Speculator
from headstart.infer.costs import key_of
from headstart.infer.draft_merge import Merged
from headstart.infer.draft_model import DraftModel
from headstart.infer.draft_ngram import PromptLookup
from headstart.infer.prepack import Prepacked, modules_of
from tests.toys import VOCAB, llama

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not multiply bfloat16 by oneDNN"
)


def layers(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


def own_forwards(model: nn.Module) -> list[Any]:
    return [layer.__dict__["forward"] for layer in layers(model) if "forward" in layer.__dict__]


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_are_those_of_the_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(48, 80, bias=bias).bfloat16()
    x = torch.randn(2, rows, 48).bfloat16()
    plain = layer(x)
    with Prepacked([layer]):
        packed = layer(x)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
    assert packed.shape == plain.shape and packed.dtype == torch.bfloat16
    worst = max(1e-2, 2 * float((plain - exact).abs().max()))
    assert float((packed - exact).abs().max()) <= worst


def test_layers_are_as_before_after_a_call_and_after_an_error() -> None:
    model = llama().bfloat16()
    packed = Prepacked([model])
    with packed, packed:
        assert len(own_forwards(model)) == len(layers(model))
    assert not own_forwards(model)
    with pytest.raises(ZeroDivisionError), packed:
        _ = 1 / 0
    assert not own_forwards(model)


@torch.no_grad()
def test_one_packed_weight_serves_all_and_follows_the_layer() -> None:
    layer = nn.Linear(16, 16).bfloat16()
    first, second = Prepacked([layer]), Prepacked([layer])
    assert first._products[layer] is second._products[layer]
    x = torch.randn(3, 16).bfloat16()
    with first:
        before = layer(x)
    layer.weight.mul_(2.0)
    assert layer.bias is not None
    layer.bias.zero_()
    with first, second:
        after = layer(x)
    torch.testing.assert_close(after, layer(x))
    assert not torch.equal(before, after)
    layer.weight = nn.Parameter(torch.ones(16, 16).bfloat16())
    with second:
        torch.testing.assert_close(layer(x), x.sum(1, keepdim=True).expand(3, 16), atol=0.1, rtol=0.02)


def test_what_cannot_be_packed_is_left_and_nothing_at_all_is_refused() -> None:
    mixed = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8))
    with Prepacked([mixed]):
        assert len(own_forwards(mixed)) == 1
    assert Prepacked([mixed]).bytes == 128
    hooked = nn.Linear(8, 8).bfloat16()
    hooked.__dict__["forward"] = lambda x: x  # as accelerate does
    for model in (llama(), hooked):
        with pytest.raises(ValueError, match="nothing to prepack"):
            Prepacked([model])
    with pytest.raises(ValueError, match="exclude each other"):
        Speculator(llama().bfloat16(), "prompt-lookup", compile="eager", prepack=True)


def test_models_behind_a_source() -> None:
    target, small = llama(), llama()
    heads = FAMILIES["eagle3"].from_target(target)
    assert modules_of(PromptLookup()) == []
    assert modules_of(DraftModel(small)) == [small]
    fast = Speculator(target, [heads, "prompt-lookup"])
    assert isinstance(fast.source, Merged) and modules_of(fast.source) == [heads]


@pytest.mark.parametrize("source", ["prompt-lookup", "eagle3"])
@pytest.mark.parametrize("sampled", [False, True])
def test_texts_are_plain_ones_up_to_near_ties(source: str, sampled: bool) -> None:
    target = llama().bfloat16()
    made: Any = source
    if source == "eagle3":
        made = FAMILIES["eagle3"].from_target(target).bfloat16()
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    texts = []
    for prepack in (False, True):
        fast = Speculator(target, made, prepack=prepack)
        torch.manual_seed(5)
        texts.append(fast.generate(ids, max_new_tokens=24, do_sample=sampled, pad_token_id=0))
    assert torch.equal(*texts)  # here even the sums are the same
    assert not own_forwards(target)


def test_costs_of_packed_passes_are_kept_apart() -> None:
    target = llama().bfloat16()
    keys = [key_of(Speculator(target, "prompt-lookup", prepack=prepack)) for prepack in (False, True)]
    assert keys[1] == keys[0] | {"prepacked": "yes"}


def test_threads_share_packed_weights() -> None:
    target = llama().bfloat16()
    fast = Speculator(target, "prompt-lookup", prepack=True)
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    whole = fast.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    found: list[Any] = [None] * 4

    def run(at: int) -> None:
        found[at] = fast.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(whole, text) for text in found)
    assert not own_forwards(target)
