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

from headstart.heads import FAMILIES, Batch, HeadsConfig, Tie, family, load_heads
from headstart.heads import base as base_module
from headstart.heads.tie import fingerprint
from headstart.train.batches import Tokens
from tests.families import DRAFT, KINDS, Kind, disturbed, documents, feature_width, lesson, near, texts
from tests.reference import loss_by_label
from tests.toys import SIZES, VOCAB, llama


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=list(FAMILIES))
def default(request: pytest.FixtureRequest) -> Kind:
    """Each family once: for what its options cannot change."""
    return Kind(request.param)


@pytest.fixture(params=[None, DRAFT], ids=["whole", "draft-vocabulary"])
def draft_ids(request: pytest.FixtureRequest) -> Tensor | None:
    return request.param  # type: ignore[no-any-return]


def test_the_loss_equals_the_reference(kind: Kind, draft_ids: Tensor | None) -> None:
    target = llama()
    heads, tie = disturbed(kind.make(target, 3, draft_ids=draft_ids)), Tie.of(target)
    data, weights = documents(heads), [1.0, 0.5, 0.25]
    losses = heads(data, tie, weights=weights)
    expected, counts = loss_by_label(heads, data, tie, weights)
    assert losses.count.tolist() == counts
    assert losses.total.item() == pytest.approx(expected, rel=1e-5)
    kl = heads(data, tie, weights=weights, divergence="kl")
    assert kl.total < losses.total


