"""Where rows come from: files, folders and data sets, and what is said of broken ones."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from headstart.train.conversations import load_conversations
from headstart.train.sources import read_rows

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def write(folder: Path, rows: list[Any], name: str) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_folders_are_read_by_name_and_jsonl_wins(tmp_path: Path) -> None:
    write(tmp_path, [{"id": 2}], "b.jsonl")
    write(tmp_path, [{"id": 1}], "a.jsonl")
    write(tmp_path, [{"id": 3}], "provenance.json")
    assert [row["id"] for row in read_rows(tmp_path)] == [1, 2]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"without \.jsonl or \.json files"):
        list(read_rows(empty))
    assert [row["id"] for row in read_rows(tmp_path / "provenance.json")] == [3]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("rows.jsonl", '{"id": 1}\n\n{"id": 2\n', r"rows.jsonl:3: .*expected one JSON object a line"),
        ("rows.json", '[\n{"id": 1},\n{"id": 2\n]', r"rows.json:4: "),
        ("rows.jsonl", '{"id": 1}\n[1]\n', r"rows.jsonl:2: found of type list, expected an object"),
    ],
)
def test_broken_text_names_file_and_line(tmp_path: Path, name: str, text: str, error: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=error):
        list(read_rows(path))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "brackets"])
def test_rows_that_json_takes_but_python_does_not_end_no_run(tmp_path: Path, value: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"id": "good", "messages": MESSAGES}) + "\n"
    path.write_text(f'{good}{{"x": {value}}}\n{good}', encoding="utf-8")
    rows, report = load_conversations([path])
    assert len(rows) == 2
    assert list(report.skipped.values()) == [["rows.jsonl:2"]]
    listed = tmp_path / "rows.json"
    listed.write_text(f"[{value}]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.json: .*expected a JSON list"):
        list(read_rows(listed))


def test_wrong_files_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl: no such file"):
        list(read_rows(tmp_path / "no.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"rows\.parquet: no such file or folder; expected a \.jsonl"):
        list(read_rows(tmp_path / "rows.parquet"))
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        list(read_rows("no/such/folder/here"))
    (tmp_path / "rows.txt").touch()
    with pytest.raises(ValueError, match=r"rows\.txt: expected a \.jsonl"):
        list(read_rows(tmp_path / "rows.txt"))


def test_a_byte_order_mark_and_odd_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"id": "a\u2028b"}\r\n{"id": 2}'.encode())
    assert [row["id"] for row in read_rows(path)] == ["a\u2028b", 2]


@pytest.fixture
def table() -> Any:
    """Rows as Arrow has them: a column that one row fills stands in all of them."""
    rows = [{"id": f"r{i}", "messages": MESSAGES, "extra": None if i else "x"} for i in range(3)]
    return datasets.Dataset.from_list(rows)


def test_a_saved_data_set_is_read(tmp_path: Path, table: Any) -> None:
    table.save_to_disk(tmp_path / "one")
    rows, report = load_conversations([tmp_path / "one"])
    assert [(row.id, row.messages) for row in rows] == [(f"r{i}", MESSAGES) for i in range(3)]
    assert report.kept == 3
    with pytest.raises(ValueError, match="one data set without splits; leave out ':train'"):
        list(read_rows(f"{tmp_path / 'one'}:train"))


def test_splits_are_named(tmp_path: Path, table: Any) -> None:
    both = datasets.DatasetDict({"train_sft": table, "test_sft": table.select([0])})
    both.save_to_disk(tmp_path / "two")
    assert len(list(read_rows(f"{tmp_path / 'two'}:test_sft"))) == 1
    with pytest.raises(ValueError, match=r"splits train_sft, test_sft; say which, as .*two:SPLIT"):
        list(read_rows(tmp_path / "two"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "usual")
    assert len(list(read_rows(tmp_path / "usual"))) == 3
    datasets.DatasetDict({"only": table}).save_to_disk(tmp_path / "single")
    assert len(list(read_rows(tmp_path / "single"))) == 3


def test_tables_are_read(tmp_path: Path, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    table.to_parquet(tmp_path / "data" / "rows.parquet")
    assert [row["id"] for row in read_rows(tmp_path / "data" / "rows.parquet")] == ["r0", "r1", "r2"]
    assert [row["id"] for row in read_rows(tmp_path / "data")] == ["r0", "r1", "r2"]


def test_a_name_is_asked_of_datasets(monkeypatch: pytest.MonkeyPatch, table: Any) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*names: Any) -> Any:
        asked.append(names)
        return datasets.DatasetDict({"train": table, "test": table.select([1])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(list(read_rows("someone/chats"))) == 3
    assert [row["id"] for row in read_rows("someone/chats:test")] == ["r1"]
    assert [row["id"] for row in read_rows("someone/chats:small:test")] == ["r1"]
    assert asked == [("someone/chats",), ("someone/chats",), ("someone/chats", "small")]


def test_a_name_that_cannot_be_loaded_says_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*names: Any) -> Any:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"someone/chats: no file or folder here, .*\(offline\); expected a \.jsonl"):
        list(read_rows("someone/chats"))
