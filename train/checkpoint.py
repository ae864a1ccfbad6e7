"""Checkpoints: written beside, synced, renamed. A kill at any instant leaves the last complete one.

out/checkpoints/step-000200/   heads/  state.pt (optimizer, random state)  state.json (step, digests)
                               adapter/ where the target learns too
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headstart.heads import DraftHeads
from headstart.infer.embedded import sync
from headstart.train import joint
from headstart.train.joint import Joint

logger = logging.getLogger(__name__)

COMPLETE = "state.json"  # written last
VERSION = 1


class Restored(NamedTuple):
    """Where a run stood."""

    step: int
    folder: Path
    state: dict[str, Any]  # optimizer and random state, plain tensors and numbers
    facts: dict[str, Any]  # state.json


def save(
    out: Path, step: int, model: DraftHeads | Joint, state: dict[str, Any], facts: dict[str, Any], keep: int
) -> Path:
    """Writes step ``step`` atomically and keeps the newest ``keep``. Returns the folder."""
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
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    sync(folder.parent)
    for old in complete(out)[:-keep]:
        shutil.rmtree(old)
    return folder


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
    if facts["version"] > VERSION:
        raise ValueError(f"{folder} has checkpoint version {facts['version']}, this release reads up to {VERSION}")
    if facts["digest"] != digest:
        raise ValueError(
            f"{out} holds a run with another recipe, target or data than this one; "
            "give another out=FOLDER, or remove the old run"
        )
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    return Restored(facts["step"], folder, state, facts)


def restore(
    out: Path, facts: dict[str, Any], model: DraftHeads | Joint, optimizer: torch.optim.Optimizer, resume: bool
) -> int:
    """Loads the newest whole checkpoint into model, optimizer and random state; returns the step to go on from.

    Raises ValueError where ``out`` holds a run this one cannot continue.
    """
    if not resume and complete(out):
        raise ValueError(f"{out} holds checkpoints of a run: give another out=FOLDER, or go on with resume=true")
    found = latest(out, facts["digest"])
    if found is None:
        return 0
    if found.facts["window"] != facts["window"]:
        raise ValueError(
            f"the run in {out} takes {found.facts['window']} batches a step (processes times accumulation), this one "
            f"{facts['window']}: go on with as many processes as before, or give another out=FOLDER"
        )
    joint.restore(model, found.folder)
    optimizer.load_state_dict(found.state["optimizer"])
    torch.set_rng_state(found.state["rng"])
    return found.step


def _newest_whole(out: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint all of whose files have the size they were written with, and its state.json."""
    for folder in reversed(complete(out)):
        try:
            facts = json.loads((folder / COMPLETE).read_text())
            if all((folder / name).stat().st_size == size for name, size in facts["sizes"].items()):
                return folder, facts
        except (OSError, ValueError, KeyError):
            pass
        logger.warning("the checkpoint %s is damaged and passed over", folder)
    return None, {}
