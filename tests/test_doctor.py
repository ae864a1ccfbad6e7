"""``headstart doctor``: sound heads of every family pass, and each defect is caught by the check made for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from headstart.heads import FAMILIES, Batch, DraftHeads
from headstart.heads import base as base_module
from headstart.scripts.cli import app
from headstart.train import doctor as doctor_module
from headstart.train import retrace
from headstart.train.doctor import Check, Examination, examine
from headstart.train.masking import Masked
from tests.byte_tokenizer import byte_tokenizer
from tests.toys import VOCAB, chain, llama

TALK = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "The sea is wide."}]
DRAFT = torch.arange(2, VOCAB, 3)
ORDER = ["heads", "target", "labels", "features", "parity", "exactness", "leakage", "vocabulary", "guesses"]


@functools.cache
def toy() -> Any:
    """One target for all tests that leave it alone: its self-test then runs once."""
    return llama()


def made(kind: type[DraftHeads], target: Any, **options: Any) -> DraftHeads:
    """Heads away from their start, so that a wrong block or a wrong place shows."""
    heads = kind.from_target(target, **{"unroll": 3} if "unroll" in kind.options else {}, **options)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return heads


@pytest.fixture(params=list(FAMILIES))
def kind(request: pytest.FixtureRequest) -> type[DraftHeads]:
    return FAMILIES[request.param]


def failed(found: Examination) -> list[str]:
    return [check.name for check in found.checks if not check.ok]


def named(found: Examination, name: str) -> Check:
    return next(check for check in found.checks if check.name == name)


@pytest.mark.parametrize(("talk", "draft_ids"), [(TALK, None), (None, DRAFT)], ids=["given", "answered-reduced"])
def test_sound_heads_pass(kind: Any, draft_ids: Tensor | None, talk: Any) -> None:
    target = toy()
    heads = made(kind, target, draft_ids=draft_ids).train()
    found = examine(target, byte_tokenizer(), heads, talk, tokens=16)
    assert found.ok, found.checks
    assert [check.name for check in found.checks] == ORDER
    assert heads.training  # as it was
    assert len(found.slots[0].labels) == heads.trained_depths


def test_half_precision_passes(kind: Any) -> None:
    target = llama().bfloat16()
    heads = torch.nn.Module.to(made(kind, target), dtype=torch.bfloat16)
    found = examine(target, byte_tokenizer(), heads, TALK, tokens=16)
    assert failed(found) == []
    assert "bfloat16" in named(found, "target").figure and "1e-01" in named(found, "parity").figure


def test_every_slot_shows_its_label(kind: Any) -> None:
    """By hand: at depth d slot t is taught token t + 2 + d, and that counts from the answer's first token on."""
    target, tokenizer = llama(), byte_tokenizer()
    heads = made(kind, target)
    found = examine(target, tokenizer, heads, TALK, tokens=12)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = len(tokenizer(text[: text.index("The sea")], add_special_tokens=False)["input_ids"])
    best = target(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    depths = heads.trained_depths
    assert [slot.slot for slot in found.slots] == list(range(start - 2 - depths, start + 4))
    for slot in found.slots:
        t = slot.slot
        assert (slot.token, slot.following, slot.best) == (ids[t], ids[t + 1], best[t])
        assert slot.supervised == (t >= start)
        for d, label in enumerate(slot.labels):
            assert label.token == ids[t + 2 + d]
            assert label.counts == (t + 2 + d >= start) == (label.guess is not None)
            assert label.right == (label.counts and label.guess == best[t + 1 + d])


def previous_level(kind: Any) -> Any:
    """What ``level`` gives is a depth late."""
    plain, root, last = kind.level, kind.refresh, {}

    def refresh(self: Any, *args: Any) -> Tensor:
        last[0] = root(self, *args)
        return last[0]  # type: ignore[no-any-return]

    def level(self: Any, tokens: Tensor, parent: Tensor, depth: int, state: Any, tie: Any) -> Tensor:
        last[depth] = plain(self, tokens, parent, depth, state, tie)
        late: Tensor = last[depth - 1]
        return late.gather(1, parent[:, :, None].expand(-1, -1, late.shape[-1]))

    return {"refresh": refresh, "level": level}


def previous_feature(kind: Any) -> Any:
    """``refresh`` reads the features one position late."""
    plain = kind.refresh

    def refresh(self: Any, features: Tensor, *args: Any) -> Tensor:
        return plain(self, features.roll(1, 1), *args)  # type: ignore[no-any-return]

    return {"refresh": refresh}


def next_token(kind: Any) -> Any:
    """``refresh`` pairs each feature with a token one position late."""
    plain = kind.refresh

    def refresh(self: Any, features: Tensor, tokens: Tensor, *args: Any) -> Tensor:
        return plain(self, features, tokens.roll(1, 1), *args)  # type: ignore[no-any-return]

    return {"refresh": refresh}


@pytest.mark.parametrize("spoil", [previous_level, previous_feature, next_token])
def test_decoding_off_by_one_fails_parity_alone(
    kind: Any, spoil: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such heads decode the exact text, and teacher-forced accuracy looks as good as ever: only parity tells."""
    if kind is FAMILIES["medusa"] and spoil is next_token:
        pytest.skip("reads no token")  # Medusa: a wrong token cannot show in what never looks at it
    target = toy()
    heads = made(kind, target)
    for name, method in spoil(kind).items():
        monkeypatch.setattr(kind, name, method)
    assert failed(examine(target, byte_tokenizer(), heads, TALK, tokens=16)) == ["parity"]


def test_a_sibling_that_is_seen_fails_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree whose nodes see the wrong branch beside them is right along a chain."""
    from headstart.heads.attention import Branches

    plain = Branches.add
    monkeypatch.setattr(Branches, "add", lambda self, *args: torch.ones_like(plain(self, *args)))
    target = toy()
    heads = made(FAMILIES["eagle3"], target)
    assert failed(examine(target, byte_tokenizer(), heads, TALK, tokens=16)) == ["parity"]


@pytest.mark.parametrize("part", ["features", "tokens"])
def test_training_that_reads_ahead_leaks(kind: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One position is enough: each slot of the unroll is given what belongs to the next."""
    if kind is FAMILIES["medusa"] and part == "tokens":
        pytest.skip("reads no token")  # Medusa: a wrong token cannot show in what never looks at it
    plain = kind.unroll

    def unroll(self: Any, batch: Batch, tie: Any, depths: int) -> Any:
        return plain(self, batch._replace(**{part: getattr(batch, part).roll(-1, 1)}), tie, depths)

    target = toy()
    heads = made(kind, target)
    monkeypatch.setattr(kind, "unroll", unroll)
    assert failed(examine(target, byte_tokenizer(), heads, TALK, tokens=16)) == ["parity", "leakage"]


def test_a_loss_mask_that_is_not_shifted_is_caught(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SpecForge #885: labels move, the mask does not."""
    plain = base_module.predictions
    monkeypatch.setattr(base_module, "predictions", lambda s, d, depth: plain(s.roll(-1, 1), d, depth))
    target = toy()
    found = examine(target, byte_tokenizer(), made(kind, target), TALK, tokens=8)
    assert failed(found) == ["labels"] and "the loss finds" in named(found, "labels").figure


def test_a_mask_that_leaves_out_the_first_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: Any) -> Masked:
        row = plain(*args)
        return Masked(row.ids, [a and b for a, b in zip(row.supervised, [False, *row.supervised], strict=False)])

    plain = retrace.render
    monkeypatch.setattr(retrace, "render", late)
    target = toy()
    found = examine(target, byte_tokenizer(), made(FAMILIES["medusa"], target), TALK, tokens=8)
    assert failed(found) == ["labels"] and "does not begin" in named(found, "labels").figure


def test_features_that_are_not_those_of_decoding_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any) -> Any:
        found = plain(*args)
        return found._replace(batch=found.batch._replace(features=found.batch.features.roll(1, 1)))

    plain = retrace.online
    monkeypatch.setattr(retrace, "online", shifted)
    target = toy()
    found = examine(target, byte_tokenizer(), made(FAMILIES["medusa"], target), TALK, tokens=8)
    assert failed(found) == ["features", "parity"]


def test_a_text_that_is_not_the_targets_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Tensor:
        out = retrace.greedy(*args)
        out[-3] = (out[-3] + 1) % VOCAB
        return out

    monkeypatch.setattr(doctor_module, "greedy", wrong)
    target = toy()
    found = examine(target, byte_tokenizer(), made(FAMILIES["medusa"], target), TALK, tokens=8)
    assert failed(found) == ["exactness"] and "a bug" in named(found, "exactness").figure


def test_good_guesses_and_what_decoding_makes_of_them_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that says one token for ever: fresh heads, which repeat its next-token law, are right everywhere."""
    tokenizer = byte_tokenizer()
    token = tokenizer("a", add_special_tokens=False)["input_ids"][0]
    target = chain(dict.fromkeys(range(VOCAB), token))
    kind = FAMILIES["medusa"]
    heads = kind.from_target(target)
    line = named(examine(target, tokenizer, heads, tokens=16), "guesses")
    assert line.figure.startswith("right by depth 100% 100% 100% 100%; 4") and line.warnings == ()
    plain = kind.refresh
    monkeypatch.setattr(kind, "refresh", lambda self, features, *args: plain(self, -features, *args))
    found = examine(target, tokenizer, heads, tokens=16)
    line = named(found, "guesses")
    assert failed(found) == ["parity"] and "100%" in line.figure and "promise 5.00" in line.warnings[0]


def test_untrained_heads_get_a_warning_and_pass() -> None:
    target = toy()
    found = examine(target, byte_tokenizer(), made(FAMILIES["medusa"], target, draft_ids=DRAFT[:4]), TALK, tokens=16)
    assert found.ok
    assert "not trained" in named(found, "guesses").warnings[0]
    assert "never be guessed" in named(found, "vocabulary").warnings[0]


def test_heads_of_other_targets() -> None:
    """Other sizes end the examination; other weights of the same sizes are a warning."""
    tokenizer, heads = byte_tokenizer(), made(FAMILIES["medusa"], toy())
    found = examine(llama(hidden_size=32), tokenizer, heads, TALK, tokens=8)
    assert failed(found) == ["heads"] and len(found.checks) == 1 and "hidden_size" in found.checks[0].figure
    found = examine(llama(seed=1), tokenizer, heads, TALK, tokens=8)
    assert found.ok and "other weights" in found.checks[0].warnings[0]


def test_a_target_that_trees_do_not_fit_ends_the_examination() -> None:
    target = llama()
    heads = made(FAMILIES["medusa"], target)
    plain = target.forward
    target.forward = lambda *args, **kwargs: plain(*args, **(kwargs | {"attention_mask": None}))
    found = examine(target, byte_tokenizer(), heads, TALK, tokens=8)
    assert failed(found) == ["target"] and len(found.checks) == 2


def test_what_cannot_be_examined_is_refused_first() -> None:
    target, tokenizer = llama(), byte_tokenizer()
    heads = made(FAMILIES["medusa"], target)
    with pytest.raises(ValueError, match="expected 4 or more"):
        examine(target, tokenizer, heads, TALK, tokens=3)
    with pytest.raises(ValueError, match="empty conversation"):
        examine(target, tokenizer, heads, [])
    with pytest.raises(ValueError, match="knows 256 positions"):
        examine(target, tokenizer, heads, [{"role": "user", "content": "x" * 300}])
    silent = chain(dict.fromkeys(range(VOCAB), tokenizer.eos_token_id), eos=tokenizer.eos_token_id)
    with pytest.raises(ValueError, match="with nothing"):
        examine(silent, tokenizer, FAMILIES["medusa"].from_target(silent))


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    target = toy()
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    made(FAMILIES["eagle3"], target).save_pretrained(folder / "heads")
    (folder / "talk.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    return folder


def run(folder: Path, *args: str, heads: str = "heads") -> tuple[int, str]:
    options = ["doctor", "--target", str(folder / "target"), "--heads", str(folder / heads), *args]
    done = CliRunner().invoke(app, options)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 2, str(done.exception)  # as ``main`` words it
    return done.exit_code, done.stdout + done.stderr


def test_the_command_prints_a_line_a_check_and_the_slots(folder: Path) -> None:
    code, out = run(folder, "--conversation", str(folder / "talk.jsonl"), "--tokens", "16")
    lines = out.splitlines()
    assert code == 0 and "\x1b" not in out
    assert [line.split()[1] for line in lines if line.startswith("ok ")] == ORDER
    assert "depth 3: slot + 4" in out and "('T')" not in out and "('\\n')" in out and "'T' -" in out


def test_a_file_of_prompts_is_answered_by_the_target(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    assert run(folder, "--conversation", str(tmp_path / "prompts.jsonl"), "--tokens", "8")[0] == 0


def broken(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> str:
    """A copy of the heads with other tensors."""
    heads = folder / change.__name__
    heads.mkdir(exist_ok=True)
    (heads / "config.json").write_bytes((folder / "heads" / "config.json").read_bytes())
    save_file(change(load_file(folder / "heads" / "model.safetensors")), heads / "model.safetensors", {"format": "pt"})
    return heads.name


def without_a_tensor(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name != "fc.weight"}


def with_a_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["fc.weight"][0, 0] = float("nan")
    return tensors


@pytest.mark.parametrize(("change", "said"), [(without_a_tensor, "missing: fc.weight"), (with_a_nan, "fc.weight")])
def test_a_broken_folder_exits_1(folder: Path, change: Any, said: str) -> None:
    code, out = run(folder, heads=broken(folder, change))
    assert code == 1 and out.startswith("FAILED  heads") and said in out


def test_heads_of_another_target_exit_1(folder: Path) -> None:
    made(FAMILIES["eagle3"], llama(vocab_size=64)).save_pretrained(folder / "other")
    code, out = run(folder, heads="other")
    assert code == 1 and "vocab_size: heads for 64, the target has 320" in out and "slot +" not in out


def test_heads_that_decode_otherwise_exit_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in previous_feature(FAMILIES["eagle3"]).items():
        monkeypatch.setattr(FAMILIES["eagle3"], name, method)
    code, out = run(folder, "--tokens", "8")
    assert code == 1 and out.count("FAILED") == 1 and "FAILED  parity" in out and "depth 1: slot + 2" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--tokens", "3"], "equal to 4"),
        (["--dtype", "int8"], "bfloat16"),
        (["--conversation", "no.jsonl"], "no such file"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(folder: Path, args: list[str], said: str) -> None:
    code, out = run(folder / "nowhere", *args)
    assert code == 2 and said in " ".join(out.replace("│", " ").split())


def test_a_file_without_a_conversation_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"messages": []}\n')
    code, out = run(folder / "nowhere", "--conversation", str(tmp_path / "none.jsonl"))
    assert code == 2 and "expected one with a user turn" in out


def test_heads_that_are_not_there_are_refused(folder: Path) -> None:
    code, out = run(folder, heads="nowhere")
    assert code == 2 and "cannot load heads from" in out and "model.safetensors" in out
