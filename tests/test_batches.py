"""The order of rows: from the seed alone, every row once an epoch, any place reachable directly. Packed rows: apart
from each other in the target and in every family of heads, so that the loss is that of the rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from headstart.heads import FAMILIES, DraftHeads, Tie
from headstart.heads.batch import positions
from headstart.train.batches import Stream, Tokens, apart, collate, epoch_order, pack, packed
from headstart.train.cache import FeatureCache
from headstart.train.features import Features, check_packing, holds_several, online
from headstart.train.joint import join
from headstart.train.loop import train
from headstart.train.masking import Masked
from headstart.train.meter import Progress
from headstart.train.schedule import Plan
from tests.families import KINDS, disturbed
from tests.test_loop import DEFAULTS, broken, reference_gradient
from tests.toys import SIZES, TARGETS, VOCAB, gpt2, llama


def rows(count: int) -> list[Masked]:
    return [Masked([10 + i] * (3 + i % 5), [False] + [True] * (2 + i % 5)) for i in range(count)]


def test_every_row_once_an_epoch_in_an_order_of_the_seed() -> None:
    lengths = [3 + i % 7 for i in range(101)]
    one, again, other = epoch_order(lengths, 4, 0, 0), epoch_order(lengths, 4, 0, 0), epoch_order(lengths, 4, 1, 0)
    assert one == again != other != epoch_order(lengths, 4, 0, 1)
    assert sorted(i for batch in one for i in batch) == list(range(101))


def test_batches_hold_rows_of_similar_length() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 400, (512,), generator=generator).tolist()
    grouped = epoch_order(lengths, 8, 0, 0)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in grouped)
    assert padded < 1.15 * sum(lengths)


def test_any_micro_batch_can_be_asked_for_without_those_before_it() -> None:
    walked = Stream(rows(10), 2, 0)
    seen = [walked[i].rows for i in range(15)]  # three epochs
    assert [Stream(rows(10), 2, 0)[i].rows for i in (14, 7, 0)] == [seen[14], seen[7], seen[0]]
    for epoch in range(3):
        assert sorted(i for batch in seen[5 * epoch : 5 * epoch + 5] for i in batch) == list(range(10))


def test_fewer_rows_than_a_batch_still_train_and_none_is_an_error() -> None:
    """FC-044."""
    stream = Stream(rows(3), 8, 0)
    assert stream.steps(1.0, 4) == 1 and sorted(stream[0].rows) == [0, 1, 2]
    with pytest.raises(ValueError, match="no row to train on"):
        Stream([], 8, 0)


def test_padding_is_neither_supervised_nor_a_document() -> None:
    batch = collate(rows(5), [0, 4])
    assert batch.tokens.tolist() == [[10] * 3 + [0] * 4, [14] * 7]
    assert batch.supervised.tolist() == [[False, True, True] + [False] * 4, [False] + [True] * 6]
    assert batch.document.tolist() == [[0, 0, 0, -1, -1, -1, -1], [1] * 7]


# packing -------------------------------------------------------------------------------------------------------------


def texts(*lengths: int) -> list[Masked]:
    """Random rows; the first few tokens are no labels."""
    g = torch.Generator().manual_seed(11)
    return [Masked(torch.randint(3, VOCAB, (n,), generator=g).tolist(), [i >= 2 for i in range(n)]) for n in lengths]


def gemma3() -> Any:
    """Layers of two kinds: a window shorter than the texts, and none."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(Gemma3TextConfig(head_dim=16, sliding_window=6, layer_types=kinds, **SIZES)).eval()


LINES = [[0, 1, 2], [3, 4]]  # of ROWS: lines of different width, documents of one token more than a window and less
ROWS = texts(14, 5, 9, 17, 3)


def test_lines_are_full_and_hold_every_row_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 400, (2000,), generator=generator).tolist()
    lines = pack(lengths, 512, 0)
    assert sorted(i for line in lines for i in line) == list(range(2000))
    used = [sum(lengths[i] for i in line) for line in lines]
    assert max(used) <= 512 and sum(used) > 0.98 * 512 * len(lines)
    assert lines == pack(lengths, 512, 0) != pack(lengths, 512, 1)
    with pytest.raises(ValueError, match="a row of 399 tokens does not fit into lines of 64"):
        pack(lengths, 64, 0)