def test_chunks_change_nothing(kind: Kind, draft_ids: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed chunks of three rows against one chunk: same sums, same gradients."""
    target = llama()
    tie = Tie.of(target)
    found = []
    for elements in (1 << 24, 3 * VOCAB):
        monkeypatch.setattr(base_module, "CHUNK_ELEMENTS", elements)
        heads = disturbed(kind.make(target, draft_ids=draft_ids))
        losses = heads(documents(heads), tie, weights=[1.0, 0.8, 0.6, 0.5])
        losses.total.backward()
        found.append([losses.loss, losses.correct, losses.alpha, *(p.grad for p in heads.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        near(one, other)


def test_gradients_stand_where_an_answer_token_is_predicted(kind: Kind) -> None:
    """FC-032: T0, ten tokens, answer at 5..8: depth d learns at slots 3 - d .. 6 - d, and where it attends at the slots
    before them; nowhere else."""
    target = llama()
    tie = Tie.of(target)
    for d in range(4):
        heads = disturbed(kind.make(target))
        features = torch.randn(1, 10, feature_width(heads), requires_grad=True)
        supervised = torch.zeros(1, 10, dtype=torch.bool)
        supervised[0, 5:9] = True
        last = features[..., -64:].detach()
        data = Batch(torch.arange(3, 13)[None], supervised, torch.zeros(1, 10).long(), features, last)
        heads(data, tie, weights=[float(i == d) for i in range(4)]).total.backward()
        assert features.grad is not None
        touched = features.grad[0].abs().sum(-1).nonzero().flatten().tolist()
        assert touched == list(range(0 if kind.attends else max(0, 3 - d), 7 - d))


def test_no_label_depends_on_what_comes_after_it(kind: Kind) -> None:
    """Labels up to 8: tokens from 8 on, features from 7 on and the teacher from 8 on do not matter; one place before
    each they do."""
    target = llama()
    heads, tie = disturbed(kind.make(target)), Tie.of(target)
    data = texts(heads)
    data = data._replace(supervised=data.supervised & (torch.arange(16) <= 8), last=data.last.clone())
    noise = torch.randn(data.features.shape, generator=torch.Generator().manual_seed(1))

    def loss(tokens: int, features: int, last: int) -> Tensor:
        """With everything from these positions on replaced."""
        at = torch.arange(16)[None, :, None]
        changed = data._replace(
            tokens=torch.where(at[..., 0] < tokens, data.tokens, (data.tokens + 7) % VOCAB),
            features=torch.where(at < features, data.features, noise),
            last=torch.where(at < last, data.last, noise[..., :64]),
        )
        found: Tensor = heads(changed, tie, weights=[1.0] * 4).loss
        return found

    before = loss(16, 16, 16)
    assert torch.equal(loss(8, 7, 8), before)
    assert (loss(16, 6, 16) != before)[0] and (loss(16, 16, 7) != before).all()
    assert bool((loss(7, 16, 16) != before).all()) == (kind.family != "medusa")


def test_every_parameter_learns_and_the_target_does_not(kind: Kind, draft_ids: Tensor | None) -> None:
    """No parameter without a gradient: neither the first nor the last head is left out."""
    target = llama().requires_grad_(False)
    more = {"num_draft_layers": 2} if "num_draft_layers" in kind.cls.options else {}
    heads = disturbed(kind.make(target, draft_ids=draft_ids, **more))
    heads(documents(heads), Tie.of(target), weights=[1.0] * 4).total.backward()
    assert [name for name, p in heads.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.parametrize("length", [2, 3, 4])
def test_rows_shorter_than_the_look_ahead(kind: Kind, length: int) -> None:
    """FC-047: no crash, no NaN; a head without a label weighs nothing and yet has a gradient (of zeros)."""
    target, depths = llama(), 7 if kind.recurrent else 5
    heads = disturbed(kind.make(target, depths))
    features = torch.randn(1, length, feature_width(heads))
    every = torch.ones(1, length, dtype=torch.bool)
    data = Batch(torch.arange(3, 3 + length)[None], every, torch.zeros(1, length).long(), features, features[..., -64:])
    losses = heads(data, Tie.of(target), weights=[1.0] * depths)
    losses.total.backward()
    assert losses.count.tolist() == [max(0, length - 2 - d) for d in range(depths)]
    assert torch.equal(heads.count(every, data.document), losses.count)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in heads.parameters())


def test_nothing_supervised_is_zero_not_nan(kind: Kind) -> None:
    """FC-031."""
    target = llama()
    heads = kind.make(target)
    data = documents(heads)._replace(supervised=torch.zeros(2, 14, dtype=torch.bool))
    losses = heads(data, Tie.of(target), weights=[1.0] * 4)
    losses.total.backward()
    assert losses.total == 0 and losses.count.sum() == 0
    assert all(p.grad is not None and not p.grad.abs().sum() > 0 for p in heads.parameters())


def test_more_weights_than_trained_depths_are_refused(default: Kind) -> None:
    target = llama()
    heads = default.make(target, 2)
    with pytest.raises(ValueError, match="3 depth weights for heads that are trained on 2 depths"):
        heads(documents(heads), Tie.of(target), weights=[1.0] * 3)


@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra-plain", "eagle", "eagle3"])
def test_fresh_heads_repeat_the_targets_next_token_law(name: str, draft_ids: Tensor | None) -> None:
    target = llama()
    heads, tie = KINDS[name].make(target, draft_ids=draft_ids), Tie.of(target)
    data = lesson(heads, target, Tokens(texts(heads).tokens, *texts(heads)[1:3], [0, 1, 2]))
    for depth, (slots, hidden) in enumerate(heads.unroll(data, tie, 4)):
        here = torch.stack([row[at] for row, at in zip(data.last, slots, strict=True)])
        expected = tie.unembed(here, draft_ids)
        found = heads.logits(hidden, data.tokens.gather(1, slots), depth, tie)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle", "eagle3"])
def test_a_draft_vocabulary_scales_and_caps_as_the_target_does(name: str) -> None:
    torch.manual_seed(0)
    target = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)).eval()
    heads, tie = KINDS[name].make(target, draft_ids=DRAFT), Tie.of(target)
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    hidden = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()  # what EAGLE-3's final norm makes of it
    found = heads.logits(hidden, torch.zeros(2, 5).long(), 0, tie)
    torch.testing.assert_close(found, tie.unembed(hidden, DRAFT), atol=1e-4, rtol=1e-4)


def test_no_path_of_a_machine_is_kept(tmp_path: Path) -> None:
    """FC-065: a target loaded from a folder leaves its folder's name only."""
    llama().save_pretrained(tmp_path / "toy")
    target = LlamaForCausalLM.from_pretrained(tmp_path / "toy")
    assert FAMILIES["medusa"].from_target(target).config.target_name == "toy"


def test_medusa_heads_do_not_share_blocks() -> None:
    heads = FAMILIES["medusa"].from_target(llama(), num_draft_layers=3)
    tensors = [p.data_ptr() for p in heads.parameters()]
    assert len(set(tensors)) == len(tensors) == 4 * 3 * 2


def test_a_folder_brings_the_heads_back_and_holds_nothing_of_the_target(
    kind: Kind, draft_ids: Tensor | None, tmp_path: Path
) -> None:
    """FC-059, with a tied target: only head tensors, in the size they have."""
    target = llama(tie_word_embeddings=True)
    heads = disturbed(kind.make(target, draft_ids=draft_ids))
    heads.save_pretrained(tmp_path)
    again = load_heads(str(tmp_path))
    assert type(again) is kind.cls
    changed = {"architectures": [kind.cls.__name__], "_name_or_path": str(tmp_path)}
    assert again.config.to_dict() == heads.config.to_dict() | changed
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(heads.state_dict())
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    held = sum(t.numel() * t.element_size() for t in heads.state_dict().values())
    assert held <= (tmp_path / "model.safetensors").stat().st_size < held + 10_000
    assert json.loads((tmp_path / "config.json").read_text())["target_vocab_size"] == VOCAB


def test_every_wrong_tensor_is_named(kind: Kind, tmp_path: Path) -> None:
    """FC-068: one renamed, one dropped, one foreign, one of another shape, all in one message."""
    kind.make(llama(), draft_ids=DRAFT).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = sorted(n for n in tensors if n != "draft_ids")
    tensors["renamed.weight"] = tensors.pop(names[0])
    del tensors[names[1]]
    tensors["foreign.weight"] = torch.zeros(3, 3)
    tensors[names[2]] = torch.zeros(7, 5)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not those of") as caught:
        load_heads(str(tmp_path))
    for part in (names[0], names[1], names[2], "renamed.weight", "foreign.weight", "(7, 5)"):
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


def test_making_heads_draws_nothing_from_the_global_generator(kind: Kind) -> None:
    target = llama()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    kind.make(target)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_target_is_recognised(default: Kind) -> None:
    heads = default.make(llama())
    assert heads.check_target(llama()) == []
    assert heads.config.target_fingerprint == fingerprint(Tie.of(llama()))
    assert heads.check_target(llama().bfloat16()) == []  # the same weights, rounded
    assert "other weights" in heads.check_target(llama(seed=1))[0]
    with pytest.raises(ValueError, match="vocab_size: heads for 320, the target has 64"):
        heads.check_target(llama(vocab_size=64))


def test_a_fine_tuned_target_with_the_same_output_is_told_by_its_name() -> None:
    target = llama()
    target.config.name_or_path = "org/base"
    heads = FAMILIES["medusa"].from_target(target)
    with torch.no_grad():
        target.model.layers[1].mlp.down_proj.weight.add_(1.0)
    assert heads.check_target(target) == []  # by its rows and its name it is the same
    target.config.name_or_path = "org/tuned"
    (note,) = heads.check_target(target)
    assert "org/base" in note and "org/tuned" in note


def test_a_target_cast_to_float16_is_no_other_one_for_sure() -> None:
    target = llama(initializer_range=0.02)  # small numbers, to which float16 is coarser than bfloat16
    heads = FAMILIES["medusa"].from_target(target)
    (note,) = heads.check_target(target.half())
    assert "or the same ones cast to float16" in note
    assert "float16" not in heads.check_target(llama(seed=1))[0]


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_heads_of_one_hidden_state_are_not_made_for_two(name: str) -> None:
    said = rf"features=\[1, 3\]: {name} heads read one hidden state; one index in 0\.\.4"
    with pytest.raises(ValueError, match=said):
        FAMILIES[name].from_target(llama(), features=[1, 3])


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
    some = tie.unembed(out.hidden_states[-1], DRAFT)
    torch.testing.assert_close(some, out.logits[..., DRAFT], atol=1e-4, rtol=1e-4)
    assert torch.equal(tie.pick(DRAFT).unembed(out.hidden_states[-1], DRAFT), some)
    torch.testing.assert_close(tie.embed(torch.arange(3, 13)[None]), out.hidden_states[0], atol=1e-4, rtol=1e-4)


def test_config_reads_back_its_fields(tmp_path: Path) -> None:
    HeadsConfig(family="medusa", features=[3], num_draft_heads=2).save_pretrained(tmp_path)
    again = HeadsConfig.from_pretrained(tmp_path)
    assert (again.family, again.features, again.num_draft_heads, again.format_version) == ("medusa", [3], 2, 1)


@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra-plain", "eagle", "eagle3"])
def test_the_closed_form_start_finds_a_linear_map(name: str) -> None:
    """Features that a fixed map carries from slot to slot are guessed right at every depth, without a step."""
    target = llama()
    tie = Tie.of(target)
    g = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=g)).Q
    states = [torch.nn.functional.normalize(torch.randn(32, 64, generator=g), dim=-1) * 8]
    for _ in range(23):
        states.append(states[-1] @ turn)
    last = torch.stack(states, 1)
    heads = KINDS[name].make(target, draft_ids=torch.arange(VOCAB) if name == "medusa" else None)
    streams = torch.randn(32, 24, feature_width(heads) - 64, generator=g)  # tell nothing
    supervised = torch.ones(32, 24, dtype=torch.bool)
    tokens = torch.randint(3, VOCAB, (32, 24), generator=g)
    data = Batch(tokens, supervised, torch.zeros(32, 24).long(), torch.cat([streams, last], -1), last)
    before = heads(data, tie, weights=[1.0] * 4)
    assert heads.fit([data], tie)
    after = heads(data, tie, weights=[1.0] * 4)
    assert (before.correct / before.count).max() < 0.5
    assert (after.correct / after.count).min() > 0.95


def test_heads_without_a_closed_form_say_so() -> None:
    """Medusa cannot put a map into the target's own output; the paper's EAGLE-3 has no linear path."""
    target = llama()
    for name in ("medusa", "eagle3-paper"):
        assert not KINDS[name].make(target).fit([], Tie.of(target))


@pytest.mark.parametrize("draft_ids", [None, torch.arange(1000)], ids=["whole", "draft-vocabulary"])
def test_heads_hold_no_copy_of_the_targets_matrices(kind: Kind, draft_ids: Tensor | None) -> None:
    """FC-143, with the vocabulary of SmolLM2: no tensor is 49,152 long in any direction; all are float32."""
    target = llama(vocab_size=49152)
    heads = kind.make(target, draft_ids=draft_ids)
    tensors = [*heads.parameters(), *(b for b in heads.buffers() if b is not None)]
    assert all(49152 not in t.shape for t in tensors)
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    theirs = {p.data_ptr() for p in target.parameters()}
    assert not theirs & {p.data_ptr() for p in heads.parameters()}


def test_loading_names_a_folder_without_weights(tmp_path: Path) -> None:
    HeadsConfig(family="medusa", target_hidden_size=64, target_num_layers=4, features=[4]).save_pretrained(tmp_path)
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
