"""Rows from JSON Lines, JSON, folders of them, and what `datasets` loads: one dict each, and the place it comes from.

JSON is read with plain `json`, row by row: no schema is inferred, and a field may be a string in one row and a number
or a list in the next. Everything else (a saved data set, Parquet, CSV, a name on the Hub) goes through `datasets`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}  # a file's suffix, and its loader in datasets
SAVED = ("dataset_dict.json", "state.json")  # one of them stands in a folder that `save_to_disk` wrote
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
EXPECTED = (
    "expected a .jsonl, .json, .parquet or .csv file, a folder of them, a folder that datasets saved, or the name of a "
    "data set as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT"
)


class BrokenRow(ValueError):
    """A row that is no JSON object; the text is the reason a report shows."""


def read_rows(source: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a source, as `placed_rows` finds them. Raises ValueError naming file and line of a broken one."""
    for place, row in placed_rows(source):
        if isinstance(row, BrokenRow):
            raise ValueError(f"{place}: {row}")
        yield row


def placed_rows(source: str | Path) -> Iterator[tuple[str, dict[str, Any] | BrokenRow]]:
    """("file:line", row) for each row; the line of a row inside a JSON list is its number in the list.

    A folder stands for its *.jsonl files by name or, if it has none, its *.json files, or else its tables. A .json file
    holds one list of objects, or one object a line. Broken lines come out as a BrokenRow, and do not end the reading.
    """
    path = Path(source)
    if path.is_dir() and not any((path / name).exists() for name in SAVED):
        files = sorted(path.glob("*.jsonl")) or sorted(path.glob("*.json"))
        files = files or sorted(file for file in path.iterdir() if file.suffix in TABLES)
        if not files:
            raise ValueError(f"{path}: a folder without .jsonl or .json files or tables; expected at least one")
        for file in files:
            yield from placed_rows(file)
    elif path.suffix in (".jsonl", ".json"):
        yield from _from_json(path)
    else:
        name, rows = _data_set(str(source))
        yield from ((f"{name}:{number}", dict(row)) for number, row in enumerate(rows, 1))


def _from_json(path: Path) -> Iterator[tuple[str, dict[str, Any] | BrokenRow]]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; {EXPECTED}")
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        listed = path.suffix == ".json" and lines.read(4096).lstrip().startswith("[")
        lines.seek(0)
        for number, row in enumerate(_whole(lines.read(), path), 1) if listed else _lines(lines):
            good = isinstance(row, dict | BrokenRow)
            yield (
                f"{path.name}:{number}",
                row if good else BrokenRow(f"found {kind(row)}, expected an object such as {{'messages': [...]}}"),
            )


def _lines(lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or too many brackets
                row = BrokenRow(f"{getattr(error, 'msg', error)}; expected one JSON object a line")
            yield number, row


def _whole(text: str, path: Path) -> list[Any]:
    try:
        rows: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}; expected a JSON list of objects") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; expected a JSON list of objects") from error
    return rows


def _data_set(source: str) -> tuple[str, Any]:
    """(name for places, rows) through datasets: a table, a saved folder, or a name with its config and split."""
    import datasets  # takes a second, and JSON needs none of it

    base, *parts = [source] if Path(source).exists() else source.split(":")
    path = Path(base)
    if len(parts) > 2 or (not path.exists() and (path.suffix in TABLES or not HUB_NAME.fullmatch(base))):
        raise FileNotFoundError(f"{source}: no such file or folder; {EXPECTED}")
    split = parts[-1] if parts else None
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(base)
        elif path.exists():
            if path.suffix not in TABLES:
                raise ValueError(f"{source}: {EXPECTED}")
            loaded = datasets.load_dataset(TABLES[path.suffix], data_files=base, split="train")
        else:
            loaded = datasets.load_dataset(base, *parts[:-1])
    except OSError as error:
        raise OSError(
            f"{source}: no file or folder here, and not to be loaded as a data set ({error}); {EXPECTED}"
        ) from error
    name = path.name
    if isinstance(loaded, dict):  # splits by name
        split = split or ("train" if "train" in loaded else next(iter(loaded)) if len(loaded) == 1 else "")
        if split not in loaded:
            raise ValueError(f"{source}: splits {', '.join(loaded)}; say which, as {base}:SPLIT")
        name, loaded = f"{name}:{split}", loaded[split]
    elif split is not None and path.is_dir():
        raise ValueError(f"{source}: that folder holds one data set without splits; leave out ':{split}'")
    return name, loaded


def kind(value: object) -> str:
    """What a value is, as errors name it."""
    return "null" if value is None else f"of type {type(value).__name__}"
