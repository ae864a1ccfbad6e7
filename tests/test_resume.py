"""Whatever ends a run, it goes on where it was: kills, signals, other numbers of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from headstart.heads import FAMILIES
from headstart.train import checkpoint
from headstart.train.__main__ import to_go_on
from headstart.train.engine_torch import Torch
from headstart.train.meter import Progress
from headstart.train.stop import Stopped
from tests.test_loop import micro_rows, micro_train, toy_run, weights
from tests.toys import llama

ROOT = Path(__file__).parent.parent
KILLS = int(os.environ.get("HEADSTART_KILLS", "11"))  # 8 faults of a save, a SIGTERM, and random instants


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_killed_at_any_instant_a_run_ends_with_the_same_weights_to_the_bit(tmp_path: Path) -> None:
    """FC-049: inside a save at each of its places, and at random, half of the time with saves made slow."""
    command = [sys.executable, "-m", "tests.nursery", str(tmp_path), str(KILLS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60 + 30 * KILLS, check=False
    )
    print(done.stdout)  # shown with -s, or where something below fails
    assert done.returncode == 0, done.stderr[-3000:]
    *cases, _ = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert len(cases) == KILLS
    assert [case for case in cases if not case["equal"]] == []
    assert [case for case in cases[:8] if case["how"] != "reached"] == []
    # two and the best; a kill after the last save leaves one more, as nothing is saved after it
    assert all({"step-000003", "step-000008", "step-000009"} <= set(case["kept"]) for case in cases)
    assert all(not name.startswith(".") for case in cases for name in case["kept"])
    unfinished = {case["instant"]: any(name.startswith(".") for name in case["left"]) for case in cases[:8]}
    assert unfinished == dict.fromkeys(unfinished, True) | {"renamed": False, "remove": False}


@pytest.mark.parametrize("stop", [1, 3, 7])
def test_an_interrupted_run_goes_on_exactly(tmp_path: Path, stop: int) -> None:
    """FC-050 and FC-053: ten rows, batches of 2, three epochs, stopped in the middle of an epoch."""
    options: dict[str, Any] = {"steps": 15, "schedule": "cosine", "save_every": stop}
    whole, _ = micro_train(tmp_path / "whole", micro_rows(10), **options)

    def stop_after(progress: Progress) -> None:
        if progress.step == stop + 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        micro_train(tmp_path / "h", micro_rows(10), tell=stop_after, **options)
    resumed, told = micro_train(tmp_path / "h", micro_rows(10), **options)
    assert told[0].step == stop + 1
    assert torch.equal(weights(whole), weights(resumed))
    assert checkpoint.complete(tmp_path / "h")[-1].name == "step-000015"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_the_step_it_comes_in_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """Nothing of the recipe asked for a checkpoint there; an evaluation that is due is left for later."""
    options: dict[str, Any] = {"steps": 6, "evaluate_every": 3, "evaluate": lambda heads: {"tokens_per_pass": 1.5}}
    whole, told = micro_train(tmp_path / "whole", **options)
    before = signal.getsignal(number)

    def send(progress: Progress) -> None:
        if progress.step == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped, match=f"{number.name} came: stopped after step 3, which is saved"):
        micro_train(tmp_path / "a", tell=send, **options)
    assert signal.getsignal(number) is before
    assert [f.name for f in checkpoint.complete(tmp_path / "a")] == ["step-000003"]
    resumed, again = micro_train(tmp_path / "a", **options)
    assert torch.equal(weights(whole), weights(resumed))
    assert [p.step for p in again] == [4, 5, 6, 6] and [p.step for p in told] == [0, 1, 2, 3, 3, 4, 5, 6, 6]


def test_a_signal_in_the_last_step_lets_it_finish(tmp_path: Path) -> None:
    def send(progress: Progress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    micro_train(tmp_path, tell=send, steps=4)
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["step-000004"]


def test_a_thread_trains_without_listening(tmp_path: Path) -> None:
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(micro_train(tmp_path, steps=1)))
    thread.start()
    thread.join()
    assert len(ended) == 1


def test_the_command_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert to_go_on(["a b.yaml", "optim.lr=1"]) == "headstart train 'a b.yaml' optim.lr=1"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert to_go_on(["a.yaml"]) == "headstart train --num-processes 4 a.yaml"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert to_go_on(["a.yaml"]) == "accelerate launch (as before) -m headstart.train a.yaml"


def test_a_command_that_is_told_to_stop_ends_well_and_says_how_to_go_on(tmp_path: Path) -> None:
    """SIGUSR1 as clusters send it, at a run that may not resume by itself."""
    toy_run(tmp_path, "resume: false\noptim: {epochs: 500, batch_size: 4, precision: fp32}\nevery: {log: 1}\n")
    command = [sys.executable, "-m", "headstart.train", str(tmp_path / "r.yaml")]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    said = ""
    for line in run.stderr:
        said += line
        if line.startswith("step ") and "loss" in line:
            run.send_signal(signal.SIGUSR1)
            break
    said += run.stderr.read()
    assert run.wait(timeout=120) == 0, said
    assert "SIGUSR1 came: stopped after step" in said
    assert f"headstart train {tmp_path / 'r.yaml'} resume=true" in said
    assert len(checkpoint.complete(tmp_path / "out")) == 1 and not (tmp_path / "out" / "heads").exists()


def test_a_finished_run_is_not_trained_again_and_another_recipe_is_refused(tmp_path: Path) -> None:
    first, _ = micro_train(tmp_path)
    second, told = micro_train(tmp_path)
    assert told == [] and torch.equal(weights(first), weights(second))
    with pytest.raises(ValueError, match="another recipe"):
        micro_train(tmp_path, digest="other")


def test_runs_that_cannot_be_continued_are_refused(tmp_path: Path) -> None:
    """FC-131 and FC-133: another number of batches a step, another target, a folder in use."""
    micro_train(tmp_path)
    with pytest.raises(ValueError, match="takes 1 batches a step"):
        micro_train(tmp_path, accumulation=2)
    with pytest.raises(ValueError, match="other weights"):
        micro_train(tmp_path, target=llama(seed=1))
    with pytest.raises(ValueError, match="resume=true"):
        micro_train(tmp_path, resume=False)
    assert checkpoint.complete(tmp_path)


def test_an_optimizer_state_of_other_parameters_is_refused_as_a_whole(tmp_path: Path) -> None:
    """FC-131: what is missing, unknown or misshapen is named; nothing is loaded in part."""
    micro_train(tmp_path)
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None
    state = {name: dict(known) for name, known in found.optimizer.items()}
    state["blocks.9.0.linear.bias"] = state.pop("blocks.0.0.linear.bias")
    state["blocks.1.0.linear.bias"]["exp_avg"] = torch.zeros(3)
    heads = FAMILIES["medusa"].from_target(llama())

    engine = Torch(Accelerator(cpu=True), heads, False, 1.0, "", {"lr": 1e-3})
    with pytest.raises(ValueError, match="not that of these heads") as refusal:
        engine.load_optimizer(state)
    assert str(refusal.value).splitlines()[1:] == [
        "  missing: blocks.0.0.linear.bias",
        "  unknown: blocks.9.0.linear.bias",
        "  misshapen: exp_avg of blocks.1.0.linear.bias is (3,), expected (64,)",
    ]
    assert engine.optimizer_state() == {}


def test_checkpoints_hold_no_target(tmp_path: Path) -> None:
    """FC-133: heads and their optimizer alone, by name."""
    heads, _ = micro_train(tmp_path)
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None
    assert found.optimizer.keys() == dict(heads.named_parameters()).keys()
    sizes = sum(p.numel() * 4 for p in heads.parameters())
    assert (found.folder / "heads" / "model.safetensors").stat().st_size < 1.1 * sizes + 4096
    assert (found.folder / "state.pt").stat().st_size < 2.1 * sizes + 16384


def test_random_states_of_other_numbers_of_processes_differ_by_step_and_rank(tmp_path: Path) -> None:
    micro_train(tmp_path)
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None
    drawn = []
    for rank, ranks in ((0, 1), (0, 1), (0, 2), (1, 2)):
        checkpoint.restore_random_state(found, rank, ranks)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
