"""The EAGLE families: the unroll against one step at a time, which keys a step sees, recomputation, layers, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headstart.heads import Batch, Tie
from headstart.heads import base as base_module
from headstart.heads.batch import predictions
from headstart.heads.eagle3 import default_layers
from tests.families import KINDS, Kind, disturbed, documents, near
from tests.reference import recurrent_hidden, recurrent_logits
from tests.toys import VOCAB, llama

STEPS = 3
RECURRENT = {name: kind for name, kind in KINDS.items() if kind.recurrent}


@pytest.fixture(params=list(RECURRENT))
def kind(request: pytest.FixtureRequest) -> Kind:
    return RECURRENT[request.param]


@torch.no_grad()
def test_the_unroll_equals_one_step_at_a_time(kind: Kind) -> None:
    """FC-038: a row of two documents and padding beside a whole one; at every slot that leads to a label."""
    target = llama().double()
    heads, tie = disturbed(kind.make(target, STEPS)).double(), Tie.of(target)
    data = documents(heads)
    expected = recurrent_hidden(heads, data, tie, STEPS)
    for depth, (slots, hidden) in enumerate(heads.unroll(data, tie, STEPS)):
        labels = predictions(data.supervised, data.document, depth).nonzero().tolist()
        assert labels
        for row, label in labels:
            slot = label - 2 - depth
            found = hidden[row, slots[row].tolist().index(slot)]
            torch.testing.assert_close(found, expected[depth][row][slot], atol=1e-5, rtol=1e-5)
            logits = heads.logits(found, data.tokens[row, label - 1], depth, tie)
            torch.testing.assert_close(logits, recurrent_logits(heads, found, tie), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("row", "slot", "start"), [(0, 6, 0), (1, 2, 0), (1, 7, 6)])
def test_a_step_sees_the_keys_it_should_and_no_other(kind: Kind, row: int, slot: int, start: int) -> None:
    """Step k at slot t of a document from ``start``: features at start..t, tokens start + 1 .. t + 1 + k."""
    target = llama().double()
    heads, tie = disturbed(kind.make(target, STEPS)).double(), Tie.of(target)
    data = documents(heads)
    every = data._replace(supervised=torch.ones_like(data.supervised))
    last = max(label for r, label in predictions(*every[1:3], 0).nonzero().tolist() if r == row)

    def outputs(features: Any, tokens: Any) -> list[Any]:
        made = heads.unroll(every._replace(features=features, tokens=tokens), tie, STEPS)
        return [hidden[row, slots[row].tolist().index(slot)] for slots, hidden in made]

    features = data.features.clone().requires_grad_()
    for depth, out in enumerate(outputs(features, data.tokens)):
        if slot + 1 + depth > last:
            continue
        (grad,) = torch.autograd.grad(out.pow(2).sum(), features, retain_graph=True)
        assert grad.abs().sum(-1).nonzero().tolist() == [[row, s] for s in range(start, slot + 1)], depth
    with torch.no_grad():
        before = outputs(data.features, data.tokens)
        seen: list[set[int]] = [set() for _ in range(STEPS)]
        for position in range(data.tokens.shape[1]):
            tokens = data.tokens.clone()
            tokens[:, position] = (tokens[:, position] + 5) % VOCAB
            for depth, (one, other) in enumerate(zip(before, outputs(data.features, tokens), strict=True)):
                if not torch.equal(one, other):
                    seen[depth].add(position)
    for depth in range(STEPS):
        if slot + 1 + depth <= last:
            assert seen[depth] == set(range(start + 1, slot + 2 + depth)), depth


def test_positions_of_a_step_go_on_from_its_slot(kind: Kind) -> None:
    """A document is seen the same wherever in the row it stands."""
    target = llama().double()
    heads, tie = disturbed(kind.make(target, STEPS)).double(), Tie.of(target)
    data = documents(heads)
    alone = Batch(*(part[1:, 6:] for part in data))
    moved = Batch(*(part[1:] for part in data))._replace(supervised=data.supervised[1:] & (torch.arange(14) >= 6))
    weights = [1.0] * STEPS
    torch.testing.assert_close(heads(moved, tie, weights=weights).loss, heads(alone, tie, weights=weights).loss)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("draft_ids", [None, torch.arange(2, VOCAB, 3)], ids=["whole", "draft-vocabulary"])
def test_recomputed_chunks_give_the_same_gradients(
    kind: Kind, steps: int, draft_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-040: no state is changed in place: backward runs over recomputed parts as over kept ones."""
    target, found = llama(), []
    tie = Tie.of(target)
    for elements in (1 << 24, 2 * VOCAB):
        monkeypatch.setattr(base_module, "CHUNK_ELEMENTS", elements)
        heads = disturbed(kind.make(target, steps, draft_ids=draft_ids))
        heads(documents(heads), tie, weights=[1.0] * steps).total.backward()
        found.append([p.grad for p in heads.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        near(one, other)


def test_eagle_regresses_the_features_themselves() -> None:
    """Smooth L1 against the feature in front of each label, label by label, with the weights of the depths."""
    target = llama()
    heads, tie = disturbed(KINDS["eagle"].make(target, STEPS)), Tie.of(target)
    data, weights, expected = documents(heads), [1.0, 0.5, 0.25], 0.0
    for depth, (slots, hidden) in enumerate(heads.unroll(data, tie, STEPS)):
        for row, label in predictions(data.supervised, data.document, depth).nonzero().tolist():
            guess = hidden[row, slots[row].tolist().index(label - 2 - depth)]
            expected += weights[depth] * float(F.smooth_l1_loss(guess, data.features[row, label - 1]).detach())
    plain = heads(data, tie, weights=weights).total
    more = heads(data, tie, weights=weights, regression=2.0).total
    assert float((more - plain).detach()) == pytest.approx(2 * expected, rel=1e-4)


def test_feature_noise_is_of_training_only_and_as_wide_as_published() -> None:
    heads = KINDS["eagle"].make(llama(), feature_noise=0.2)
    features = torch.zeros(4, 256, 64)
    heads.train()
    noise = heads.begin(features)
    assert 0.19 < float(noise.abs().max()) <= 0.2 and abs(float(noise.mean())) < 2e-3  # 0.1 at 512 tokens, 0.2 at 256
    heads.eval()
    assert torch.equal(heads.begin(features), features)


def test_other_families_regress_nothing() -> None:
    target = llama()
    for name in ("medusa", "hydra", "eagle3"):
        heads = KINDS[name].make(target)
        with pytest.raises(ValueError, match=r"regress nothing: set loss\.regression to 0"):
            heads(documents(heads), Tie.of(target), weights=[1.0], regression=0.1)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 30])
