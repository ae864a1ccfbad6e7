"""The numbers of a run, and which of them change from step to step.

Legend: K depths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headstart.train.joint import RISES


@dataclass(frozen=True)
class Plan:
    """The numbers of a run; all intervals count optimizer steps."""

    steps: int
    lr: float
    warmup: float
    schedule: str
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    accumulation: int  # micro-batches a step on each rank
    divergence: str
    weights: tuple[float, ...]  # [K] of the depths
    log_every: int
    evaluate_every: int  # 0 = only at the end
    save_every: int  # 0 = only at the end
    keep: int
    window: int = 0  # micro-batches a step over all ranks, at most accumulation * ranks; 0 = as many
    fit_batches: int = 0  # micro-batches whose features give the heads a start in closed form
    remember: bool = False  # keep the target's features in memory for later epochs
    depths: tuple[tuple[float, int], ...] = ((0.0, 1 << 10),)  # from which share of the run how many are unrolled
    regression: float = 0.0
    scale: float = 1.0  # of the weights, beside the loss of a target that learns too (Medusa-2's c)
    rise: str = "constant"  # key of RISES: how that scale is reached
    adapter_lr: float = 0.0  # of what learns on the target
    recompute: bool = False  # activation checkpointing of the heads
    backend: str = ""  # of torch.compile for the heads' loss, "" = eager


def learning_rate(step: int, plan: Plan) -> float:
    """The rate of optimizer step ``step`` (0-based): linear warm-up, then the schedule down to zero at the end."""
    warm = round(plan.warmup * plan.steps)
    if step < warm:
        return plan.lr * (step + 1) / warm
    left = (plan.steps - step) / max(1, plan.steps - warm)
    fall = {"cosine": 0.5 * (1 - math.cos(math.pi * left)), "linear": left, "constant": 1.0}
    return plan.lr * fall[plan.schedule]


def weights_at(step: int, plan: Plan) -> tuple[float, ...]:
    """Weights of the depths that optimizer step ``step`` (0-based) unrolls."""
    most = [depths for share, depths in plan.depths if step >= share * plan.steps][-1]
    scale = plan.scale * RISES[plan.rise]((step + 1) / plan.steps)
    return tuple(scale * weight for weight in plan.weights[:most])