def test_any_packed_micro_batch_can_be_asked_for_without_those_before_it() -> None:
    made = texts(*(4 + i % 9 for i in range(40)))
    stream = Stream(made, 2, 0, 32)
    walked = [stream[i].rows for i in range(3 * stream.per_epoch)]
    assert stream.per_epoch < 40 / 2 / 2  # each line holds more than two rows
    again = Stream(made, 2, 0, 32)
    assert [again[i].rows for i in (len(walked) - 1, 5, 0)] == [walked[-1], walked[5], walked[0]]
    for epoch in range(3):
        seen = walked[epoch * stream.per_epoch : (epoch + 1) * stream.per_epoch]
        assert sorted(i for batch in seen for i in batch) == list(range(40))
    assert walked[: stream.per_epoch] != walked[stream.per_epoch : 2 * stream.per_epoch]


def test_a_packed_batch_and_its_documents_apart() -> None:
    batch = packed(rows(5), [[4, 0], [1]])
    assert batch.tokens.tolist() == [[14] * 7 + [10] * 3, [11] * 4 + [0] * 6]
    assert batch.document.tolist() == [[0] * 7 + [1] * 3, [2] * 4 + [-1] * 6]
    assert batch.supervised[0].tolist() == [False, *[True] * 6, False, True, True] and batch.rows == [4, 0, 1]
    alone, collated = apart(batch), collate(rows(5), [4, 0, 1])
    assert all(torch.equal(a, b) for a, b in zip(alone[:3], collated[:3], strict=True)) and alone.rows == [4, 0, 1]
    assert holds_several(batch.document) and not holds_several(collated.document)


def test_positions_begin_anew_with_every_document() -> None:
    document = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3]])
    assert positions(document).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*TARGETS, "gemma3"])
def test_hidden_states_of_packed_documents_are_those_of_each_alone(name: str, attention: str) -> None:
    target = gemma3() if name == "gemma3" else TARGETS[name]()
    target.set_attn_implementation(attention)
    batch = online(target, packed(ROWS, LINES), [1, 3]).batch
    for i, row in enumerate(ROWS):
        with torch.no_grad():
            states = target(torch.tensor([row.ids]), output_hidden_states=True).hidden_states
        mine = batch.document == i
        largest = float(states[4].abs().max())
        torch.testing.assert_close(batch.features[mine], torch.cat([states[1][0], states[3][0]], -1), atol=1e-4, rtol=0)
        torch.testing.assert_close(batch.last[mine], states[4][0], atol=1e-5 * largest, rtol=0)


@pytest.mark.parametrize("name", [*TARGETS, "gemma3"])
def test_nothing_of_a_document_reaches_its_neighbours_in_the_target(name: str) -> None:
    target = gemma3() if name == "gemma3" else TARGETS[name]()
    other = [*ROWS[:1], Masked([token ^ 1 for token in ROWS[1].ids], ROWS[1].supervised), *ROWS[2:]]
    one, two = (online(target, packed(made, LINES), [2]).batch for made in (ROWS, other))
    elsewhere = (one.document != 1) & (one.document >= 0)
    assert torch.equal(one.features[elsewhere], two.features[elsewhere])
    assert torch.equal(one.last[elsewhere], two.last[elsewhere])
    assert not torch.equal(one.last[one.document == 1], two.last[one.document == 1])


