"""The training loop on Accelerate; the second file to read.

A step: draw a whole accumulation window -> the frozen target's features -> count what is supervised, over all ranks,
and decide together whether the window is trained on -> heads(batch, tie) is the loss -> backward -> clip -> step.

Legend: B rows, T tokens, K depths.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from headstart.heads import Batch, DraftHeads, Tie
from headstart.train import checkpoint
from headstart.train.batches import Stream
from headstart.train.features import Features, Online
from headstart.train.joint import RISES, Joint, groups, heads_of, source

logger = logging.getLogger(__name__)

BAD_LIMIT = 20  # windows in a row in which most rows, or all labels, were missing


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
    accumulation: int
    divergence: str
    weights: tuple[float, ...]  # [K] of the depths
    log_every: int
    evaluate_every: int  # 0 = only at the end
    save_every: int  # 0 = only at the end
    keep: int
    fit_batches: int = 0  # micro-batches whose features give the heads a start in closed form
    remember: bool = False  # keep the target's features in memory for later epochs
    depths: tuple[tuple[float, int], ...] = ((0.0, 1 << 10),)  # from which share of the run how many are unrolled
    regression: float = 0.0
    scale: float = 1.0  # of the weights, beside the loss of a target that learns too (Medusa-2's c)
    rise: str = "constant"  # key of RISES: how that scale is reached
    adapter_lr: float = 0.0  # of what learns on the target


class Progress(NamedTuple):
    """What is told after a step: ``values`` are plain numbers, averaged since the last time."""

    step: int
    values: dict[str, float]


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


def train(
    accelerator: Accelerator,
    target: Any,
    heads: DraftHeads | Joint,
    stream: Stream,
    plan: Plan,
    out: Path,
    digest: str,
    *,
    evaluate: Callable[[DraftHeads], dict[str, float]] | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
    resume: bool = True,
    cached: Features | None = None,
) -> DraftHeads | Joint:
    """Trains ``heads`` in place on the frozen ``target`` and returns them, on the main process also saved.

    Where they are Joint, ``target`` is the one inside, and what is on it learns with them.

    ``digest`` names recipe and data: a checkpoint of another one in ``out`` is an error. ``evaluate`` runs on the main
    process; ``tell`` hears of every logged step and evaluation. ``cached`` features are taken where they are given.
    """
    refuse_unknown_engines(accelerator, plan)
    tie, features = Tie.of(target), cached or source(heads, target, plan.remember)
    parameters = groups(heads, plan.adapter_lr / plan.lr)
    optimizer = torch.optim.AdamW(parameters, lr=plan.lr, betas=plan.betas, weight_decay=plan.weight_decay)
    facts = {"digest": digest, "window": plan.accumulation * accelerator.num_processes}
    first = checkpoint.restore(out, facts, heads, optimizer, resume)
    if first == 0 and plan.fit_batches:
        # from the end of the run: the curve of the loss then begins on rows that the start has not seen
        end = plan.steps * facts["window"]
        _fit(heads_of(heads), (features(stream[i]).batch for i in range(max(0, end - plan.fit_batches), end)), tie)
    model, optimizer = accelerator.prepare(heads, optimizer)
    meter, poor, trained = Meter(len(plan.weights)), 0, first

    def measure(step: int) -> None:
        if evaluate is not None and accelerator.is_main_process:
            model.eval()
            tell(Progress(step, evaluate(heads_of(accelerator.unwrap_model(model)))))
        accelerator.wait_for_everyone()

    if first == 0 and plan.evaluate_every:
        measure(0)
    model.train()
    for step in range(first, plan.steps):
        # a whole window, and what there is to learn in it on all ranks: every rank decides alike
        places = _micro_batches(step, plan, accelerator)
        window = [features(stream[i]) for i in places]
        weights = weights_at(step, plan)
        count, bad, rows = _agree(window, heads, len(weights), accelerator)
        meter.bad += bad
        poor = poor + 1 if count == 0 or 2 * bad > rows else 0
        _give_up_after(poor, bad)

        # forward is the loss, backward, clip, step
        rate = learning_rate(step, plan)
        if count and _descend(accelerator, model, optimizer, tie, window, plan, weights, count, rate, meter):
            trained += 1
        else:
            meter.skipped += 1

        done = step + 1
        last = done == plan.steps
        if done % plan.log_every == 0 or last:
            tell(Progress(done, meter.read(accelerator) | {"lr": rate}))
        if last and trained == 0:
            raise ValueError(f"none of the {plan.steps} steps could be trained on: the heads would be saved untrained")
        if last or (plan.evaluate_every and done % plan.evaluate_every == 0):
            measure(done)
            model.train()
        if last or (plan.save_every and done % plan.save_every == 0):
            if accelerator.is_main_process:
                state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
                checkpoint.save(out, done, accelerator.unwrap_model(model), state, facts, plan.keep)
            accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model)  # type: ignore[no-any-return]


def _descend(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    tie: Tie,
    window: Sequence[Online],
    plan: Plan,
    weights: tuple[float, ...],
    count: int,
    rate: float,
    meter: Meter,
) -> bool:
    """One optimizer step over a window whose sums are divided by ``count``, the supervised predictions of all ranks.

    False where the gradient was not finite: nothing is changed then, on any rank.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)
    # DDP averages over ranks and accelerate over micro-batches; both are taken back, so that sums stay sums
    scale = accelerator.num_processes * plan.accumulation / count
    finite = True
    for part in window:
        with accelerator.accumulate(model):
            losses = model(part.batch, tie, weights=weights, divergence=plan.divergence, regression=plan.regression)
            accelerator.backward(losses.total * scale)
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), plan.clip))
                finite = math.isfinite(norm)
                meter.norm, meter.steps = meter.norm + (norm if finite else 0.0), meter.steps + finite
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        meter.add(losses, part)
    return finite


