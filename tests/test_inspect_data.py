"""`headstart inspect`: rows with their supervised tokens marked, and a summary of the set."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headstart.scripts.inspect_data import inspect, marked, plain_text
from headstart.train.masking import render
from tests.byte_tokenizer import byte_tokenizer

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo é🚀"},
    {"role": "user", "content": "and [bold]?"},
    {"role": "assistant", "content": "no"},
]
APP = typer.Typer()
APP.command()(inspect)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and what `headstart distill` leaves."""
    made = tmp_path_factory.mktemp("inspect")
    byte_tokenizer().save_pretrained(made / "toy")
    data = made / "data"
    data.mkdir()
    rows = [
        {"id": "one", "messages": CHAT},
        {"id": "twice", "messages": [{"role": "user", "content": "x"}]},
        {"id": "long", "messages": [CHAT[0], {"role": "assistant", "content": "x" * 90}]},
        {"id": "late", "messages": [{"role": "user", "content": "x" * 90}, CHAT[1]]},
    ]
    (data / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sampling = {"temperatures": [0.0, 0.8], "max_new_tokens": 16, "seed": 7}
    record = {"target": str(made / "toy"), "answered": "in process", "template_sha256": "abcdef0123456789"}
    (data / "provenance.json").write_text(json.dumps(record | {"sampling": sampling}))
    return made


def shown(*line: Any) -> str:
    result = CliRunner().invoke(APP, [str(part) for part in line])
    assert result.exit_code == 0, result.output
    return result.output


def test_without_a_terminal_supervised_runs_stand_in_marks(folder: Path) -> None:
    told = shown(folder / "data")
    assert "one: 66 tokens, 13 supervised\n" in told
    assert "<|turn|>assistant\n⟦yo é🚀</s>⟧\n<|turn|>user\nand [bold]?</s>\n<|turn|>assistant\n⟦no</s>⟧\n" in told
    assert "\x1b[" not in told


def test_the_summary_counts_and_names(folder: Path) -> None:
    told = shown(folder / "data", "--rows", 0, "--max-length", 100)
    assert "rows read: 3 kept, 1 skipped\n  skipped 1: no assistant turn after a user turn (twice)" in told
    assert "rows for training: 2 kept, 1 skipped\n" in told
    assert "skipped 1: nothing supervised in the first 100 tokens (late)" in told
    assert "changed 1: cut at 100 tokens (long)" in told
    numbers = re.search(r"(\d+) tokens, (\d+) of them supervised \(([\d.]+)%\); a row: median (\d+), longest 100", told)
    assert numbers
    tokens, supervised = int(numbers[1]), int(numbers[2])
    assert tokens == 66 + 100
    assert abs(100 * supervised / tokens - float(numbers[3])) < 0.1
    assert "(in process), template abcdef01 {}, temperatures [0.0, 0.8], at most 16 tokens, seed 7" in told


def test_rows_are_chosen_and_options_reach_the_masks(folder: Path) -> None:
    told = shown(folder / "data", "--first", 1, "--rows", 5)
    assert "long: " in told
    assert "late: " in told
    assert "one: " not in told
    everything = shown(folder / "data", "--train-on", "all", "--rows", 1)
    assert "one: 66 tokens, 66 supervised" in everything
    assert "⟦<|turn|>user\nhi</s>" in everything


def test_tokens_one_by_one(folder: Path) -> None:
    lines = shown(folder / "data", "--tokens").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("one: "))
    row = render(CHAT, byte_tokenizer())
    for place, (token, on) in enumerate(zip(row.ids, row.supervised, strict=True)):
        fields = lines[at + 1 + place].split(maxsplit=3 if on else 2)
        assert [int(fields[0]), int(fields[1])] == [place, token]
        assert (fields[2] == "+") == on
    assert lines[at + 1].endswith("'<|turn|>'")


def test_on_a_terminal_they_are_coloured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    told = shown(folder / "data")
    assert "⟦" not in told
    y, o = (re.search(rf"\x1b\[30;(42|102)m{letter}\x1b\[0m", told) for letter in "yo")  # black on green
    assert y and o
    assert {y[1], o[1]} == {"42", "102"}  # neighbours in different shades
    assert re.search(r"\x1b\[2m", told)
    assert "and [bold]?" in re.sub(r"\x1b\[[\d;]*m", "", told)  # text is no markup


def test_whose_tokens_must_be_known(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "rows.jsonl"
    alone.write_text(json.dumps({"messages": CHAT}) + "\n")
    unknown = CliRunner().invoke(APP, [str(alone)])
    assert unknown.exit_code == 2
    assert "--target" in unknown.output
    assert "1 kept, 0 skipped" in shown(alone, "--target", folder / "toy")
    (tmp_path / "provenance.json").write_text(json.dumps({"target": {"name": "of heads"}}))
    assert CliRunner().invoke(APP, [str(alone)]).exit_code == 2
    (tmp_path / "provenance.json").write_text(json.dumps({"target": "somewhere/else"}))
    elsewhere = CliRunner().invoke(APP, [str(alone)])
    assert "no tokenizer for the target 'somewhere/else', say where it is with --target" in str(elsewhere.exception)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}\n')
    refused = CliRunner().invoke(APP, [str(bad), "--target", str(folder / "toy")])
    assert isinstance(refused.exception, ValueError)
    assert "no conversation to look at" in str(refused.exception)


def test_parts_of_a_character_come_together() -> None:
    tokenizer = byte_tokenizer()
    row = render(CHAT[:2], tokenizer)
    texts = [text for text, _ in marked(row, tokenizer)]
    assert "🚀" in texts
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) == tokenizer.decode(row.ids)
    assert plain_text(row, tokenizer).count("⟦") == 1
    broken = row._replace(ids=[*row.ids[:-3], 64 + 0xF0, 64 + 0x9F, row.ids[-1]])
    assert "".join(text for text, _ in marked(broken, tokenizer)).count("\ufffd") >= 1
