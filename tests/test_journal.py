"""The journal of a benchmark: what is on disk after each job, torn lines, other settings, files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.scripts.journal import Journal, write_whole
from tests.test_figures import run_of

SETTINGS = {"suite": "mt_bench", "nodes": 16, "draft_model": None}


def test_each_job_is_on_disk_at_once_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    first = Journal(path, SETTINGS)
    runs = [run_of(0, "plain", 1 / 3), run_of(0, "fast", 0.1)]
    first.add(runs)
    second = Journal(path, SETTINGS)  # the first one was killed: nothing was closed
    assert second.runs == runs and second.done == {("greedy", 0)}
    second.add([run_of(1, "plain", 2.0, decoding="temperature 1")])
    second.close(remove=False)
    third = Journal(path, SETTINGS)
    assert third.done == {("greedy", 0), ("temperature 1", 1)} and len(path.read_text().splitlines()) == 3
    third.close(remove=True)
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_line_cut_off_is_dropped_and_its_job_done_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.journal"
    journal = Journal(path, SETTINGS)
    journal.add([run_of(0, "plain", 1.0)])
    journal.add([run_of(1, "plain", 1.0)])
    journal.close(remove=False)
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, SETTINGS)
    assert again.done == {("greedy", 0)}
    again.add([run_of(1, "plain", 3.0)])
    again.close(remove=False)
    assert [run.seconds for run in Journal(path, SETTINGS).runs] == [1.0, 3.0]


def test_a_cut_off_first_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    path.write_text('{"suite": "mt_')
    assert Journal(path, SETTINGS).runs == []
    assert json.loads(path.read_text()) == SETTINGS


def test_other_settings_are_refused_by_name_unless_nothing_was_done(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    Journal(path, SETTINGS).close(remove=False)
    journal = Journal(path, SETTINGS | {"nodes": 8})
    assert json.loads(path.read_text())["nodes"] == 8
    journal.add([run_of(0, "plain", 1.0)])
    journal.close(remove=False)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"1 jobs .*\(nodes 8 there, 16 here; seed None there, 3 here\).*remove it"):
        Journal(path, SETTINGS | {"seed": 3})
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["no json\n", "[1]\n", json.dumps(SETTINGS) + '\n[{"batch": 1}]\n'])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.journal"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.journal is no journal of this version"):
        Journal(path, SETTINGS)
    assert path.read_text() == text


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    write_whole(path, "old é")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_text(encoding="utf-8") == "old é"
