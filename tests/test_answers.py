"""The folder that answers go into: whose they are, one run at a time, and lines that are whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.train.answers import mend
from tests.answering import SIX, babbler_target, distill, speller
from tests.byte_tokenizer import byte_tokenizer
from tests.toys import llama


@pytest.fixture(scope="module")
def babbler() -> Any:
    return babbler_target()


def test_other_settings_want_another_folder(babbler: Any, tmp_path: Path) -> None:
    distill(babbler, byte_tokenizer(), SIX[:1], tmp_path, max_new_tokens=4)
    before = (tmp_path / "answers.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"sampling: .*'max_new_tokens': 4.*'max_new_tokens': 5.*give a new folder"):
        distill(babbler, byte_tokenizer(), SIX, tmp_path, max_new_tokens=5)
    with pytest.raises(ValueError, match="template_sha256"):
        distill(babbler, byte_tokenizer(strict=True), SIX, tmp_path, max_new_tokens=4)
    assert (tmp_path / "answers.jsonl").read_bytes() == before


def test_a_folder_of_others_is_refused(babbler: Any, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"id": "mine"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="holds other answers"):
        distill(babbler, byte_tokenizer(), SIX, tmp_path)


def test_provenance(babbler: Any, tmp_path: Path) -> None:
    distill(babbler, byte_tokenizer(), SIX, tmp_path, max_new_tokens=4, seed=3, target_id="toy")
    record = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    assert record["target"] == "toy"
    assert record["sampling"]["seed"] == 3
    assert record["counts"] == {"answered": 6, "dropped": 0}
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["template_sha256"]) == 64


def test_provenance_names_the_weights_as_heads_do(babbler: Any, tmp_path: Path) -> None:
    from headstart.heads import FAMILIES

    distill(babbler, byte_tokenizer(), SIX[:1], tmp_path / "one", max_new_tokens=4)
    record = json.loads((tmp_path / "one/provenance.json").read_text(encoding="utf-8"))
    assert record["fingerprint"] == FAMILIES["medusa"].from_target(babbler).config.target_fingerprint
    distill(llama(seed=1, num_hidden_layers=1), byte_tokenizer(), SIX[:1], tmp_path / "two", max_new_tokens=4)
    with pytest.raises(ValueError, match="fingerprint: "):
        distill(babbler, byte_tokenizer(), SIX[:1], tmp_path / "two", max_new_tokens=4)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    def progress(done: int, total: int, tokens: int) -> None:
        with pytest.raises(ValueError, match="another run writes into"):
            distill(speller(b"yo"), byte_tokenizer(), SIX, tmp_path, max_new_tokens=4)

    assert distill(speller(b"yo"), byte_tokenizer(), SIX[:1], tmp_path, max_new_tokens=4, progress=progress).kept == 1


@pytest.mark.parametrize("text", ["", "one\n", "one\ntwo", "two", "one\n" + "x" * 50, "é\n\n🚀"])
def test_mending_keeps_whole_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines"
    path.write_text(text, encoding="utf-8")
    mend(path, block=7)
    assert path.read_text(encoding="utf-8") == "".join(line for line in text.splitlines(True) if line.endswith("\n"))
