"""``headstart generate``: streams, compares, refuses; on a toy target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.heads import FAMILIES
from headstart.scripts.cli import app
from tests.byte_tokenizer import byte_tokenizer
from tests.toys import chain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that spells a text with characters of several bytes, and heads for it."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = byte_tokenizer()
    ids = tokenizer("🚀é", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    model = chain(dict(zip(ids, [*ids[1:], end], strict=True)), eos=end)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    FAMILIES["medusa"].from_target(model).save_pretrained(folder / "heads")
    return folder


def run(folder: Path, *args: str) -> tuple[int, str, str]:
    options = ["generate", "--target", str(folder / "target"), "--heads", str(folder / "heads"), "--raw", *args]
    done = CliRunner().invoke(app, options)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 1, "", str(done.exception)
    return done.exit_code, done.stdout, done.stderr


def test_streams_whole_characters(folder: Path) -> None:
    """FC-028: a character spread over several tokens comes out whole."""
    first = byte_tokenizer().decode(byte_tokenizer()("🚀é", add_special_tokens=False)["input_ids"][:4])
    code, out, err = run(folder, first)
    assert code == 0 and out.strip() == "é" and "\ufffd" not in out
    assert "tokens per pass" in err and "the target's own" in err


@pytest.mark.parametrize("temperature", ["0", "1.5"])
def test_compare_shows_both_speeds_and_whether_ids_are_equal(folder: Path, temperature: str) -> None:
    saved = folder / f"figures{temperature}.json"
    code, out, _ = run(
        folder, "🚀", "--compare", "--temperature", temperature, "--save", str(saved), "--max-new-tokens", "9"
    )
    assert code == 0 and "equal" in out and "tokens per pass" in out and "1 of 1 equal" in out
    figures = json.loads(saved.read_text())
    assert figures["runs"][0]["plain"] > 0 and figures["runs"][0]["fast"] > 0
    assert figures["median_speedup"]["medusa"] == figures["runs"][0]["fast"] / figures["runs"][0]["plain"]


def test_a_merge_is_compared_beside_the_heads_alone(folder: Path) -> None:
    code, out, _ = run(folder, "🚀", "--compare", "--drafter", "prompt-lookup", "--max-new-tokens", "9")
    assert code == 0 and out.count("1 of 1 equal") == 2 and "prompt-lookup + medusa" in out


def test_a_file_of_prompts_gives_a_row_each(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate("🚀é")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = run(folder, "--prompts", str(tmp_path / "prompts.jsonl"), "--compare", "--max-new-tokens", "4")
    assert code == 0 and "p0" in out and "p1" in out and "median" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--prompts", "p.jsonl"], "one of them"),
        ([], "one of them"),
        (["x", "--temperature", "-1"], "expected 0"),
        (["x", "--temperature", "nan"], "expected 0"),
        (["x", "--dtype", "int8"], "bfloat16"),
        (["x", "--nodes", "0"], "greater than or equal to 1"),
        (["x", "--depth", "-1"], "greater than or equal to 0"),
        (["x", "--max-new-tokens", "0"], "greater than or equal to 1"),
        (["x", "--drafter", "lookup"], "expected one of prompt-lookup"),
        (["x", "--heads", "no/where"], "cannot load heads from 'no/where'"),
        (["x", "--compare", "--save", "no/where.json"], "no is not there"),
        (["--prompts", "nothing.jsonl"], "no such file"),
        (["--prompts", "EMPTY"], "holds no prompt; expected rows with a user turn"),
    ],
)
def test_bad_options_are_refused_with_what_is_expected_before_the_target_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    monkeypatch.setattr("headstart.infer.embedded.load_target", lambda *a, **k: pytest.fail("the target was loaded"))
    empty = tmp_path / "prompts.jsonl"
    empty.write_text('{"id": "s", "messages": [{"role": "system", "content": "S"}]}\n')
    code, _, err = run(folder, *(str(empty) if arg == "EMPTY" else arg for arg in args))
    assert code != 0
    assert said in " ".join(err.replace("│", " ").split())


def test_the_tree_of_the_best_pass_is_drawn(folder: Path) -> None:
    code, out, err = run(folder, "🚀", "--show-tree", "--max-new-tokens", "4")
    assert code == 0 and "pass " in err and "the target's own" in err and "draft > target" in err
    assert "\x1b" not in out + err  # no terminal, no colours
    code, _, err = run(folder, "🚀", "--show-tree", "--compare")
    assert code != 0 and "leave out --compare" in " ".join(err.replace("│", " ").split())


def test_a_terminal_gets_colours_unless_told_not_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    first = byte_tokenizer().decode(byte_tokenizer()("🚀é", add_special_tokens=False)["input_ids"][:4])
    code, out, err = run(folder, first)
    assert code == 0 and "é" in out and "coloured by the tokens a pass gave" in err
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, err = run(folder, first)
    assert code == 0 and out.strip() == "é" and "coloured" not in err
