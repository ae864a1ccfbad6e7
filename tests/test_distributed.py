"""One training under every engine that CPUs can run, as two processes: the same curve, weights and checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from headstart.heads import FAMILIES
from headstart.train import checkpoint
from headstart.train.engine import open_engine, refuse_fsdp_options, refuse_lonely_ranks, refuse_split_targets
from headstart.train.engine_deepspeed import settle
from headstart.train.joint import Joint
from headstart.train.launch import common
from tests.test_loop import micro_rows, toy_run
from tests.toys import llama
from tests.two_ranks import HALF, LATER, STEPS, curve, medusa, spoilt

ROOT = Path(__file__).parent.parent
TORCH: dict[str, str] = {"ACCELERATE_USE_CPU": "true"}
DEEPSPEED = {"DS_ACCELERATOR": "cpu"}
# the extras of development bring it; a plain installation for inference does not
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed")


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One process, twenty steps; and its folder, with checkpoints at the half and at the end."""
    AcceleratorState._reset_state(reset_partial_state=True)
    out = tmp_path_factory.mktemp("alone")
    return curve(Accelerator(cpu=True), out), out


def rewound(out: Path, step: int, to: Path) -> Path:
    """A copy of a finished run as it was after ``step``."""
    shutil.copytree(out, to)
    shutil.rmtree(to / "checkpoints" / f"step-{STEPS:06d}")
    assert [f.name for f in checkpoint.complete(to)] == [f"step-{step:06d}"]
    return to


