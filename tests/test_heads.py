"""Every family: shapes, start, the loss against a slot-by-slot reference, gradients, folders and their audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from headstart.heads import FAMILIES, Batch, DraftHeads, HeadsConfig, Tie, family, load_heads
from headstart.heads import base as base_module
from headstart.heads.base import fingerprint
from tests.reference import medusa_loss
from tests.toys import SIZES, VOCAB, llama

DRAFT = torch.arange(2, VOCAB, 3)


@pytest.fixture(params=list(FAMILIES))
def kind(request: pytest.FixtureRequest) -> type[DraftHeads]:
    return FAMILIES[request.param]


@pytest.fixture(params=[None, DRAFT], ids=["whole", "draft-vocabulary"])
def draft_ids(request: pytest.FixtureRequest) -> Tensor | None:
    return request.param  # type: ignore[no-any-return]


def batch(rows: int = 2, length: int = 14, width: int = 64, dtype: torch.dtype = torch.float32) -> Batch:
    """Row 0: answer at 5..8. Row 1: two documents, then padding."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (rows, length), generator=g)
    supervised = torch.zeros(rows, length, dtype=torch.bool)
    supervised[0, 5:9] = True
    supervised[1, 3:11] = True
    document = torch.zeros(rows, length, dtype=torch.int64)
    document[1, 6:] = 1
    document[1, 11:] = -1
    features = torch.randn(rows, length, width, generator=g, dtype=dtype)
    return Batch(tokens, supervised, document, features, features)


