"""Checkpoints survive a kill at any instant and never mix runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headstart.heads import FAMILIES, load_heads
from headstart.train import checkpoint
from tests.toys import llama


def save(out: Path, step: int, digest: str = "d", keep: int = 2, score: float | None = None) -> Path:
    heads = FAMILIES["medusa"].from_target(llama())
    state = {"optimizer": {}, "random": [{"cpu": torch.get_rng_state()}]}
    return checkpoint.save(out, step, heads, state, {"digest": digest, "window": 3, "score": score}, keep)


def test_the_newest_complete_one_is_found_by_number(tmp_path: Path) -> None:
    """FC-056: twelve saves, two kept; numbers, not names, are compared."""
    assert checkpoint.latest(tmp_path, "d") is None
    for step in range(1, 13):
        save(tmp_path, step)
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["step-000011", "step-000012"]
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None and found.step == 12
    assert load_heads(str(found.folder / "heads")).config.family == "medusa"


def test_a_folder_without_its_last_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / checkpoint.COMPLETE).unlink()
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None and found.step == 1


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FC-049: the newest weight file cut to half."""
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "heads" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with caplog.at_level("WARNING"):
        found = checkpoint.latest(tmp_path, "d")
    assert found is not None and found.step == 1
    assert "step-000002 is damaged" in caplog.text


def test_a_damaged_checkpoint_takes_no_place_of_whole_ones(tmp_path: Path) -> None:
    """A run that goes on before it keeps what it saves, and is not measured against what nobody can load."""
    save(tmp_path, 5)
    file = save(tmp_path, 10, score=9.0) / "heads" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    save(tmp_path, 6, keep=1)
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None and found.step == 6
    assert checkpoint.best(tmp_path) is None and checkpoint.beats_all(1.0, tmp_path)


def test_another_run_is_refused_and_untouched(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(ValueError, match="another out=FOLDER"):
        checkpoint.latest(tmp_path, "other")
    assert folder.is_dir()


def test_a_run_that_cannot_go_on_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    checkpoint.check_folder(tmp_path, "r", resume=False)
    save(tmp_path, 1, "r-data")
    checkpoint.check_folder(tmp_path, "r", resume=True)
    with pytest.raises(ValueError, match="go on with resume=true"):
        checkpoint.check_folder(tmp_path, "r", resume=False)
    with pytest.raises(ValueError, match="another recipe"):
        checkpoint.check_folder(tmp_path, "data", resume=True)


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """FC-056: numbers, not names, and a best one early on; of equals the first."""
    for step in range(1, 13):
        save(tmp_path, step, score={3: 2.5, 5: 2.5, 7: 1.0}.get(step))
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["step-000003", "step-000011", "step-000012"]
    assert checkpoint.best(tmp_path) == (tmp_path / "checkpoints" / "step-000003", 2.5)
    assert checkpoint.beats_all(2.6, tmp_path) and not checkpoint.beats_all(2.5, tmp_path)
    assert not checkpoint.beats_all(None, tmp_path)
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None and found.step == 12


def test_what_an_evaluation_is_judged_by() -> None:
    assert checkpoint.score({"tokens_per_pass": 2.0, "validation/chain": 1.0}) == 2.0
    assert checkpoint.score({"validation/chain": 1.0}) == 1.0
    assert checkpoint.score({"tokens_per_pass": float("nan")}) is None and checkpoint.score({}) is None


def test_batches_a_step_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    assert checkpoint.window(tmp_path) is None
    save(tmp_path, 1)
    assert checkpoint.window(tmp_path) == 3


def test_other_versions_are_refused(tmp_path: Path) -> None:
    facts = save(tmp_path, 1) / checkpoint.COMPLETE
    for version in (1, 3):
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"version": version}))
        with pytest.raises(ValueError, match=f"version {version}, this release reads 2"):
            checkpoint.latest(tmp_path, "d")
