"""Packed weights multiply as the layers do, for the length of a call, and are given back whatever happens in it."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headstart.heads import FAMILIES
from headstart.infer import Speculator
from headstart.infer.costs import key_of
from headstart.infer.custom_generate import run
from headstart.infer.draft_merge import Merged
from headstart.infer.draft_model import DraftModel
from headstart.infer.draft_ngram import PromptLookup
from headstart.infer.parity import first_difference
from headstart.infer.prepack import Prepacked, _Product, modules_of, supported
from tests.drafters import SOURCES
from tests.toys import VOCAB, llama

# what is tested is the product that such a CPU alone has; elsewhere there is nothing to pack, and nothing to run here
pytestmark = pytest.mark.skipif(not supported(), reason="this CPU does not multiply bfloat16 by oneDNN")


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
    again = copy.deepcopy(packed)  # of copies of the layers
    with again:
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
    assert str(Prepacked([mixed])) == "1 of 2 linear layers are prepacked, 0 MB more memory"
    hooked = nn.Linear(8, 8).bfloat16()
    hooked.__dict__["forward"] = lambda x: x  # as accelerate does
    for model in (llama(), hooked):
        with pytest.raises(ValueError, match="nothing to prepack"):
            Prepacked([model])
    with pytest.raises(ValueError, match="exclude each other"):
        Speculator(llama().bfloat16(), "prompt-lookup", compile="eager", prepack=True)


def test_a_layer_that_was_cast_since_is_left() -> None:
    layer = nn.Linear(8, 8).bfloat16()
    packed = Prepacked([layer])
    layer.float()
    x = torch.randn(2, 8)
    with packed:
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer.bfloat16()
    with packed:
        assert len(own_forwards(nn.Sequential(layer))) == 1


@torch.no_grad()
def test_weights_changed_behind_their_version_are_packed_again() -> None:
    """As adapters are merged: ``weight.data += ...`` counts on a version of its own."""
    layer = nn.Linear(16, 16, bias=False).bfloat16()
    packed, x = Prepacked([layer]), torch.randn(3, 16).bfloat16()
    layer.weight.data += torch.ones(16, 16).bfloat16()
    with packed:
        torch.testing.assert_close(layer(x), x @ layer.weight.T, atol=0.1, rtol=0.02)


def test_a_forward_that_was_put_in_since_stays() -> None:
    layer, mine = nn.Linear(8, 8).bfloat16(), lambda x: x
    packed = Prepacked([layer])
    layer.__dict__["forward"] = mine
    with packed:
        assert layer.__dict__["forward"] is mine
    assert layer.__dict__["forward"] is mine


def test_an_error_while_packing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).bfloat16())
    packed, refresh = Prepacked([model]), _Product.refresh

    def failing(self: _Product, layer: nn.Linear) -> None:
        if layer is model[1]:
            raise MemoryError
        refresh(self, layer)

    monkeypatch.setattr(_Product, "refresh", failing)
    with pytest.raises(MemoryError), packed:
        pass
    monkeypatch.undo()
    assert not own_forwards(model)
    with packed:
        assert len(own_forwards(model)) == 2
    assert not own_forwards(model)


def test_gradients_and_other_types_take_the_layer_s_own_way() -> None:
    layer = nn.Linear(8, 8).bfloat16()
    with Prepacked([layer]):
        layer(torch.ones(1, 8).bfloat16()).sum().backward()
        assert layer.weight.grad is not None
        with pytest.raises(RuntimeError), torch.no_grad():
            layer(torch.ones(1, 8))


def test_models_behind_a_source() -> None:
    target, small = llama(), llama()
    heads = FAMILIES["eagle3"].from_target(target)
    assert modules_of(PromptLookup()) == []
    assert modules_of(DraftModel(small)) == [small]
    fast = Speculator(target, [heads, "prompt-lookup"])
    assert isinstance(fast.source, Merged) and modules_of(fast.source) == [heads]


@pytest.mark.parametrize("source", ["prompt-lookup", "eagle3", "draft-model", "medusa-and-prompt-lookup"])
@pytest.mark.parametrize("rows", [1, 3])
def test_texts_are_plain_ones_up_to_near_ties(source: str, rows: int) -> None:
    target = llama().bfloat16()
    ids = torch.randint(3, VOCAB, (rows, 12), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    fast = Speculator(target, SOURCES[source](target), prepack=True)
    text = fast.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for row in range(rows):
        found = first_difference(target, ids[row], plain[row], text[row])
        assert found is None or found.near_tie, found
    assert not own_forwards(target) and any("prepacked" in note for note in fast.report.notes)


def test_an_adaptive_plan_over_packed_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = llama().bfloat16()
    fast = Speculator(target, "prompt-lookup", nodes=4, prepack=True, plan="adaptive")
    assert fast.planning.plan is not None and fast.planning.plan.key["prepacked"] == "yes"
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match="beam"):
        fast.generate(ids, max_new_tokens=4, num_beams=2)
    fast.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert not own_forwards(target)


def test_the_code_of_a_repository_packs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = llama().bfloat16()
    FAMILIES["medusa"].from_target(target).save_pretrained(tmp_path)
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    made: list[nn.Linear] = []
    init = _Product.__init__
    monkeypatch.setattr(_Product, "__init__", lambda self, layer: (made.append(layer), init(self, layer))[1])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "prepack": True}
    for _ in range(2):
        run(target, None, "generate.py", heads=str(tmp_path), inputs=ids, **options)
    assert len(made) == len(set(map(id, made))) >= len(layers(target))


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