def disturbed(heads: DraftHeads) -> DraftHeads:
    """Heads away from their start, so that a wrong block or output shows."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return heads


def test_the_loss_equals_the_reference(draft_ids: Tensor | None) -> None:
    target = llama()
    heads, tie = (
        disturbed(FAMILIES["medusa"].from_target(target, draft_ids=draft_ids, num_draft_heads=3)),
        Tie.of(target),
    )
    weights = [1.0, 0.5, 0.25]
    losses = heads(batch(), tie, weights=weights)
    expected, counts = medusa_loss(heads, batch(), tie, weights)
    assert losses.count.tolist() == counts
    assert losses.total.item() == pytest.approx(expected, rel=1e-5)
    kl = heads(batch(), tie, weights=weights, divergence="kl")
    assert kl.total < losses.total


def test_chunks_change_nothing(kind: Any, draft_ids: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed chunks of three rows against one chunk: same sums, same gradients."""
    target = llama()
    tie = Tie.of(target)
    found = []
    for elements in (1 << 24, 3 * VOCAB):
        monkeypatch.setattr(base_module, "CHUNK_ELEMENTS", elements)
        heads = disturbed(kind.from_target(target, draft_ids=draft_ids))
        losses = heads(batch(), tie, weights=[1.0, 0.8, 0.6, 0.5])
        losses.total.backward()
        found.append([losses.loss, losses.correct, losses.alpha, *(p.grad for p in heads.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_stand_where_an_answer_token_is_predicted(kind: Any) -> None:
    """FC-032: T0, ten tokens, answer at 5..8: depth d learns at slots 3 - d .. 6 - d and nowhere else."""
    target = llama()
    tie = Tie.of(target)
    for d in range(4):
        heads = disturbed(kind.from_target(target))
        features = torch.randn(1, 10, 64, requires_grad=True)
        supervised = torch.zeros(1, 10, dtype=torch.bool)
        supervised[0, 5:9] = True
        data = Batch(torch.arange(3, 13)[None], supervised, torch.zeros(1, 10).long(), features, features.detach())
        heads(data, tie, weights=[float(i == d) for i in range(4)]).total.backward()
        assert features.grad is not None
        touched = features.grad[0].abs().sum(-1).nonzero().flatten().tolist()
        assert touched == [s for s in range(3 - d, 7 - d) if s >= 0]


def test_every_head_learns(kind: Any, draft_ids: Tensor | None) -> None:
    """No parameter without a gradient: neither the first nor the last head is left out."""
    target = llama().requires_grad_(False)
    heads = disturbed(kind.from_target(target, draft_ids=draft_ids, num_draft_layers=2))
    heads(batch(), Tie.of(target), weights=[1.0] * 4).total.backward()
    assert [name for name, p in heads.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("length", [2, 3, 4])
def test_rows_shorter_than_the_look_ahead(kind: Any, length: int) -> None:
    """FC-047: no crash, no NaN; a head without a label weighs nothing and yet has a gradient (of zeros)."""
    target = llama()
    heads = disturbed(kind.from_target(target, num_draft_heads=5))
    features = torch.randn(1, length, 64)
    every = torch.ones(1, length, dtype=torch.bool)
    data = Batch(torch.arange(3, 3 + length)[None], every, torch.zeros(1, length).long(), features, features)
    losses = heads(data, Tie.of(target), weights=[1.0] * 5)
    losses.total.backward()
    assert losses.count.tolist() == [max(0, length - 2 - d) for d in range(5)]
    assert torch.equal(heads.count(every, data.document), losses.count)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in heads.parameters())


def test_nothing_supervised_is_zero_not_nan(kind: Any) -> None:
    """FC-031."""
    target = llama()
    heads = kind.from_target(target)
    losses = heads(batch()._replace(supervised=torch.zeros(2, 14, dtype=torch.bool)), Tie.of(target), weights=[1.0] * 4)
    losses.total.backward()
    assert losses.total == 0 and losses.count.sum() == 0
    assert all(p.grad is not None and not p.grad.abs().sum() > 0 for p in heads.parameters())


def test_fresh_medusa_heads_repeat_the_targets_next_token_law(draft_ids: Tensor | None) -> None:
    target = llama()
    heads, tie, data = FAMILIES["medusa"].from_target(target, draft_ids=draft_ids), Tie.of(target), batch()
    expected = tie.unembed(data.features, draft_ids)
    for depth, (_, hidden) in enumerate(heads.unroll(data, tie)):
        torch.testing.assert_close(heads.logits(hidden, data.tokens, depth, tie), expected)


def test_a_draft_vocabulary_scales_and_caps_as_the_target_does() -> None:
    torch.manual_seed(0)
    target = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)).eval()
    heads, tie, data = FAMILIES["medusa"].from_target(target, draft_ids=DRAFT), Tie.of(target), batch()
    _, hidden = next(heads.unroll(data, tie))
    torch.testing.assert_close(heads.logits(hidden, data.tokens, 0, tie), tie.unembed(data.features, DRAFT))


def test_no_path_of_a_machine_is_kept(tmp_path: Path) -> None:
    """FC-065: a target loaded from a folder leaves its folder's name only."""
    llama().save_pretrained(tmp_path / "toy")
    target = LlamaForCausalLM.from_pretrained(tmp_path / "toy")
    assert FAMILIES["medusa"].from_target(target).config.target_name == "toy"


def test_medusa_heads_do_not_share_blocks() -> None:
    heads = FAMILIES["medusa"].from_target(llama(), num_draft_layers=3)
    tensors = [p.data_ptr() for p in heads.parameters()]
    assert len(set(tensors)) == len(tensors) == 4 * 3 * 2


def test_drafting_equals_training_for_the_same_prefix(kind: Any, draft_ids: Tensor | None) -> None:
    """What is trained is what is decoded: teacher-forced logits = the drafter's, depth by depth."""
    target = llama()
    heads, tie, data = disturbed(kind.from_target(target, draft_ids=draft_ids)), Tie.of(target), batch()
    slot = 6
    state = heads.open(2, 64, None)
    features, tokens = data.features[:, : slot + 1], data.tokens[:, 1 : slot + 2]
    hidden = heads.refresh(features, tokens, torch.tensor([slot + 1] * 2), state, tie)
    for depth, (_, taught) in enumerate(heads.unroll(data, tie)):
        node = data.tokens[:, slot + 1 + depth : slot + 2 + depth]
        if depth:
            hidden = heads.level(node, torch.zeros(2, 1).long(), depth, state, tie)
        expected = heads.logits(taught[:, slot : slot + 1], node, depth, tie)
        torch.testing.assert_close(heads.logits(hidden, node, depth, tie), expected, atol=1e-4, rtol=1e-4)


def test_a_folder_brings_the_heads_back_and_holds_nothing_of_the_target(
    kind: Any, draft_ids: Tensor | None, tmp_path: Path
) -> None:
    """FC-059, with a tied target: only head tensors, in the size they have."""
    target = llama(tie_word_embeddings=True)
    heads = disturbed(kind.from_target(target, draft_ids=draft_ids))
    heads.save_pretrained(tmp_path)
    again = load_heads(str(tmp_path))
    assert type(again) is kind
    changed = {"architectures": [kind.__name__], "_name_or_path": str(tmp_path)}
    assert again.config.to_dict() == heads.config.to_dict() | changed
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(heads.state_dict())
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    held = sum(t.numel() * t.element_size() for t in heads.state_dict().values())
    assert held <= (tmp_path / "model.safetensors").stat().st_size < held + 10_000
    assert json.loads((tmp_path / "config.json").read_text())["target_vocab_size"] == VOCAB


def test_every_wrong_tensor_is_named(kind: Any, tmp_path: Path) -> None:
    """FC-068: one renamed, one dropped, one foreign, one of another shape, all in one message."""
    kind.from_target(llama(), draft_ids=DRAFT).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = sorted(n for n in tensors if n != "draft_ids")
    tensors["renamed.weight"] = tensors.pop(names[0])
    del tensors[names[1]]
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    tensors[names[2]] = torch.zeros(7, 5)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not those of") as caught:
        load_heads(str(tmp_path))
    for part in (names[0], names[1], names[2], "renamed.weight", "lm_head.weight", "(7, 5)"):
        assert part in str(caught.value)


def test_tables_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    FAMILIES["medusa"].from_target(llama(), draft_ids=DRAFT).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"draft_ids": DRAFT + 200}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="other heads"):
        load_heads(str(tmp_path))


