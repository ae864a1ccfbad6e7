"""What a pass and a guess cost on this machine: measured once, kept in the cache, and carried in a heads folder.

<cache>/plans/<digest of the key>.json      written by the first adaptive Speculator, or by ``headstart tune``
<heads>/plan.json                           written by ``headstart tune``; its costs hold where its key does
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils.hub import cached_file

from headstart.heads import Tie
from headstart.heads.tie import fingerprint
from headstart.infer.drafter import Source
from headstart.infer.embedded import cache_folder, sync
from headstart.infer.grouped import attention_of, has_groups
from headstart.infer.measuring import measure
from headstart.infer.plan import Plan
from headstart.infer.target import compute_dtype, home

logger = logging.getLogger(__name__)

FILE = "plan.json"
PLANS = ("fixed", "adaptive")


def check_plan(plan: str | Plan) -> None:
    """Raises ValueError for what is no plan."""
    if not isinstance(plan, Plan) and plan not in PLANS:
        raise ValueError(f"unknown plan {plan!r}; known are {', '.join(PLANS)}, or a Plan that headstart tune wrote")


def one_shape(source: Source, nodes: int, plan: str | Plan) -> tuple[Source, int]:
    """For compiled passes, which want one shape: a plan's static tree where the source can fill one, and its nodes."""
    best = plan.best if isinstance(plan, Plan) else None
    if best is None or getattr(source, "shape", best.shape) is not None:
        return source, nodes
    return dataclasses.replace(source, shape=best.shape), best.nodes  # type: ignore[type-var]


def plan_for(fast: Any, plan: str | Plan) -> Plan | None:
    """The plan of a Speculator on this machine, None for "fixed".

    A Plan whose key does not hold here keeps what it knows of the guesses; costs then come from the cache, or are
    measured, which takes some seconds, and kept there.
    """
    if plan == "fixed":
        return None
    key = key_of(fast)
    if isinstance(plan, Plan) and plan.key == key and plan.costs.sizes[-1] >= fast.nodes:
        return plan
    path = cached_path(key)
    found = read_plan(path) if path.is_file() else None
    if found is None or found.key != key or found.costs.sizes[-1] < fast.nodes:
        logger.warning("measuring what passes and guesses cost here, once for this target and source of guesses")
        found = Plan(key, measure(fast))
        keep(found, path)
    if not isinstance(plan, Plan) or found.learned is not None:
        return found
    return plan._replace(key=key, costs=found.costs)


def key_of(fast: Any) -> dict[str, str]:
    """What costs depend on: machine, libraries, target, number format, attention, compiler, source of guesses."""
    model = fast.model
    device = home(model)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "machine": _machine(device),
        "libraries": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "model": f"{type(model).__name__}, {parameters} parameters, {fingerprint(Tie.of(model))}",
        "dtype": str(compute_dtype(model)).removeprefix("torch."),
        "quantised": str(getattr(model, "quantization_method", None) or "no"),
        "attention": f"{attention_of(model)}{', by groups' if has_groups(model) else ''}",
        # compiled passes take as long as their largest tree: all are filled up to it
        "compiled": f"{fast.compiled}, {fast.nodes} nodes" if fast.compiled else "no",
        **({"prepacked": "yes"} if fast.packed else {}),
        "guesses": described(fast.source),
    }


def described(source: Any) -> str:
    """A source of guesses in words that tell sources apart that cost differently."""
    parts = [str(source.name), f"depth {source.depth}"]
    names = [field.name for field in dataclasses.fields(source)] if dataclasses.is_dataclass(source) else []
    for name in (n for n in names if n != "shape"):  # a fixed tree takes what a free one of its size takes
        value = getattr(source, name)
        if isinstance(value, nn.Module):
            numbers = list(value.parameters())
            parts.append(f"{sum(p.numel() for p in numbers)} parameters {numbers[0].dtype}")
        elif isinstance(value, tuple) and value and all(hasattr(part, "drafter") for part in value):
            parts += [f"({described(part)})" for part in value]
        elif value is None or isinstance(value, (bool, int, float, str, tuple)):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def cached_path(key: dict[str, str]) -> Path:
    """Where a plan of this key is kept; nothing need be there."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "plans" / f"{digest}.json"


def read_plan(path: Path) -> Plan | None:
    """The plan in a file; None, with a warning, where it is not whole or of another version."""
    try:
        return Plan.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:  # a JSONDecodeError is a ValueError
        logger.warning("%s is left aside: %s", path, error)
        return None


def plan_in(source: str, revision: str | None = None, token: str | bool | None = None) -> Plan | None:
    """The plan that heads in a folder or on the Hub carry, None without one."""
    options: dict[str, Any] = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "gated_repo")}
    options |= {"_raise_exceptions_for_connection_errors": False, "revision": revision, "token": token}
    found = cached_file(source, FILE, **options)
    return None if found is None else read_plan(Path(found))


def keep(plan: Plan, path: Path) -> None:
    """Writes a plan so that whoever reads it finds the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", suffix=".partial", delete=False) as file:
        json.dump(plan.as_dict(), file, indent=1)
    partial = Path(file.name)
    try:
        sync(partial)
        partial.chmod(0o644)  # a temporary file is its owner's alone
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _machine(device: torch.device) -> str:
    """The device and, on a CPU, how many threads: no name of the computer, for heads may be published."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8", errors="replace").splitlines() if facts.is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    name = name or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