def start(config: str, *arguments: str, extra: dict[str, str], options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """accelerate launch with one of our configs."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"recipes/accelerate-{config}.yaml"]
    command += [*options, "-m", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | extra
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[Any], limit: float = 240) -> str:
    """What it printed, once it has ended well."""
    try:
        said = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        said = process.communicate()[0]
    assert process.returncode == 0, said[-4000:]
    return str(said)


def two_ranks(name: str, config: str, engines: tuple[str, ...], alone: Any, out: Path, extra: dict[str, str]) -> Any:
    """Both ranks' findings."""
    for engine in engines:
        rewound(alone[1], HALF, out / "before" / engine)
    port = ("--main_process_port", "0")
    ended(start(config, "tests.two_ranks", name, str(out), str(out / "before"), extra=extra, options=port))
    return [torch.load(out / f"{name}{rank}.pt", weights_only=True) for rank in range(2)]


def losses(found: dict[str, Any]) -> list[float]:
    return [values["loss"] for values in found["values"].values()]


def check_curve(found: dict[str, Any], alone: dict[str, Any], out: Path, tmp_path: Path) -> None:
    """The whole run, one that went on from one process, one process that goes on from it, and 1 -> 2 -> 1."""
    expected = losses(alone)
    assert expected[-1] <= 0.8 * expected[0] and len(expected) == STEPS
    assert losses(found) == pytest.approx(expected, rel=1e-4)
    assert losses(found["went on"]) == pytest.approx(expected[HALF:], rel=1e-4)
    assert list(found["went on"]["values"]) == list(range(HALF + 1, STEPS + 1))
    back = curve(Accelerator(cpu=True), rewound(out, HALF, tmp_path / "back"))
    assert losses(back) == pytest.approx(expected[HALF:], rel=1e-4)
    there_and_back = rewound(out.parent / "before" / out.name, LATER, tmp_path / "there and back")
    end = curve(Accelerator(cpu=True), there_and_back)
    assert losses(end) == pytest.approx(expected[LATER:], rel=1e-4)
    for run in (found, found["went on"], back, end):
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(run["weights"][name], weight, atol=1e-5, rtol=1e-3)


def check_metrics(found: dict[str, Any], alone: dict[str, Any]) -> None:
    """FC-128: every number that is told, one process and two."""
    for step, values in alone["values"].items():
        assert found["values"][step].keys() == values.keys()
        for name, value in values.items():
            assert found["values"][step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
            assert not name.startswith(("accuracy", "alpha")) or 0 <= value <= 1


def check_rank_with_nothing(found: dict[str, Any], tmp_path: Path) -> None:
    """FC-127: both ranks finish, and have learnt what one process learns from the same rows."""
    for case in ("plain", "masked", "nan"):
        rows, target = spoilt(case)
        single = medusa(Accelerator(cpu=True), tmp_path / case, rows, target, accumulation=2)
        assert torch.isfinite(found[case]["weights"]).all()
        torch.testing.assert_close(found[case]["weights"], single["weights"], atol=2e-6, rtol=1e-4)
        check_metrics(found[case], single)
    assert [v["bad_rows"] for v in found["nan"]["values"].values()] == [2.0, 2.0]


@pytest.fixture(scope="module")
def torch_ranks(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """DDP and FSDP2 in one launch: FSDP2 is asked for by the environment."""
    out = tmp_path_factory.mktemp("torch")
    return two_ranks("torch", "cpu-fsdp2", ("ddp", "fsdp2"), alone, out, TORCH), out


def test_ddp(torch_ranks: Any, alone: Any, tmp_path: Path) -> None:
    ranks, out = torch_ranks
    whole = sum(w.numel() for w in alone[0]["weights"].values())
    for rank in ranks:
        assert (rank["world"], rank["kind"]) == (2, "DistributedType.MULTI_CPU")
        expected = {"model": "DistributedDataParallel", "parameter": "Parameter", "split": False, "here": whole}
        assert rank["ddp"]["engine"] == expected | {"optimizer": "AdamW"}
    check_curve(ranks[0]["ddp"], alone[0], out / "ddp", tmp_path)
    check_metrics(ranks[0]["ddp"], alone[0])
    check_rank_with_nothing(ranks[0]["ddp"], tmp_path)
    for name in ("weights", "plain", "masked", "nan"):
        one, other = (rank["ddp"][name] for rank in ranks)
        one, other = (x if name == "weights" else {"": x["weights"]} for x in (one, other))
        assert all(torch.equal(one[k], other[k]) for k in one)


def test_fsdp2(torch_ranks: Any, alone: Any, tmp_path: Path) -> None:
    """torch's fully_shard on a mesh of two CPU processes; each holds a half."""
    ranks, out = torch_ranks
    whole = sum(w.numel() for w in alone[0]["weights"].values())
    for rank in ranks:
        told = rank["fsdp2"]["engine"]
        assert (told["model"], told["parameter"], told["split"]) == ("FSDPEagle3", "DTensor", True)
        assert told["here"] < 0.6 * whole
    check_curve(ranks[0]["fsdp2"], alone[0], out / "fsdp2", tmp_path)
    check_metrics(ranks[0]["fsdp2"], alone[0])
    check_rank_with_nothing(ranks[0]["fsdp2"], tmp_path)


def test_the_rate_falls_once_a_step_whatever_the_number_of_processes(torch_ranks: Any, tmp_path: Path) -> None:
    """FC-134: accumulation 2 on two processes, and 4 on one."""
    options: dict[str, Any] = {"steps": 8, "schedule": "linear"}
    single = medusa(Accelerator(cpu=True), tmp_path, micro_rows(8), accumulation=4, **options)
    rates = [[v["lr"] for v in found["values"].values()] for found in (single, torch_ranks[0][0]["rates"])]
    assert rates[0] == rates[1] == pytest.approx([1e-3 * (8 - step) / 8 for step in range(8)])


def test_heads_that_are_not_trained_yet_stop_nobody(torch_ranks: Any, tmp_path: Path) -> None:
    """FC-137: without find_unused_parameters, and unchanged."""
    found = torch_ranks[0][0]["few"]
    single = medusa(Accelerator(cpu=True), tmp_path, micro_rows(8), accumulation=2, depths=((0.0, 2),))
    torch.testing.assert_close(found["weights"], single["weights"], atol=2e-6, rtol=1e-4)
    half = found["weights"].numel() // 2
    assert found["weights"][:half].abs().sum() > 0 and not found["weights"][half:].any()


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(stage: int, alone: Any, tmp_path: Path) -> None:
    name = f"zero{stage}"
    ranks = two_ranks(name, f"cpu-{name}", (name,), alone, tmp_path, DEEPSPEED)
    for rank in ranks:
        assert (rank["world"], rank["kind"]) == (2, "DistributedType.DEEPSPEED")
        assert rank["loads whole"]  # FC-130: target and heads, by transformers, in full
        told = rank[name]["engine"]
        assert (told["model"], told["split"]) == ("DeepSpeedEngine", stage == 3)
        assert told["optimizer"] == ("DeepSpeedZeroOptimizer" if stage == 2 else "DeepSpeedZeroOptimizer_Stage3")
        assert stage == 2 or told["here"] == 0  # outside of forward and backward nobody holds a parameter
    check_curve(ranks[0][name], alone[0], tmp_path / name, tmp_path)
    check_metrics(ranks[0][name], alone[0])
    check_rank_with_nothing(ranks[0][name], tmp_path)
    # matmuls in bfloat16, weights still in float32
    half, single = ranks[0]["bf16"], ranks[0][name]["plain"]
    assert half["weights"].dtype == torch.float32 and not torch.equal(half["weights"], single["weights"])
    assert losses(half) == pytest.approx(losses(single), rel=2e-2)


def test_two_machines(alone: Any, tmp_path: Path) -> None:
    """Two launches that find each other over the loopback, one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    nodes = []
    for rank in range(2):
        options = ("--num_processes", "2", "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1")
        options += ("--main_process_port", port)
        arguments = ("tests.two_ranks", "nodes", str(tmp_path), str(tmp_path))
        nodes.append(start("2nodes", *arguments, extra=TORCH, options=options))
    for node in nodes:
        ended(node)
    for rank in range(2):
        found = torch.load(tmp_path / f"nodes{rank}.pt", weights_only=True)
        assert (found["world"], found["local"]) == (2, "1")
        assert len(losses(found["five"])) == 5
    assert losses(found["five"]) == pytest.approx(losses(alone[0])[:5], rel=1e-4)


def test_a_cluster_takes_two_processes_away_and_gives_one_back(tmp_path: Path) -> None:
    """headstart train --num-processes: SIGTERM at the launcher, everything saved, status 0, the command to go on."""
    toy_run(tmp_path, "optim: {epochs: 40, batch_size: 2, lr: 3e-3, precision: fp32}\nevery: {log: 1, evaluate: 0}\n")
    command = [sys.executable, "-m", "headstart.scripts.cli", "train", str(tmp_path / "r.yaml"), "--num-processes", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    log, deadline = tmp_path / "out" / "log.jsonl", time.monotonic() + 120
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while not (log.is_file() and len(log.read_text().splitlines()) >= 3):
        assert run.poll() is None and time.monotonic() < deadline, run.stderr
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 0, said
    stopped = json.loads(log.read_text().splitlines()[-1])["step"]
    assert f"SIGTERM came: stopped after step {stopped}" in said
    assert f"headstart train --num-processes 2 {tmp_path / 'r.yaml'}" in said
    command = [*command[:-2], "optim.epochs=40"]
    ended(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True))
    steps = [line["step"] for line in map(json.loads, log.read_text().splitlines()) if "lr" in line]
    assert steps == list(range(1, 81)) and stopped < 80  # 8 rows, 2 a batch, 2 batches a step as before


def test_ranks_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="each would train alone"):
        refuse_lonely_ranks(1)
    refuse_lonely_ranks(2)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("accelerate-*.yaml")), ids=lambda path: path.stem)
def test_the_launch_configs_that_ship_are_read_by_accelerate(path: Path) -> None:
    """And what they name is there; the target is never split."""
    config = load_config_from_file(str(path))
    name = path.stem.removeprefix("accelerate-")
    assert config.num_machines == (2 if "2nodes" in name else 1)
    deepspeed, fsdp = config.deepspeed_config, config.fsdp_config
    assert bool(deepspeed) == ("zero" in name) and bool(fsdp) == ("fsdp" in name)
    if deepspeed:
        assert deepspeed["zero3_init_flag"] is False
        told = json.loads((ROOT / deepspeed["deepspeed_config_file"]).read_text())
        assert f"zero{told['zero_optimization']['stage']}" == name.split("-")[-1]
        settle(told, 3, 0.5)
        assert (told["gradient_accumulation_steps"], told["gradient_clipping"]) == (3, 0.5)
    if fsdp:
        assert fsdp["fsdp_version"] == 2 and fsdp["fsdp_auto_wrap_policy"] == "NO_WRAP"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"optimizer": {"type": "Adam"}}, "optimizer: remove it"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: remove it"),
        ({"gradient_clipping": 0.1}, "gradient_clipping 0.1: set auto, the recipe says 1.0"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4: set auto, the recipe says 2"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: set false, heads stay float32"),
        ({"zero_optimization": {"stage": 0}}, "without ZeRO use DDP"),
    ],
)
def test_deepspeed_configs_that_double_the_recipe_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settle({"zero_optimization": {"stage": 2}} | config, 2, 1.0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FSDP_VERSION", "1", "fsdp_version: 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params: false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "optim.recompute=true"),
    ],
)
def test_fsdp_options_that_are_not_there_are_refused(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_fsdp_options()
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        refuse_fsdp_options()


class Stub:
    """An accelerator as an engine is chosen by."""

    gradient_accumulation_steps = 1

    def __init__(self, kind: DistributedType, **plugin: Any) -> None:
        self.distributed_type, self.deepspeed_plugin = kind, SimpleNamespace(**plugin)


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_joint_training_is_refused_by_engines_that_would_split_the_target(kind: DistributedType) -> None:
    joint = Joint(torch.nn.Module(), FAMILIES["medusa"].from_target(llama()))
    stub: Any = Stub(kind)
    with pytest.raises(ValueError, match=r"Medusa-2.*(DeepSpeed|FSDP) would split"):
        open_engine(stub, joint, accumulation=1, clip=1.0, times=1.0)


def test_a_launch_that_would_split_the_target_is_refused() -> None:
    """FC-130."""
    stub: Any = Stub(DistributedType.DEEPSPEED, zero3_init_flag=True)
    with pytest.raises(ValueError, match="zero3_init_flag: false"):
        refuse_split_targets(stub)
    stub.deepspeed_plugin.zero3_init_flag = False
    refuse_split_targets(stub)


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert "ACCELERATE_USE_CPU" not in common(2)
    with pytest.raises(ValueError, match="--num-processes 3 for 2 devices"):
        common(3)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert common(3)["WORLD_SIZE"] == "3"