def test_default_layers_are_distinct_and_there(layers: int) -> None:
    """FC-118: one convention, hidden_states indices (0 = embedding output), written in the config."""
    heads = KINDS["eagle3"].make(llama(num_hidden_layers=layers), residual_last=False)
    ids = heads.config.features
    assert ids is not None and ids == default_layers(layers) == sorted(set(ids))
    assert ids[0] >= 0 and ids[-1] < layers and len(ids) == min(3, max(1, layers - 1))
    whole = KINDS["eagle3"].make(llama(num_hidden_layers=layers))
    assert whole.config.features == [*ids, layers]  # the target's last state, which the residual goes on from
    if layers == 30:
        assert ids == [2, 15, 27]


@pytest.mark.parametrize("ids", [[0, 1, 99], [1, 1, 2], [-1, 1], [4], []])
def test_layers_that_repeat_or_are_not_there_are_refused(ids: list[int]) -> None:
    """FC-118; 4 = the last state after the final norm: it is no raw residual stream."""
    with pytest.raises(ValueError, match=r"distinct layers in 0\.\.3 were expected"):
        KINDS["eagle3"].make(llama(), features=ids)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_layer_of_another_width_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"layer is 32 wide, the target 64.*leave layer\.hidden_size out"):
        KINDS[name].make(llama(), layer={"hidden_size": 32})


def test_heads_work_in_half_precision(kind: Kind) -> None:
    """Under autocast, as trained on an accelerator: finite, and near the float32 loss."""
    target = llama()
    heads, tie = kind.make(target, STEPS), Tie.of(target)
    data, weights = documents(heads), [1.0] * STEPS
    expected = heads(data, tie, weights=weights).total.item()
    with torch.autocast("cpu", torch.bfloat16):
        losses = heads(data, tie, weights=weights)
    losses.total.backward()
    assert losses.total.item() == pytest.approx(expected, rel=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in heads.parameters())
