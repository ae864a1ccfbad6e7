"""Checkpoints survive a kill at any instant and never mix runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headstart.heads import FAMILIES, load_heads
from headstart.train import checkpoint
from tests.toys import llama


def save(out: Path, step: int, digest: str = "d", keep: int = 2) -> Path:
    heads = FAMILIES["medusa"].from_target(llama())
    return checkpoint.save(out, step, heads, {"rng": torch.get_rng_state()}, {"digest": digest}, keep)


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


def test_another_run_is_refused_and_untouched(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(ValueError, match="another out=FOLDER"):
        checkpoint.latest(tmp_path, "other")
    assert folder.is_dir()


WRITER = """
import sys, time
from pathlib import Path
import torch
from headstart.train import checkpoint
from tests.test_checkpoint import save
out = Path(sys.argv[1])
save(out, 1)
save(out, 2)
slow = torch.save
def crawl(*args):
    slow(*args)
    Path(out, "writing").touch()
    time.sleep(60)
checkpoint.torch.save = crawl
save(out, 3)
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    """FC-049: signal 9 inside the third save."""
    root = str(Path(__file__).parent.parent)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=root, env=os.environ | {"PYTHONPATH": root}
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "writing").exists():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert any(f.name.startswith(".step-000003") for f in (tmp_path / "checkpoints").iterdir())
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None and found.step == 2
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    save(tmp_path, 3)
    again = checkpoint.latest(tmp_path, "d")
    assert again is not None and again.step == 3
