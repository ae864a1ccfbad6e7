"""Checkpoints: written beside, synced, renamed. A kill at any instant leaves the last complete one.

out/checkpoints/step-000200/   heads/  state.pt (optimizer by parameter name, random state of every process)
                               state.json (step, digests, evaluation)   adapter/ where the target learns too

All of it is whole tensors by name: any number of processes, and any engine, can go on from it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from headstart.heads import DraftHeads
from headstart.infer.embedded import sync
from headstart.train import joint
from headstart.train.joint import Joint

logger = logging.getLogger(__name__)

COMPLETE = "state.json"  # written last
VERSION = 2

Moments = dict[str, dict[str, Tensor]]
"""What AdamW knows of each parameter, by its name: whole float32 tensors on the CPU."""


class Restored(NamedTuple):
    """Where a run stood."""

    step: int
    folder: Path
    optimizer: Moments
    random: list[dict[str, Tensor]]  # one a process
    facts: dict[str, Any]  # state.json


def save(
    out: Path, step: int, model: DraftHeads | Joint, state: dict[str, Any], facts: dict[str, Any], keep: int
) -> Path:
    """Writes step ``step`` atomically; keeps the newest ``keep`` and the best. Returns the folder.

    ``state`` holds ``optimizer`` and ``random`` as in Restored, ``facts`` the digest, the window, and the score where
    this step was evaluated.
    """
    folder = out / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    joint.save(model, partial)
    torch.save(state, partial / "state.pt")
    sizes = {str(f.relative_to(partial)): f.stat().st_size for f in partial.rglob("*") if f.is_file()}
    told = {"version": VERSION, "step": step, "sizes": sizes} | facts
    (partial / COMPLETE).write_text(json.dumps(told, indent=1))
    for path in (*partial.rglob("*"), partial):
        sync(path)
    if folder.exists():  # damaged, or the run would have gone on from it
        _remove(folder)
    partial.rename(folder)
    sync(folder.parent)
    _prune(out, keep)
    return folder


def _prune(out: Path, keep: int) -> None:
    """Leaves the newest ``keep`` and the best of the whole ones. A damaged one stays and counts for nothing: the run
    has not come there again yet."""
    found, top = [folder for folder in complete(out) if _whole(folder)], best(out)
    for folder in found[:-keep]:
        if top is None or folder != top[0]:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Out of sight first: half a checkpoint never has the name of a whole one."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def complete(out: Path) -> list[Path]:
    """Complete checkpoints in ``out``, oldest first, by step number."""
    found = (out / "checkpoints").glob("step-*")
    return sorted((f for f in found if (f / COMPLETE).is_file()), key=lambda f: int(f.name.split("-")[1]))


def latest(out: Path, digest: str) -> Restored | None:
    """The newest whole checkpoint, or None. Leftovers of a killed writer are removed; a damaged one is passed over
    and named.

    Raises ValueError where ``out`` holds a run of another recipe or data (``digest``): nothing is overwritten.
    """
    for leftover in (out / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder, facts = _newest_whole(out)
    if folder is None:
        return None
    if facts["version"] != VERSION:
        raise ValueError(
            f"{folder} has checkpoint version {facts['version']}, this release reads {VERSION}: go on with the release "
            "that wrote it, or give another out=FOLDER"
        )
    if facts["digest"] != digest:
        raise _another(out)
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    return Restored(facts["step"], folder, state["optimizer"], state["random"], facts)


def restore(out: Path, facts: dict[str, Any], model: DraftHeads | Joint, resume: bool) -> Restored | None:
    """Loads the weights of the newest whole checkpoint into ``model``, and returns it for the rest; None where there is
    none.

    Raises ValueError where ``out`` holds a run this one cannot continue.
    """
    _refuse_unwanted(out, resume)
    found = latest(out, facts["digest"])
    if found is None:
        return None
    if found.facts["window"] != facts["window"]:
        raise ValueError(
            f"the run in {out} takes {found.facts['window']} batches a step, this one {facts['window']}: "
            "give another out=FOLDER"
        )
    joint.restore(model, found.folder)
    return found


def check_folder(out: Path, recipe: str, resume: bool) -> None:
    """What ``restore`` would refuse that can be told before anything is loaded, from the digest's ``recipe`` alone."""
    _refuse_unwanted(out, resume)
    found = _newest_whole(out)[1]
    if found.get("version") == VERSION and found["digest"].split("-")[0] != recipe:
        raise _another(out)


