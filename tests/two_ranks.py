"""Run by two processes at once, from test_loop: the same training with rows that only one rank has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headstart.heads import FAMILIES
from headstart.train.batches import Stream
from headstart.train.loop import Plan, Progress, train
from tests.test_loop import DEFAULTS, broken, masked_out, micro_rows, weights
from tests.toys import llama


def main(out: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rank = accelerator.process_index
    found: dict[str, Any] = {}
    rows = micro_rows(8)
    stream = Stream(rows, 2, 0)
    own = [i for j in range(4) if j % 2 == 1 for i in stream[j].rows]  # what rank 1 gets
    for name in ("plain", "masked", "nan"):
        used = [masked_out(r) if name == "masked" and i in own else r for i, r in enumerate(rows)]
        target = llama().requires_grad_(False)
        if name == "nan":
            target = broken(target, {rows[i].ids[0] for i in own})
        heads = FAMILIES["medusa"].from_target(target)
        told: list[Progress] = []
        plan = Plan(**(DEFAULTS | {"steps": 2}))
        train(accelerator, target, heads, Stream(used, 2, 0), plan, out / name, "d", tell=told.append)
        found[name] = weights(heads)
        if name == "plain":
            found["norm"] = torch.tensor([p.values["gradient_norm"] for p in told])
    torch.save(found, out / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