def test_a_later_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    FAMILIES["medusa"].from_target(llama()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"format_version": 99}))
    with pytest.raises(ValueError, match="pip install -U"):
        load_heads(str(tmp_path))


def test_unknown_families_and_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'medusa'"):
        family("medus")
    for wrong in ("num_layrs", "draft_vocab_size", "target_vocab_size"):
        with pytest.raises(ValueError, match=wrong):
            FAMILIES["medusa"].from_target(llama(), **{wrong: 2})
    with pytest.raises(ValueError, match="distinct, ascending"):
        FAMILIES["medusa"].from_target(llama(), draft_ids=torch.zeros(0, dtype=torch.int64))
    llama().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no Headstart heads"):
        load_heads(str(tmp_path))


def test_making_heads_draws_nothing_from_the_global_generator(kind: Any) -> None:
    target = llama()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    kind.from_target(target)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_target_is_recognised(kind: Any) -> None:
    heads = kind.from_target(llama())
    assert heads.check_target(llama()) == []
    assert heads.config.target_fingerprint == fingerprint(Tie.of(llama()))
    assert heads.check_target(llama().bfloat16()) == []  # the same weights, rounded
    assert "other weights" in heads.check_target(llama(seed=1))[0]
    with pytest.raises(ValueError, match="vocab_size: heads for 320, the target has 64"):
        heads.check_target(llama(vocab_size=64))


@pytest.mark.parametrize(
    "model",
    [
        lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=5.0)),
        lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0, embedding_multiplier=2.0)),
        llama,
    ],
    ids=["gemma2-softcap", "granite-scaling", "llama"],
)
@torch.no_grad()
def test_the_tie_says_what_the_target_says(model: Any) -> None:
    torch.manual_seed(0)
    target = model().eval()
    tie = Tie.of(target)
    out = target(torch.arange(3, 13)[None], output_hidden_states=True)
    torch.testing.assert_close(tie.unembed(out.hidden_states[-1]), out.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tie.unembed(out.hidden_states[-1], DRAFT), out.logits[..., DRAFT], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tie.embed(torch.arange(3, 13)[None]), out.hidden_states[0], atol=1e-4, rtol=1e-4)


def test_config_reads_back_its_fields(tmp_path: Path) -> None:
    HeadsConfig(family="medusa", features=[3], num_draft_heads=2).save_pretrained(tmp_path)
    again = HeadsConfig.from_pretrained(tmp_path)
    assert (again.family, again.features, again.num_draft_heads, again.format_version) == ("medusa", [3], 2, 1)


def test_the_closed_form_start_finds_a_linear_map() -> None:
    """Features that a fixed map carries from slot to slot are guessed right by every head, without a step."""
    target = llama()
    tie = Tie.of(target)
    g = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=g)).Q
    states = [torch.randn(8, 64, generator=g)]
    for _ in range(23):
        states.append(states[-1] @ turn)
    features = torch.stack(states, 1)
    supervised = torch.ones(8, 24, dtype=torch.bool)
    data = Batch(torch.full((8, 24), 5), supervised, torch.zeros(8, 24).long(), features, features)
    heads = FAMILIES["medusa"].from_target(target, draft_ids=torch.arange(VOCAB))
    before = heads(data, tie, weights=[1.0] * 4)
    assert heads.fit([data], tie)
    after = heads(data, tie, weights=[1.0] * 4)
    assert (before.correct / before.count).max() < 0.5
    assert (after.correct / after.count).min() > 0.95
    assert not FAMILIES["medusa"].from_target(target).fit([data], tie)  # the target's own output cannot take it in


def test_loading_names_a_folder_without_weights(tmp_path: Path) -> None:
    HeadsConfig(family="medusa", target_hidden_size=64, features=[4]).save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_heads(str(tmp_path))


def test_memory_does_not_grow_by_a_full_logits_tensor_per_head() -> None:
    """FC-145: vocabulary 49,152, 512 tokens: what autograd keeps grows by far less than [512, 49152] a head."""
    target = llama(vocab_size=49152).requires_grad_(False)
    tie = Tie.of(target)
    features = torch.randn(1, 512, 64)
    every = torch.ones(1, 512, dtype=torch.bool)
    data = Batch(torch.full((1, 512), 5), every, torch.zeros(1, 512).long(), features, features)
    kept = []
    for heads in (1, 2, 4):
        medusa = FAMILIES["medusa"].from_target(target, num_draft_heads=heads)
        sizes: dict[int, int] = {}

        def note(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            losses = medusa(data, tie, weights=[1.0] * heads)
        kept.append(sum(sizes.values()))
        assert losses.total > 0
    assert kept[2] - kept[0] < 512 * 49152
    assert kept[2] < 2 * 512 * 49152