def _refuse_unwanted(out: Path, resume: bool) -> None:
    if not resume and complete(out):
        raise ValueError(f"{out} holds checkpoints of a run: give another out=FOLDER, or go on with resume=true")


def _another(out: Path) -> ValueError:
    told = f"{out} holds a run with another recipe, target or data than this one"
    return ValueError(f"{told}; give another out=FOLDER, or remove the old run")


def window(out: Path) -> int | None:
    """Micro-batches a step, over all processes, of the run in ``out``; None where there is none."""
    facts = _newest_whole(out)[1]
    return facts.get("window")


def _newest_whole(out: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint all of whose files have the size they were written with, and its state.json."""
    for folder in reversed(complete(out)):
        if facts := _whole(folder):
            return folder, facts
        logger.warning("the checkpoint %s is damaged and passed over", folder)
    return None, {}


def _whole(folder: Path) -> dict[str, Any]:
    """What state.json says; nothing where it cannot be read, or a file has another size than it was written with."""
    try:
        told: dict[str, Any] = json.loads((folder / COMPLETE).read_text())
    except (OSError, ValueError):
        return {}
    files = {folder / name: size for name, size in told.get("sizes", {}).items()}
    return told if files and all(f.is_file() and f.stat().st_size == size for f, size in files.items()) else {}


# the best -------------------------------------------------------------------------------------------------------------


def score(values: Mapping[str, float]) -> float | None:
    """What an evaluation is judged by: tokens per pass of the real decoder, else of chains on validation answers."""
    found = values.get("tokens_per_pass", values.get("validation/chain"))
    return found if found is not None and math.isfinite(found) else None


def best(out: Path) -> tuple[Path, float] | None:
    """The whole checkpoint with the highest score, the first of equals, and that score; None where none has one."""
    scored = [(folder, _whole(folder).get("score")) for folder in complete(out)]
    return max(((f, s) for f, s in scored if s is not None), key=lambda pair: pair[1], default=None)


def beats_all(found: float | None, out: Path) -> bool:
    """Whether a score is higher than that of every checkpoint in ``out``."""
    top = best(out)
    return found is not None and (top is None or found > top[1])


# state that is not weights --------------------------------------------------------------------------------------------


def random_states() -> list[dict[str, Tensor]]:
    """Of every process, in order; called by all of them."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    every: list[dict[str, Tensor]] = gather_object([own])
    return every


def restore_random_state(found: Restored, rank: int, ranks: int) -> None:
    """This process's own state where there are as many as before; else one that depends on step and rank alone."""
    if len(found.random) != ranks:
        torch.manual_seed(found.step * 1_000_003 + rank)
        return
    torch.set_rng_state(found.random[rank]["cpu"])
    if torch.cuda.is_available() and "cuda" in found.random[rank]:
        torch.cuda.set_rng_state(found.random[rank]["cuda"])


def check_moments(state: Moments, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises ValueError where ``state`` is not that of parameters with these names and shapes; empty is of none yet."""
    if not state:
        return
    wrong = [f"missing: {name}" for name in sorted(shapes.keys() - state.keys())]
    wrong += [f"unknown: {name}" for name in sorted(state.keys() - shapes.keys())]
    wrong += [
        f"misshapen: {key} of {name} is {tuple(state[name][key].shape)}, expected {tuple(shape)}"
        for name, shape in shapes.items()
        for key in ("exp_avg", "exp_avg_sq")
        if name in state and tuple(state[name][key].shape) != tuple(shape)
    ]
    if wrong:
        raise ValueError("the optimizer's state in the checkpoint is not that of these heads:\n  " + "\n  ".join(wrong))
