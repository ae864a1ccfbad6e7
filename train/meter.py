"""What is told of a run: numbers summed on each rank, averaged over all of them when they are read.

Legend: K depths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headstart.train.features import Online


class Progress(NamedTuple):
    """What is told after a step: ``values`` are plain numbers, averaged since the last time."""

    step: int
    values: dict[str, float]


class Meter:
    """Sums since the last report, on this rank."""

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._clear()

    def _clear(self) -> None:
        self.sums = torch.zeros(4, self._depths, dtype=torch.float64)
        self.target = torch.zeros(2, dtype=torch.float64)
        self.tokens = self.norm = 0.0
        self.steps = self.bad = self.skipped = 0  # the same on every rank

    def add(self, losses: Any, part: Online) -> None:
        """One micro-batch."""
        rows = (losses.loss, losses.correct, losses.alpha, losses.count)
        self.sums[:, : len(losses.count)] += torch.stack([x.detach().double().cpu() for x in rows])
        if losses.target is not None:
            self.target += losses.target.double().cpu()
        self.tokens += float((part.batch.document >= 0).sum())

    def note(self, bad: int, *, taught: bool) -> None:
        """A window of all ranks: rows left out of it, and whether it made an optimizer step."""
        self.bad, self.skipped = self.bad + bad, self.skipped + (not taught)

    def stepped(self, norm: float) -> None:
        """One optimizer step, whose gradient had this ``norm`` before it was clipped."""
        self.norm, self.steps = self.norm + norm, self.steps + 1

    def read(self, accelerator: Any) -> dict[str, float]:
        """Averages over all ranks since the last call; a depth without predictions is left out."""
        own = torch.cat([self.sums.flatten(), self.target, torch.tensor([self.tokens], dtype=torch.float64)])
        every = accelerator.reduce(own.float().to(accelerator.device), "sum").cpu()
        loss, correct, alpha, count = every[:-3].view(4, self._depths)
        values = {"tokens": float(every[-1]), "bad_rows": float(self.bad)}
        if self.skipped:
            values["skipped_steps"] = float(self.skipped)
        if self.steps:
            values["gradient_norm"] = self.norm / self.steps
        if count.sum() > 0:
            values["loss"] = float(loss.sum() / count.sum())
        if every[-2] > 0:
            values["target_kl"] = float(every[-3] / every[-2])
        for d in range(self._depths):
            if count[d] > 0:
                for name, sums in (("loss", loss), ("accuracy", correct), ("alpha", alpha)):
                    values[f"{name}/{d + 1}"] = float(sums[d] / count[d])
        self._clear()
        return values
