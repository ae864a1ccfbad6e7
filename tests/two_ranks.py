"""Run by two processes at once, from test_distributed: the same training under whatever engine the launcher set up."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from headstart.heads import FAMILIES, base
from headstart.train import loop
from headstart.train.batches import Stream
from headstart.train.engine import Engine, open_accelerator
from headstart.train.loop import train
from headstart.train.masking import Masked
from headstart.train.meter import Progress
from headstart.train.schedule import Plan
from tests.test_loop import DEFAULTS, broken, masked_out, micro_rows
from tests.toys import llama

STEPS, HALF, LATER = 20, 10, 15
DRAFT = torch.arange(2, 320, 3)
CURVE: dict[str, Any] = {
    "steps": STEPS,
    "lr": 3e-3,
    "clip": 1.0,
    "divergence": "kl",
    "weights": (1.0, 0.8),
    "save_every": HALF,
    "keep": 2,
}


def uneven_rows() -> list[Masked]:
    """Sixteen rows of 8 to 38 tokens, a quarter to all of them supervised."""
    g = torch.Generator().manual_seed(11)
    lengths = [8 + 2 * i for i in range(16)]
    return [
        Masked(torch.randint(3, 320, (n,), generator=g).tolist(), [t >= n * (i % 4) / 4 for t in range(n)])
        for i, n in enumerate(lengths)
    ]


def curve(accelerator: Any, out: Path, **changes: Any) -> dict[str, Any]:
    """Twenty steps of EAGLE-3, or what is left of them: losses by step, final weights on the main process."""
    ranks = accelerator.num_processes
    plan = Plan(**(DEFAULTS | CURVE | {"accumulation": 2 // ranks} | changes))
    target = llama().requires_grad_(False)
    heads = FAMILIES["eagle3"].from_target(target, num_draft_heads=2, unroll=2, draft_ids=DRAFT, seed=1)
    told: list[Progress] = []
    torch.manual_seed(accelerator.process_index)
    with pytest.MonkeyPatch.context() as patch:
        # chunks of so few rows that ranks have different numbers of them
        patch.setattr(base, "CHUNK_ELEMENTS", 12 * DRAFT.numel())
        done = train(accelerator, target, heads, Stream(uneven_rows(), 2, 0), plan, out, "d", tell=told.append)
    values = {p.step: p.values for p in told}
    return {"values": values, "weights": {name: held(p).clone() for name, p in done.named_parameters()}}


def medusa(accelerator: Any, out: Path, rows: list[Masked], target: Any = None, **changes: Any) -> dict[str, Any]:
    """Two steps of Medusa; the weights on the main process."""
    target = (target or llama()).requires_grad_(False)
    heads = FAMILIES["medusa"].from_target(target)
    told: list[Progress] = []
    plan = Plan(**(DEFAULTS | {"steps": 2} | changes))
    done = train(accelerator, target, heads, Stream(rows, 2, 0), plan, out, "d", tell=told.append)
    return {"values": {p.step: p.values for p in told}, "weights": flat(done)}


def flat(heads: Any) -> Tensor:
    return torch.cat([held(p).flatten() for p in heads.parameters()])


def held(parameter: Any) -> Tensor:
    """What this rank has of it."""
    return getattr(parameter, "_local_tensor", parameter).detach()


def own_rows(rank: int) -> list[int]:
    """Rows that a rank gets in the first two windows of two."""
    stream = Stream(micro_rows(8), 2, 0)
    return [i for j in range(4) if j % 2 == rank for i in stream[j].rows]


def spoilt(name: str) -> tuple[list[Masked], Any]:
    """Rows and target with which rank 1 has nothing to learn, or meets NaN."""
    rows, own = micro_rows(8), own_rows(1)
    if name == "nan":
        return rows, broken(llama(), {rows[i].ids[0] for i in own})
    return [masked_out(r) if name == "masked" and i in own else r for i, r in enumerate(rows)], None


def main(name: str, out: Path, before: Path) -> None:
    """``before`` holds a checkpoint of one process at HALF, which is gone on with here."""
    if name.startswith("zero"):
        # DeepSpeed would compile its own sums in shared memory, for minutes; gloo's are the same
        import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False
    seen: list[Engine] = []
    opened = loop.open_engine
    loop.open_engine = lambda *args, **options: seen.append(opened(*args, **options)) or seen[-1]  # type: ignore
    accelerator = open_accelerator("fp32")
    found: dict[str, Any] = {"world": accelerator.num_processes, "kind": str(accelerator.distributed_type)}
    if name == "nodes":
        found |= {"local": os.environ["LOCAL_WORLD_SIZE"], "five": curve(accelerator, out / name, steps=5)}
        torch.save(found, out / f"{name}{accelerator.process_index}.pt")
        return
    for engine in ("ddp", "fsdp2") if name == "torch" else (name,):
        os.environ["ACCELERATE_USE_FSDP"] = str(engine == "fsdp2").lower()
        whole = curve(accelerator, out / engine)
        found[engine] = whole | {"engine": told_of(seen[-1])}
        found[engine]["went on"] = curve(accelerator, before / engine, save_every=STEPS - LATER)
        for case in ("plain", "masked", "nan"):
            rows, target = spoilt(case)
            found[engine][case] = medusa(accelerator, out / f"{engine}-{case}", rows, target)
    if name == "torch":
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        options: dict[str, Any] = {"steps": 8, "schedule": "linear", "accumulation": 2}
        found["rates"] = medusa(accelerator, out / "rates", micro_rows(8), **options)
        found["few"] = medusa(accelerator, out / "few", micro_rows(8), depths=((0.0, 2),))
    if name.startswith("zero"):
        found["loads whole"] = not is_deepspeed_zero3_enabled()
        found["bf16"] = medusa(open_accelerator("bf16"), out / "bf16", micro_rows(8))
    torch.save(found, out / f"{name}{accelerator.process_index}.pt")


def told_of(engine: Any) -> dict[str, Any]:
    """What the engine's parts are."""
    own = next(iter(engine.model.parameters()))
    return {
        "model": type(engine.model).__name__,
        "parameter": type(own).__name__,
        "split": hasattr(own, "ds_id") or type(own).__name__ == "DTensor",
        "here": sum(held(p).numel() for p in engine.model.parameters()),
        "optimizer": type(engine._optimizer).__name__,
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
