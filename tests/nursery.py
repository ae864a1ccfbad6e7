"""Runs that are killed and gone on with, from test_resume: each a fork of this one process, which has imported all of
it once and computes nothing itself (torch does not survive a fork in the middle of its work).

Prints one line of JSON a case.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headstart.heads import FAMILIES
from headstart.train import checkpoint
from headstart.train.batches import Stream
from headstart.train.loop import train
from headstart.train.schedule import Plan
from headstart.train.stop import Stopped
from tests.test_loop import DEFAULTS, micro_rows
from tests.toys import llama

STEPS = 9

if find_spec("deepspeed"):  # accelerate imports it wherever it is installed, which takes longer than a run here
    import_module("deepspeed")


def run(out: Path, prepare: Callable[[], None] = lambda: None) -> None:
    """Nine steps in epochs of five, with dropout, so that the random state counts; saved every second step, and where
    an evaluation is the best. ``prepare`` is called before the first step."""
    torch.manual_seed(0)
    target = llama(num_hidden_layers=2).requires_grad_(False)
    heads = FAMILIES["hydra"].from_target(target, num_draft_heads=2, dropout=0.3)
    options = {"steps": STEPS, "schedule": "cosine", "save_every": 2, "evaluate_every": 3, "weights": (1.0, 0.8)}
    scores, told = {0: 0.5, 3: 2.0, 6: 1.0, 9: 1.5}, [0]
    prepare()
    train(
        Accelerator(cpu=True),
        target,
        heads,
        Stream(micro_rows(10), 2, 0),
        Plan(**(DEFAULTS | options)),
        out,
        "d",
        evaluate=lambda heads: {"tokens_per_pass": scores[told[-1]]},
        tell=lambda progress: told.append(progress.step),
    )
    joined = b"".join(p.detach().numpy().tobytes() for p in heads.parameters())
    (out / "weights").write_text(hashlib.sha256(joined).hexdigest())


def child(work: Callable[[], None]) -> int:
    """A fork that does ``work``; its process id."""
    found = os.fork()
    if found:
        return found
    try:
        work()
        os._exit(0)
    except Stopped:
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


# places in a save at which it can be cut off: each gets a function that tells of it and never returns


def patched(owner: Any, name: str, around: Callable[[Any, Any, Any], Any], nth: int = 1) -> None:
    """The ``nth`` call of ``owner.name`` goes through ``around``."""
    inner, calls = getattr(owner, name), [0]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return around(inner, args, kwargs) if calls[0] == nth else inner(*args, **kwargs)

    setattr(owner, name, replaced)


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def faults(hang: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """By name; of the third save, which also removes an older checkpoint."""

    def weights(inner: Any, args: Any, kwargs: Any) -> None:
        inner(*args, **kwargs)
        halved(next(args[1].rglob("*.safetensors")))
        hang()

    def state(inner: Any, args: Any, kwargs: Any) -> None:
        inner(*args, **kwargs)
        halved(args[1])
        hang()

    def facts(inner: Any, args: Any, kwargs: Any) -> None:
        inner(args[0], args[1][: len(args[1]) // 2], **kwargs)
        hang()

    def before(inner: Any, args: Any, kwargs: Any) -> None:
        hang()

    def after(inner: Any, args: Any, kwargs: Any) -> None:
        inner(*args, **kwargs)
        hang()

    def removing(inner: Any, args: Any, kwargs: Any) -> None:
        next(args[0].rglob("*.safetensors")).unlink()
        hang()

    module: Any = checkpoint
    return {
        "weights": lambda: patched(module.joint, "save", weights, 3),
        "state": lambda: patched(module.torch, "save", state, 3),
        "facts": lambda: patched(Path, "write_text", facts, 3),
        "sync": lambda: patched(module, "sync", before, 17),
        "rename": lambda: patched(Path, "rename", before, 3),
        "renamed": lambda: patched(Path, "rename", after, 3),
        "remove": lambda: patched(module, "_remove", before, 1),
        "removing": lambda: patched(module.shutil, "rmtree", removing, 5),
    }


def killed_at_fault(out: Path, name: str) -> str:
    """Until the fault is reached, then signal 9."""
    told, tell = os.pipe()

    def hang() -> None:
        os.write(tell, b"!")
        time.sleep(60)

    found = child(lambda: run(out, faults(hang)[name]))
    os.close(tell)
    reached = os.read(told, 1)
    os.kill(found, signal.SIGKILL)
    os.waitpid(found, 0)
    os.close(told)
    return "reached" if reached else "never reached"


def killed_after(out: Path, seconds: float, slow: bool, number: int = signal.SIGKILL) -> str:
    """So long after the start, in a run whose saves are ``slow`` or not."""

    def crawl() -> None:
        inner = checkpoint.sync

        def sync(path: Path) -> None:
            time.sleep(0.03)
            inner(path)

        checkpoint.sync = sync  # type: ignore[attr-defined]

    found = child(lambda: run(out, crawl if slow else lambda: None))
    time.sleep(seconds)
    os.kill(found, number)
    return f"status {os.waitstatus_to_exitcode(os.waitpid(found, 0)[1])}"


def length(out: Path, slow: bool) -> float:
    """Seconds that such a run takes."""
    began = time.monotonic()
    killed_after(out, 0, slow, 0)
    return time.monotonic() - began


def main(folder: Path, kills: int) -> None:
    began = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(child(lambda: run(folder / "whole")), 0)[1]) == 0
    once = time.monotonic() - began
    slow = length(folder / "slow", True)
    expected = (folder / "whole" / "weights").read_text()
    points = list(faults(lambda: None))
    dice = random.Random(0)
    for i in range(max(kills, len(points) + 1)):
        out = folder / f"run{i}"
        if i < len(points):
            instant, how = points[i], killed_at_fault(out, points[i])
        else:
            crawls, number = i % 2 == 0, signal.SIGTERM if i == len(points) else signal.SIGKILL
            seconds = dice.uniform(0.1, slow if crawls else once)
            instant = f"{signal.Signals(number).name} after {seconds:.2f} s, {'slow' if crawls else 'quick'} saves"
            how = killed_after(out, seconds, crawls, number)
        left = sorted(f.name for f in (out / "checkpoints").glob("*")) if (out / "checkpoints").is_dir() else []
        ended = os.waitstatus_to_exitcode(os.waitpid(child(lambda out=out: run(out)), 0)[1])
        told = {
            "instant": instant,
            "how": how,
            "left": left,
            "status": ended,
            "equal": ended == 0 and (out / "weights").read_text() == expected,
            "kept": sorted(f.name for f in (out / "checkpoints").iterdir()),
        }
        print(json.dumps(told), flush=True)
        shutil.rmtree(out)
    print(json.dumps({"seconds": {"quick": once, "slow": slow}}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