def loss_of(heads: DraftHeads, target: Any, batches: Sequence[Tokens]) -> tuple[float, int]:
    """Loss per supervised prediction, and how many there are."""
    weights = [0.8**d for d in range(heads.trained_depths)]
    found = [
        heads(online(target, b, heads.config.features or ()).batch, Tie.of(target), weights=weights) for b in batches
    ]
    count = sum(int(losses.count.sum()) for losses in found)
    return sum(float(losses.total) for losses in found) / count, count


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_per_token_is_the_same_packed_padded_and_one_by_one(kind: str) -> None:
    target = llama().requires_grad_(False)
    heads = disturbed(KINDS[kind].make(target), 0.02).eval()
    found = [
        loss_of(heads, target, batches)
        for batches in (
            [packed(ROWS, LINES)],
            [collate(ROWS, range(len(ROWS)))],
            [collate(ROWS, [i]) for i in range(len(ROWS))],
        )
    ]
    assert found[0][1] == found[1][1] == found[2][1]
    assert found[0][0] == pytest.approx(found[2][0], rel=1e-5) and found[1][0] == pytest.approx(found[2][0], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_document_reaches_the_loss_of_its_neighbours(kind: str) -> None:
    """Neither features and tokens forward, nor gradients back: exactly nothing."""
    target = llama().requires_grad_(False)
    heads, tie = disturbed(KINDS[kind].make(target), 0.02).eval(), Tie.of(target)
    batch = online(target, packed(ROWS, LINES), heads.config.features or ()).batch
    weights = [1.0] * heads.trained_depths
    own = batch.document == 1  # in the middle of a line
    alone = batch._replace(supervised=batch.supervised & own, features=batch.features.clone().requires_grad_())
    loss = heads(alone, tie, weights=weights).total
    (gradient,) = torch.autograd.grad(loss, alone.features)
    assert not gradient[~own].any() and gradient[own].any()
    noise = torch.randn(batch.features.shape, generator=torch.Generator().manual_seed(1))
    changed = alone._replace(
        tokens=torch.where(own, batch.tokens, batch.tokens ^ 1),
        features=torch.where(own[:, :, None], batch.features, batch.features + noise),
    )
    assert float(heads(changed, tie, weights=weights).total) == float(loss)


@pytest.fixture
def _fresh_accelerate() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_packed_step_has_the_gradient_of_the_mean_over_all_rows(tmp_path: Path) -> None:
    """FC-041: whatever shares a line, every label weighs the same."""
    target, told = llama().requires_grad_(False), list[Progress]()
    heads, stream = FAMILIES["medusa"].from_target(target), Stream(ROWS, 8, 0, 32)
    assert stream.per_epoch == 1 and len(stream.lines) == 2
    train(
        Accelerator(cpu=True), target, heads, stream, Plan(**(DEFAULTS | {"steps": 1})), tmp_path, "d", tell=told.append
    )
    assert told[0].values["gradient_norm"] == pytest.approx(float(reference_gradient(ROWS).norm()), rel=1e-4)
    assert told[0].values["tokens"] == sum(len(row.ids) for row in ROWS)


def test_a_packed_row_with_nan_is_left_out_alone() -> None:
    """FC-043: attention weights of zero would carry a NaN to the rows beside it."""
    target = broken(llama(), {ROWS[1].ids[0], ROWS[3].ids[0]})
    sound = online(llama(), packed(ROWS, [[1, 0], [3]]), [2]).batch
    for features in (Features(target, [2]), Features(target, [2], remember=True)):
        for _ in range(2):
            found = features(packed(ROWS, [[1, 0], [3]]))
            assert found.bad == [1, 3]
            good = sound.document == 1
            torch.testing.assert_close(found.batch.features[good], sound.features[good], atol=1e-4, rtol=0)
            assert torch.equal(found.batch.supervised, sound.supervised & good)
            assert not found.batch.features[~good].any() and not found.batch.last[~good].any()


@pytest.mark.parametrize("kept", ["remember", "cache"])
def test_packed_features_come_back_as_they_were(tmp_path: Path, kept: str) -> None:
    """Also where the documents meet in other lines later."""
    target, batch = llama(), packed(ROWS, LINES)
    expected = online(target, batch, [3, 1])
    with FeatureCache.open(tmp_path, target, [1, 3]) as cache:
        features = Features(target, [3, 1], **({"remember": True} if kept == "remember" else {"cache": cache}))
        for _ in range(2):
            found = features(batch)
            assert found.bad == [] and all(torch.equal(a, b) for a, b in zip(found.batch, expected.batch, strict=True))
        other = features(packed(ROWS, [[4, 0], [2], [1, 3]])).batch
    for at, row in enumerate([4, 0, 2, 1, 3]):
        assert torch.equal(other.last[other.document == at], expected.batch.last[expected.batch.document == row])


@pytest.mark.parametrize("make", [llama, gpt2])
def test_lines_may_be_longer_than_the_positions_of_the_target(make: Callable[[], Any]) -> None:
    """FC-029: no position of 256 or more is used by a target that has 256."""
    target, made, seen = make(), texts(250, 249), list[Tensor]()
    target.register_forward_pre_hook(lambda _, args, given: seen.append(given["position_ids"]), with_kwargs=True)
    found = online(target, packed(made, [[0, 1]]), [4])
    assert int(seen[0].max()) == 249 and torch.isfinite(found.batch.last).all() and found.bad == []


def test_a_target_that_learns_keeps_packed_documents_apart_too() -> None:
    """Medusa-2: the adapted forward is a second place where they could meet."""
    target = llama().requires_grad_(False)
    joint = join(
        target, FAMILIES["medusa"].from_target(target), rank=4, alpha=8, dropout=0.0, modules=None, seed=0
    ).eval()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in joint.adapter_parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=g))
    tie, found = Tie.of(target), []
    for tokens in (packed(ROWS, LINES), collate(ROWS, range(len(ROWS)))):
        found.append(joint(joint.original(tokens).batch, tie, weights=[1.0] * 4))
    assert float(found[0].total) == pytest.approx(float(found[1].total), rel=1e-5)
    assert found[0].target.tolist() == pytest.approx(found[1].target.tolist(), rel=1e-4) and found[0].target[0] > 0
    assert check_packing(joint.target, 32) == []


def test_targets_that_cannot_keep_documents_apart_are_refused() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"data.packing needs a target .*count slots.* Set data.packing=false"):
        check_packing(bloom, 64)
    assert check_packing(llama(), 64) == []
