"""`headstart export` and `headstart import`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from headstart.heads import FAMILIES, load_heads
from headstart.heads.formats import export_heads
from headstart.infer.embedded import load_target
from headstart.scripts.cli import app
from headstart.train.joint import join, save
from tests import engines
from tests.byte_tokenizer import byte_tokenizer
from tests.families import DRAFT, disturbed
from tests.test_formats import drafts, texts
from tests.toys import llama


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, EAGLE-3 heads as they are made, and Medusa-2 heads with their adapter."""
    root = tmp_path_factory.mktemp("export")
    target = llama(num_hidden_layers=8)
    target.save_pretrained(root / "target")
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 2}  # FC-058: not to be saved
    (root / "target" / "generation_config.json").write_text(json.dumps(settings))
    byte_tokenizer().save_pretrained(root / "target")
    disturbed(FAMILIES["eagle3"].from_target(target, draft_ids=DRAFT)).save_pretrained(root / "eagle3")
    heads = disturbed(FAMILIES["medusa"].from_target(target, num_draft_heads=3))
    joint = join(target, heads, rank=4, alpha=8, dropout=0.0, modules=None, seed=0)
    with torch.no_grad():
        for p in joint.adapter_parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(6)))
    save(joint, root / "medusa2")
    return root


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_out_and_back_in(root: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "vllm", tmp_path / "back"
    done = run("export", root / "eagle3", "--to", "vllm", "--target", root / "target", "--out", there)
    assert done.exit_code == 0, done.output
    assert f"{there}: config.json, model.safetensors" in done.output.replace("\n", " ")
    assert "note: the step path goes as 4 more attention heads" in done.stderr
    assert "tmp" not in (there / "config.json").read_text()
    done = run("import", there, "--target", root / "target", "--out", back)
    assert done.exit_code == 0, done.output
    assert "eagle3 heads, 4 deep" in done.output
    target = llama(num_hidden_layers=8)
    one, other = load_heads(str(root / "eagle3")), load_heads(str(back))
    assert drafts(one, target, texts()[0], 4)[0] == drafts(other, target, texts()[0], 4)[0]
    assert "is not empty" in str(run("import", there, "--target", root / "target", "--out", back).exception)


def test_what_cannot_go_there_is_one_error_before_anything_is_loaded(root: Path, tmp_path: Path) -> None:
    done = run("export", root / "eagle3", "--to", "medusa", "--target", "no/where", "--out", tmp_path / "out")
    assert isinstance(done.exception, ValueError) and "takes medusa heads" in str(done.exception)


def test_nothing_is_loaded_for_an_export_that_has_no_room(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.infer.embedded.load_target", lambda *a, **k: pytest.fail("the target was loaded"))
    (tmp_path / "notes.txt").write_text("mine")
    done = run("export", root / "eagle3", "--to", "vllm", "--target", root / "target", "--out", tmp_path)
    assert isinstance(done.exception, ValueError) and "is not empty" in str(done.exception)
    done = run("import", tmp_path, "--target", root / "target", "--out", tmp_path / "out")
    assert isinstance(done.exception, ValueError) and "holds no config.json" in str(done.exception)


def test_the_embedded_target_is_named_as_engines_find_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = FAMILIES["medusa"].from_target(llama(num_hidden_layers=8))
    heads.config.target_name, heads.config.target_revision = "smollm2", ""
    heads.save_pretrained(tmp_path / "embedded")
    assert run("export", tmp_path / "embedded", "--to", "medusa", "--out", tmp_path / "one").exit_code == 0
    found = json.loads((tmp_path / "one" / "config.json").read_text())
    assert found["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    heads.config.target_name, heads.config.target_revision = "org/model", "c" * 40
    heads.save_pretrained(tmp_path / "named")
    assert run("export", tmp_path / "named", "--to", "medusa", "--out", tmp_path / "two").exit_code == 0
    found = json.loads((tmp_path / "two" / "config.json").read_text())  # FC-065
    assert (found["base_model_name_or_path"], found["base_model_revision"]) == ("org/model", "c" * 40)


@pytest.mark.parametrize("to", ["vllm", "medusa"])
def test_medusa_2_goes_with_its_target_merged(root: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    words = ["export", root / "medusa2" / "heads", "--to", to, "--out", out, "--target", root / "target"]
    for target in (root / "target", "org/by-its-name"):
        done = run(*words[:-1], target)
        assert isinstance(done.exception, ValueError) and "give --target and --adapter" in str(done.exception)
    done = run(*words, "--adapter", root / "medusa2" / "adapter")
    assert done.exit_code == 0, done.output
    assert json.loads((out / "heads" / "config.json").read_text())["base_model_name_or_path"] == "target"

    settings = json.loads((root / "target" / "generation_config.json").read_text())
    assert json.loads((out / "target" / "generation_config.json").read_text()).items() >= settings.items()
    target: Any = llama(num_hidden_layers=8)
    heads = load_heads(str(root / "medusa2" / "heads"))
    bare = [drafts(heads, target, ids, 3)[0] for ids in texts()]
    target.load_adapter(str(root / "medusa2" / "adapter"))
    whole: Any = AutoModelForCausalLM.from_pretrained(out / "target")
    ids = texts()[0][None]
    torch.testing.assert_close(whole(ids).logits, target(ids).logits, rtol=1e-4, atol=1e-4)
    engine = engines.medusa_vllm if to == "vllm" else engines.medusa_faster
    guesses = [engine(out / "heads", whole.double(), ids, 3, to) for ids in texts()]
    assert guesses == [drafts(heads, target, ids, 3)[0] for ids in texts()] != bare


def test_imported_heads_call_the_target_as_it_was_asked_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded target lies in a cache folder whose name says nothing to anybody."""
    loaded = load_target(str(root / "target"))
    monkeypatch.setattr("headstart.infer.embedded.load_target", lambda name, **_: loaded)
    target = llama(num_hidden_layers=8)
    export_heads(FAMILIES["eagle"].from_target(target), "vllm", tmp_path / "theirs", base="smollm2")
    done = run("import", tmp_path / "theirs", "--target", "smollm2", "--out", tmp_path / "ours")
    assert done.exit_code == 0 and "note" not in done.stderr, done.output
    assert load_heads(str(tmp_path / "ours")).config.target_name == "smollm2"


def test_another_adapter_is_refused(root: Path, tmp_path: Path) -> None:
    joint = join(
        llama(num_hidden_layers=8),
        FAMILIES["medusa"].from_target(llama(num_hidden_layers=8)),
        rank=4,
        alpha=8,
        dropout=0.0,
        modules=None,
        seed=3,
    )
    save(joint, tmp_path / "other")
    words = ["--to", "vllm", "--target", root / "target", "--out", tmp_path / "out"]
    done = run("export", root / "medusa2" / "heads", *words, "--adapter", tmp_path / "other" / "adapter")
    assert isinstance(done.exception, ValueError) and "were trained with the adapter" in str(done.exception)
    done = run("export", root / "eagle3", *words, "--adapter", tmp_path / "other" / "adapter")
    assert isinstance(done.exception, ValueError) and "on the bare target: leave --adapter out" in str(done.exception)
    done = run("export", root / "medusa2" / "heads", *words, "--adapter", tmp_path / "nothing")
    assert isinstance(done.exception, ValueError) and "holds no adapter_config.json" in str(done.exception)


def test_an_id_that_cannot_be_reached_is_told_with_what_is_expected(root: Path, tmp_path: Path) -> None:
    done = run("import", "some/draft", "--target", root / "target", "--out", tmp_path / "out")
    assert isinstance(done.exception, OSError) and "cannot read 'some/draft': expected a folder" in str(done.exception)
