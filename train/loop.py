"""The training loop on Accelerate; the second file to read.

A step: draw a whole accumulation window -> the frozen target's features -> count what is supervised, over all ranks,
and decide together whether the window is trained on -> heads(batch, tie) is the loss -> backward -> clip -> step.

Legend: B rows, T tokens, K depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.heads import DraftHeads, Tie
from headstart.train import checkpoint
from headstart.train.batches import Stream
from headstart.train.evaluate import Evaluation
from headstart.train.features import Online, online

BAD_LIMIT = 20  # windows in a row that could not be trained on


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


def train(
    accelerator: Accelerator,
    target: Any,
    heads: DraftHeads,
    stream: Stream,
    plan: Plan,
    out: Path,
    digest: str,
    *,
    evaluate: Callable[[DraftHeads], Evaluation] | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
    resume: bool = True,
) -> DraftHeads:
    """Trains ``heads`` in place on the frozen ``target`` and returns them, on the main process also saved.

    ``digest`` names recipe and data: a checkpoint of another one in ``out`` is an error. ``evaluate`` runs on the main
    process; ``tell`` hears of every logged step and evaluation.
    """
    tie, wants = Tie.of(target), list(heads.config.features or ())
    optimizer = torch.optim.AdamW(heads.parameters(), lr=plan.lr, betas=plan.betas, weight_decay=plan.weight_decay)
    first = _restore(out, digest, heads, optimizer) if resume else 0
    known = _fit(target, heads, stream, plan, tie) if first == 0 else {}
    model, optimizer = accelerator.prepare(heads, optimizer)
    meter = Meter(len(plan.weights))
    skipped = 0

    def save(step: int) -> None:
        if accelerator.is_main_process:
            state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
            checkpoint.save(out, step, accelerator.unwrap_model(model), state, {"digest": digest}, plan.keep)
        accelerator.wait_for_everyone()

    def measure(step: int) -> None:
        if evaluate is not None and accelerator.is_main_process:
            tell(Progress(step, _numbers(evaluate(accelerator.unwrap_model(model)))))
        accelerator.wait_for_everyone()

    if first == 0:
        measure(0)
    model.train()
    for step in range(first, plan.steps):
        # a whole window, and what there is to learn in it on all ranks
        places = _micro_batches(step, plan, accelerator)
        window = [known.pop(i) if i in known else online(target, stream[i], wants) for i in places]
        count, bad = _agree(window, heads, accelerator)
        skipped = 0 if count else skipped + 1
        meter.bad += bad
        if not count:
            _give_up_after(skipped, bad)
        else:
            # forward is the loss; sums over the window are divided by the count over all ranks
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, plan)
            for part in window:
                with accelerator.accumulate(model):
                    losses = model(part.batch, tie, weights=plan.weights, divergence=plan.divergence)
                    scale = accelerator.num_processes * plan.accumulation / count
                    accelerator.backward(losses.total * scale)
                    if accelerator.sync_gradients:
                        meter.norm += float(accelerator.clip_grad_norm_(model.parameters(), plan.clip))
                        meter.steps += 1
                    optimizer.step()
                    optimizer.zero_grad()
                meter.add(losses, part)

        done = step + 1
        last = done == plan.steps
        if done % plan.log_every == 0 or last:
            tell(Progress(done, meter.read(accelerator) | {"lr": learning_rate(step, plan)}))
        if last or (plan.evaluate_every and done % plan.evaluate_every == 0):
            measure(done)
            model.train()
        if last or (plan.save_every and done % plan.save_every == 0):
            save(done)
    return accelerator.unwrap_model(model)  # type: ignore[no-any-return]


class Meter:
    """Sums since the last report, on this rank."""

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._clear()

    def _clear(self) -> None:
        self.sums = torch.zeros(4, self._depths, dtype=torch.float64)
        self.tokens = self.norm = 0.0
        self.steps = self.bad = 0

    def add(self, losses: Any, part: Online) -> None:
        """One micro-batch."""
        rows = (losses.loss, losses.correct, losses.alpha, losses.count)
        self.sums += torch.stack([x.detach().double().cpu() for x in rows])
        self.tokens += float((part.batch.document >= 0).sum())

    def read(self, accelerator: Accelerator) -> dict[str, float]:
        """Averages over all ranks since the last call; a depth without predictions is left out."""
        own = torch.cat([self.sums.flatten(), torch.tensor([self.tokens, self.bad], dtype=torch.float64)])
        every = accelerator.reduce(own.float().to(accelerator.device), "sum").cpu()
        loss, correct, alpha, count = every[:-2].view(4, self._depths)
        values = {"tokens": float(every[-2]), "bad_rows": float(every[-1])}
        if self.steps:
            values["gradient_norm"] = self.norm / self.steps
        if count.sum() > 0:
            values["loss"] = float(loss.sum() / count.sum())
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


def _agree(window: Sequence[Online], heads: DraftHeads, accelerator: Accelerator) -> tuple[int, int]:
    """Supervised predictions and rows left out in this window over all ranks: every rank decides alike."""
    device = accelerator.device
    counts = [heads.count(part.batch.supervised, part.batch.document).sum().to(device) for part in window]
    own = torch.stack([torch.stack(counts).sum(), torch.tensor(sum(len(p.bad) for p in window), device=device)])
    both: Tensor = accelerator.reduce(own, "sum")
    return int(both[0]), int(both[1])


def _give_up_after(skipped: int, bad: int) -> None:
    if skipped >= BAD_LIMIT:
        why = "the target's hidden states hold NaN or infinity" if bad else "no token in them is supervised"
        raise ValueError(
            f"{skipped} windows in a row could not be trained on: {why}. "
            "Try dtype=float32 or bfloat16 for the target, or look at the data with its mask"
        )


def _fit(target: Any, heads: DraftHeads, stream: Stream, plan: Plan, tie: Tie) -> dict[int, Online]:
    """Lets the family solve for a better start; returns the features it took, for the steps that train on them.

    Every rank looks at the same first micro-batches and so finds the same start.
    """
    if not plan.fit_batches:
        return {}
    known = {i: online(target, stream[i], list(heads.config.features or ())) for i in range(plan.fit_batches)}
    if not heads.fit((part.batch for part in known.values()), tie):
        raise ValueError(
            f"{heads.config.family} heads have no start in closed form (Medusa has one with a draft vocabulary); "
            "set optim.fit_batches=0"
        )
    return known


def _restore(out: Path, digest: str, heads: DraftHeads, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest complete checkpoint into heads, optimizer and random state; returns the step to go on from."""
    found = checkpoint.latest(out, digest)
    if found is None:
        return 0
    saved = type(heads).from_pretrained(str(found.folder / "heads"))
    heads.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(found.state["optimizer"])
    torch.set_rng_state(found.state["rng"])
    return found.step


def _numbers(result: Evaluation) -> dict[str, float]:
    values = {"tokens_per_pass": result.tokens_per_pass, "looping": result.looping}
    return values | {f"accepted/{d + 1}": share for d, share in enumerate(result.accepted_by_depth)}