def refuse_unknown_engines(accelerator: Accelerator, plan: Plan) -> None:
    """Raises ValueError for launchers this loop does not save or accumulate correctly under."""
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
        raise ValueError(f"training under {accelerator.distributed_type} is not available yet; use one process or DDP")
    if accelerator.gradient_accumulation_steps != plan.accumulation:
        raise ValueError(
            f"accelerate accumulates {accelerator.gradient_accumulation_steps} batches (its environment or config says "
            f"so), the recipe {plan.accumulation}: set them alike"
        )


class Meter:
    """Sums since the last report, on this rank."""

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._clear()

    def _clear(self) -> None:
        self.sums = torch.zeros(4, self._depths, dtype=torch.float64)
        self.target = torch.zeros(2, dtype=torch.float64)
        self.tokens = self.norm = 0.0
        self.steps = self.bad = self.skipped = 0

    def add(self, losses: Any, part: Online) -> None:
        """One micro-batch."""
        rows = (losses.loss, losses.correct, losses.alpha, losses.count)
        self.sums[:, : len(losses.count)] += torch.stack([x.detach().double().cpu() for x in rows])
        if losses.target is not None:
            self.target += losses.target.double().cpu()
        self.tokens += float((part.batch.document >= 0).sum())

    def read(self, accelerator: Accelerator) -> dict[str, float]:
        """Averages over all ranks since the last call; a depth without predictions is left out."""
        told = torch.tensor([self.tokens, self.bad], dtype=torch.float64)
        own = torch.cat([self.sums.flatten(), self.target, told])
        every = accelerator.reduce(own.float().to(accelerator.device), "sum").cpu()
        loss, correct, alpha, count = every[:-4].view(4, self._depths)
        values = {"tokens": float(every[-2]), "bad_rows": float(every[-1])}
        if self.skipped:
            values["skipped_steps"] = float(self.skipped)
        if self.steps:
            values["gradient_norm"] = self.norm / self.steps
        if count.sum() > 0:
            values["loss"] = float(loss.sum() / count.sum())
        if every[-3] > 0:
            values["target_kl"] = float(every[-4] / every[-3])
        for d in range(self._depths):
            if count[d] > 0:
                for name, sums in (("loss", loss), ("accuracy", correct), ("alpha", alpha)):
                    values[f"{name}/{d + 1}"] = float(sums[d] / count[d])
        self._clear()
        return values


def _micro_batches(step: int, plan: Plan, accelerator: Accelerator) -> list[int]:
    """Which of the endless stream's micro-batches this rank takes in optimizer step ``step``."""
    world = accelerator.num_processes
    first = step * plan.accumulation * world
    return [first + i * world + accelerator.process_index for i in range(plan.accumulation)]


def _agree(
    window: Sequence[Online], heads: DraftHeads | Joint, depths: int, accelerator: Accelerator
) -> tuple[int, int, int]:
    """Supervised predictions, rows left out and rows in all in this window over all ranks."""
    counts = [int(heads.count(part.batch.supervised, part.batch.document, depths).sum()) for part in window]
    bad = [row for part in window for row in part.bad]
    if bad:
        logger.warning("rows %s of the training set are left out: their hidden states are not finite", bad)
    rows = sum(part.batch.tokens.shape[0] for part in window)
    every: Tensor = accelerator.reduce(torch.tensor([sum(counts), len(bad), rows], device=accelerator.device), "sum")
    return int(every[0]), int(every[1]), int(every[2])


def _give_up_after(poor: int, bad: int) -> None:
    if poor >= BAD_LIMIT:
        why = "most of the target's hidden states are NaN or infinite" if bad else "no token in them is supervised"
        raise ValueError(
            f"{poor} windows in a row taught little or nothing: {why}. "
            "Try dtype=float32 or bfloat16 for the target, or look at the data with its mask"
        )


def _fit(heads: DraftHeads, batches: Iterable[Batch], tie: Tie) -> None:
    """Lets the family solve for a better start; every rank looks at the same batches and so finds the same one."""
    if not heads.fit(batches, tie):
        raise ValueError(
            f"{heads.config.family} heads made like this have no start in closed form (Medusa's needs a draft "
            "vocabulary, EAGLE-3's residual_last and step_path); set optim.fit_batches=0"
        )
