"""`scripts/gpu-check`: the small shapes run through all of it here; what fails is told, and the rest still runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from headstart.scripts import gpu_check, gpu_launch
from headstart.scripts.gpu_check import FILE, VERSION, check
from headstart.scripts.gpu_launch import STEPS, fsdp_launch
from headstart.scripts.gpu_steps import TINY, TOY, random_target

ROOT = Path(__file__).parent.parent


def checked(folder: Path, code: int, minutes: float = 5.0) -> dict[str, Any]:
    """The file that a run with small shapes leaves, which ends with ``code``."""
    outcome: Any = pytest.raises(typer.Exit) if code else nullcontext()
    with outcome as ended:
        check(tiny=True, save=folder, minutes=minutes, device="cpu")
    assert not code or ended.value.exit_code == code
    found: dict[str, Any] = json.loads((folder / FILE).read_text())
    return found


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch, and one context and mode."""
    monkeypatch.setattr(gpu_check, "TINY", TINY._replace(contexts=TINY.contexts[:1], modes=TINY.modes[:1]))
    monkeypatch.setattr(gpu_check, "fsdp_launch", lambda folder, device: {"losses": [2.0, 1.0], "seconds": 1.0})


def test_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(tmp_path, 0)
    assert found["version"] == VERSION and found["complete"] and found["missing"] == {}
    assert found["machine"]["dtype"] == "bfloat16"
    assert [row["context"] for row in found["verify"]] == list(TINY.contexts)
    for row in found["verify"]:
        assert row["nodes"] == [1, 2, 4, 6, 8, 12] and row["seconds"] == sorted(row["seconds"]) and row["draft"] > 0
    cases = [(row["mode"], row["context"], row["asked"]) for row in found["steps"]]
    contexts = {"eager": TINY.contexts, "compiled": TINY.contexts[:1]}
    assert cases == [(mode, c, a) for mode, places in contexts.items() for c in places for a in TINY.acceptance]
    for row in found["steps"]:
        assert set(row["verdicts"]) <= {"equal", "near tie"} and sum(row["verdicts"].values()) == TINY.repeats
        assert 0 < row["kept"] < 1 and row["tokens_per_pass"] > 1 and row["loop_speedup"] > 0
        assert set(row["step"]) == {"draft", "plan", "verify", "accept", "commit", "other"}
        assert row["step"]["verify"] > 0 and row["graphs"] == (row["mode"] == "compiled")
    losses = found["launch"]["losses"]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert found["launch"]["config"] == "accelerate-cpu-fsdp2.yaml"
    said = capsys.readouterr().out
    assert "FSDP2 launch: loss" in said and said.count("\n  eager ") == 4 and said.count("\n  compiled ") == 2


@pytest.mark.usefixtures("_short")
def test_a_part_that_fails_is_told_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(gpu_check, "verify_curve", fails)
    found = checked(tmp_path, 1)
    assert found["missing"] == {"passes, 24 tokens cached": "RuntimeError: no kernel image is available"}
    assert len(found["steps"]) == 2 and found["launch"] and not found["complete"]
    assert "missing: passes, 24 tokens cached: RuntimeError: no kernel image" in capsys.readouterr().out


@pytest.mark.usefixtures("_short")
def test_a_wrong_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, remark = gpu_check.decode_rows, "random: NOT a near tie: a bug at token 3"

    def wrong(*given: Any) -> list[dict[str, Any]]:
        return [row | {"verdicts": {"bug": 1}, "remarks": [remark]} for row in real(*given)]

    monkeypatch.setattr(gpu_check, "decode_rows", wrong)
    assert not checked(tmp_path, 1)["complete"]


def test_what_would_begin_too_late_is_left_out(tmp_path: Path) -> None:
    found = checked(tmp_path, 1, minutes=0)
    assert list(found["missing"]) == ["target", "FSDP launch"] and "0 minutes" in found["missing"]["target"]
    assert (found["verify"], found["steps"], found["launch"]) == ([], [], None)


# with one, the whole would not be refused but run, for minutes: that is what the script itself is for
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_without_an_accelerator_the_whole_is_refused(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(check)
    ended = CliRunner().invoke(app, ["--save", str(tmp_path / "new")])
    assert ended.exit_code == 2 and "--tiny" in ended.output and not (tmp_path / "new").exists()


def test_the_random_text_hangs_on_its_context() -> None:
    model = random_target(TOY, "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    ids = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 5
    first, second = model.generate(ids, max_new_tokens=48, do_sample=False, pad_token_id=0)[:, 24:].tolist()
    assert first != second and len(set(first)) > 24
    again = random_target(TOY, "cpu").generate(ids[:1], max_new_tokens=48, do_sample=False, pad_token_id=0)
    assert again[0, 24:].tolist() == first


@pytest.mark.parametrize(("code", "said"), [(3, "ended with 3: .*out of luck"), (0, "not under FSDP2: .*out of luck")])
def test_a_launch_that_did_not_train_under_fsdp_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    ended = SimpleNamespace(returncode=code, stdout="", stderr="out of luck")
    monkeypatch.setattr(gpu_launch, "subprocess", SimpleNamespace(run=lambda *_, **__: ended))
    with pytest.raises(RuntimeError, match=said):
        fsdp_launch(tmp_path, "cpu")


def test_wheels_that_came_along_are_installed_without_an_index(tmp_path: Path) -> None:
    """With a python3 that only says what it was asked for."""
    for name in ("heads", "train", "infer", "recipes", "scripts", "out/wheels", "bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "out/wheels/one.whl"):
        (tmp_path / name).touch()
    shutil.copy(ROOT / "scripts" / "gpu-check", tmp_path / "scripts")
    fake = tmp_path / "bin" / "python3"
    fake.write_text('#!/bin/sh\necho "$PYTHONPATH|$@"\n')
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}
    said = subprocess.run(
        [tmp_path / "scripts" / "gpu-check", "--tiny"], env=environment, capture_output=True, text=True, check=True
    )
    site = tmp_path / "out" / "gpu-check" / "site"
    pip = f"-m pip install --quiet --no-index --no-deps --upgrade --target {site}"
    assert said.stdout.splitlines() == [
        f"|{pip} out/wheels/one.whl",
        f"{site}|{pip} --no-build-isolation out/gpu-check/source",
        f"{site}|-m headstart.scripts.gpu_check --tiny",
    ]
