"""What a pass and a guess cost on this machine: measured once, kept in the cache, and carried in a heads folder.

    <cache>/plans/<digest of the key>.json      written by the first adaptive Speculator, or by ``headstart tune``
    <heads>/plan.json                           written by ``headstart tune``; its costs hold where its key does

Every figure is the median of repeats that take turns, so that a machine that slows down slows all of them down; times
are then made to rise with nodes, context and depth, as they must.

Legend: B rows, P prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from headstart.heads import Tie
from headstart.heads.tie import fingerprint
from headstart.infer.accept import Accepted
from headstart.infer.drafter import Source
from headstart.infer.embedded import cache_folder, sync
from headstart.infer.grow import Budget
from headstart.infer.learned import Learned
from headstart.infer.plan import SIZES, Costs, Curve, Draft, Plan, isotonic
from headstart.infer.planner import Adaptive, Planning
from headstart.infer.report import OUTSIDE, wait
from headstart.infer.target import Seen, compute_dtype, home
from headstart.infer.tree import DraftTree, pruned

logger = logging.getLogger(__name__)

FILE = "plan.json"
PLANS = ("fixed", "adaptive")
CONTEXTS = (128, 1024)  # tokens cached
REPEATS = 5
STEPS = 16  # of a call that the overhead is read from
FREE = Costs((1,), (Curve(1, 0, (1.0,)),), (Draft(1, (0.0,)),), 0.0)  # under which a planner spends all there is


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
    device, text = home(model), model.config.get_text_config(decoder=True)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "machine": _machine(device),
        "libraries": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "model": f"{type(model).__name__}, {parameters} parameters, {fingerprint(Tie.of(model))}",
        "dtype": str(compute_dtype(model)).removeprefix("torch."),
        "quantised": str(getattr(model, "quantization_method", None) or "no"),
        "attention": str(text._attn_implementation),
        "compiled": fast.compiled or "no",
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


# measuring -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    fast: Any,
    *,
    contexts: Sequence[int] = CONTEXTS,
    rows: Sequence[int] = (1,),
    repeats: int = REPEATS,
    clock: Callable[[], float] = perf_counter,
) -> Costs:
    """Costs of a Speculator's target and source, for trees of up to its ``nodes`` and its ``depth``.

    ``contexts`` tokens cached, of which those are taken that the target has positions for. Draws no random number.
    """
    text = fast.model.config.get_text_config(decoder=True)
    most = (getattr(text, "max_position_embeddings", None) or 1 << 60) - fast.depth - (repeats + 1) * fast.depth - 2
    fit = sorted({max(1, min(context, most)) for context in contexts})
    sizes = (*(size for size in SIZES if size < fast.nodes), fast.nodes)
    with fast.layout:
        seconds = {(b, c): _verify(fast, b, c, sizes, repeats, clock) for b in rows for c in fit}
        drafts = tuple(Draft(b, tuple(_draft(fast, b, fit[0], repeats, clock))) for b in rows)
    for b in rows:  # a longer text takes no less
        for before, after in itertools.pairwise(fit):
            seconds[b, after] = [max(pair) for pair in zip(seconds[b, before], seconds[b, after], strict=True)]
    curves = tuple(Curve(b, c, tuple(found)) for (b, c), found in seconds.items())
    return Costs(sizes, curves, drafts, _overhead(fast, fit[0], repeats))


def _verify(fast: Any, rows: int, context: int, sizes: Sequence[int], repeats: int, clock: Any) -> list[float]:
    """Seconds of a pass, one for each of the ``sizes``."""
    ids = _text(fast.model, rows, context + 1)
    target = fast.bound(fast.source.wants, context + 1)
    for _ in target.prefill(ids, torch.full((rows,), context + 1, device=ids.device)):
        pass
    trees = []
    for size in sizes:  # guesses side by side: a pass takes as long for any tree
        parents = torch.tensor([-1] + [0] * (size - 1), device=ids.device).expand(rows, -1)
        tokens = ids[:, -1:].expand(-1, size).contiguous()
        trees.append(DraftTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool)))

    def once(tree: DraftTree) -> float:
        began = clock()
        target.verify(tree)
        wait(ids.device)
        return float(clock() - began)

    return isotonic(_medians(once, trees, repeats))


def _draft(fast: Any, rows: int, context: int, repeats: int, clock: Any) -> list[float]:
    """Seconds of drafting to depths 0, 1 ...: growing a tree, with a planner asked before every level, and taking in
    what the pass before it gave."""
    length = context + 1
    ids = _text(fast.model, rows, length)
    lengths = torch.full((rows,), length, device=ids.device)
    room = length + (repeats + 1) * fast.depth
    drafter = fast.source.drafter(fast.model, ids.new_zeros(0))
    target = fast.bound(drafter.wants, room)
    drafter.start(ids, lengths, room)
    for seen in target.prefill(ids, lengths):
        drafter.observe(seen)
    planner = Adaptive(FREE, Learned.nothing(fast.depth), rows)
    root, taking_in = ids[:, -1], 0.0

    def once(depth: int) -> float:
        nonlocal root, taking_in
        budget = Budget(fast.nodes, depth, torch.full((rows,), depth, device=ids.device))
        budget = planner.open(budget, context, rows)
        wait(ids.device)
        began = clock()
        tree = drafter.grow(root, budget)
        wait(ids.device)
        spent = taking_in + clock() - began
        tree = pruned(tree, budget.room, target.vocab_size)
        verified = target.verify(tree)
        root = verified.logits[:, 0].argmax(-1)
        first = torch.zeros(rows, 1, dtype=torch.int64)
        accepted = Accepted(first, root[:, None].cpu(), torch.ones(rows, dtype=torch.int64))
        target.commit(accepted)
        features = None if verified.features is None else verified.features[:, :1]
        wait(ids.device)
        began = clock()
        drafter.observe(Seen(accepted.tokens, accepted.count, features, tree, verified))
        wait(ids.device)
        taking_in = clock() - began
        return float(spent)

    return [0.0, *isotonic(_medians(once, range(1, fast.depth + 1), repeats))]


def _overhead(fast: Any, context: int, repeats: int) -> float:
    """Seconds a step spends outside of both models, in calls as users make them, with a planner at work."""
    ids = _text(fast.model, 1, min(context, 32))
    options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}

    def once(_: None) -> float:
        fast.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return float(sum(fast.report.seconds[part] for part in OUTSIDE) / fast.report.steps)

    own, fast.planning = fast.planning, Planning(Plan({}, FREE), fast.depth)
    try:
        return _medians(once, [None], repeats)[0]
    finally:
        fast.planning = own


def _medians(once: Callable[[Any], float], cases: Sequence[Any], repeats: int) -> list[float]:
    """Median seconds of each case: all cases in turn, beginning with another one each time; the first turn is for
    warming up."""
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(repeats + 1):
        for i in range(len(cases)):
            at = (i + turn) % len(cases)
            spent = once(cases[at])
            if turn:
                times[at].append(spent)
    return [statistics.median(found) for found in times]


def _text(model: Any, rows: int, length: int) -> Tensor:
    """Some tokens [rows, length], always the same."""
    size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (rows, length), generator=generator).to(home(model))


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
