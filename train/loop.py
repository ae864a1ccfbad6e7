"""The training loop; the second file to read.

A step: draw a whole accumulation window -> the frozen target's features -> count what is supervised, over all ranks,
and decide together whether the window is trained on -> heads(batch, tie) is the loss -> backward -> clip -> step.

Who runs it, one process or many and under which engine, is ``engine.py``; what is kept of it is ``checkpoint.py``.

Legend: B rows, T tokens, K depths.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.heads import Batch, DraftHeads, Tie
from headstart.heads.recurrent import RecurrentHeads
from headstart.train import checkpoint
from headstart.train.batches import Stream, Tokens
from headstart.train.engine import Engine, open_engine
from headstart.train.features import Features, Online
from headstart.train.joint import Joint, heads_of, source
from headstart.train.meter import Meter, Progress
from headstart.train.schedule import Plan, learning_rate, weights_at
from headstart.train.stop import Stopped, listening

logger = logging.getLogger(__name__)

BAD_LIMIT = 20  # windows in a row that taught nothing, or in which most rows were missing


class Run(NamedTuple):
    """What stays the same from the first step to the last."""

    accelerator: Accelerator
    engine: Engine
    heads: DraftHeads | Joint  # as given; an engine may have split its parameters up
    tie: Tie
    features: Callable[[Tokens], Online]
    stream: Stream
    plan: Plan
    out: Path
    facts: dict[str, Any]  # digest and window: what a checkpoint must share to go on from
    evaluate: Callable[[DraftHeads], dict[str, float]] | None
    tell: Callable[[Progress], None]


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
    """Trains ``heads`` on the frozen ``target`` and returns them: in place, or, where an engine has split them up, a
    whole copy on the main process.

    Where they are Joint, ``target`` is the one inside, and what is on it learns with them.

    ``digest`` names recipe and data: a checkpoint of another one in ``out`` is an error. ``evaluate`` runs on the main
    process; ``tell`` hears of every logged step and evaluation. ``cached`` features are taken where they are given.
    Raises Stopped where SIGTERM or SIGUSR1 came, with everything saved.
    """
    tie, features = Tie.of(target), cached or source(heads, target, plan.remember)
    facts: dict[str, Any] = {"digest": digest, "window": plan.window or plan.accumulation * accelerator.num_processes}
    found = checkpoint.restore(out, facts, heads, resume)
    first = 0 if found is None else found.step
    _refuse_scattered(first, out, accelerator)
    if first == 0 and plan.fit_batches:
        # from the end of the run: the curve of the loss then begins on rows that the start has not seen
        end = plan.steps * facts["window"]
        _fit(heads_of(heads), (features(stream[i]).batch for i in range(max(0, end - plan.fit_batches), end)), tie)
    engine = _engine(accelerator, heads, plan)
    if found is not None:
        engine.load_optimizer(found.optimizer)
        checkpoint.restore_random_state(found, accelerator.process_index, accelerator.num_processes)
    run = Run(accelerator, engine, heads, tie, features, stream, plan, out, facts, evaluate, tell)
    if first == 0 and plan.evaluate_every:
        _measure(run, 0)
    with listening() as asked:
        _steps(run, first, asked)
    return engine.whole()


def _steps(run: Run, first: int, asked: Callable[[Any], str]) -> None:
    """Optimizer steps ``first`` (0-based) to the last; ``asked`` tells of signals, on every rank alike."""
    plan, meter, poor, trained = run.plan, Meter(len(run.plan.weights)), Poor(), first
    run.engine.model.train()
    for step in range(first, plan.steps):
        # a whole window, and what there is to learn in it on all ranks: every rank decides alike
        drawn = [run.stream[i] if real else _unlabelled(run.stream[i]) for i, real in _places(step, run)]
        parts = [run.features(tokens) for tokens in drawn]
        weights, rate = weights_at(step, plan), learning_rate(step, plan)
        window = _agree(run, drawn, parts, len(weights))

        # forward is the loss, backward, clip, step
        finite = not window.labels or _descend(run, parts, weights, window.labels, rate, meter)
        meter.note(window.bad, taught=window.labels > 0 and finite)
        poor.note(window, finite)
        trained += window.labels > 0 and finite

        done = step + 1
        last, stop = done == plan.steps, asked(run.accelerator)
        if last and trained == 0:
            raise ValueError(f"none of the {plan.steps} steps could be trained on: the heads would be saved untrained")
        if done % plan.log_every == 0 or last:
            run.tell(Progress(done, meter.read(run.accelerator) | {"lr": rate}))
        found = Found()
        if last or (_due(done, plan.evaluate_every) and not stop):
            found = _measure(run, done)
        if last or stop or found.best or _due(done, plan.save_every):
            _save(run, done, found.score)
        if stop and not last:
            raise Stopped(done, stop)


def _descend(
    run: Run, parts: Sequence[Online], weights: tuple[float, ...], count: int, rate: float, meter: Meter
) -> bool:
    """One optimizer step over this rank's parts of a window, whose sums are divided by ``count``, the supervised
    predictions of all ranks.

    False where the gradient was not finite: nothing is changed then, on any rank.
    """
    plan, engine = run.plan, run.engine
    if not isinstance(heads_of(run.heads), RecurrentHeads):
        # heads of their own per depth: all of them take part in every step, as other ranks and DDP expect
        weights += (0.0,) * (len(plan.weights) - len(weights))
    scale = run.accelerator.num_processes / count  # engines average over ranks, which is taken back: sums stay sums
    for place, part in enumerate(parts):
        with engine.micro_batch(last=place + 1 == len(parts)):
            losses = engine.loss(
                part.batch, run.tie, weights=weights, divergence=plan.divergence, regression=plan.regression
            )
            engine.backward(losses.total * scale)
        meter.add(losses, part)
    norm = engine.step(rate, plan.clip)
    if math.isfinite(norm):
        meter.stepped(norm)
    return math.isfinite(norm)


class Found(NamedTuple):
    """What an evaluation showed: its score, on the main process alone, and on every rank whether it is the best yet."""

    score: float | None = None
    best: bool = False


def _measure(run: Run, step: int) -> Found:
    """Evaluates on the main process while the others wait."""
    if run.evaluate is None:
        return Found()
    run.engine.model.eval()
    whole, score, best = run.engine.whole(), None, torch.zeros(1)
    if run.accelerator.is_main_process:
        values = run.evaluate(heads_of(whole))
        run.tell(Progress(step, values))
        score = checkpoint.score(values)
        best[0] = step > 0 and checkpoint.beats_all(score, run.out)
    run.engine.model.train()
    return Found(score, bool(run.accelerator.reduce(best.to(run.accelerator.device), "sum")))


def _save(run: Run, step: int, score: float | None) -> None:
    """A checkpoint by the main process, gathered from all."""
    whole, optimizer = run.engine.whole(), run.engine.optimizer_state()
    state = {"optimizer": optimizer, "random": checkpoint.random_states()}
    if run.accelerator.is_main_process:
        checkpoint.save(run.out, step, whole, state, run.facts | {"score": score}, run.plan.keep)
    run.accelerator.wait_for_everyone()


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _engine(accelerator: Accelerator, heads: DraftHeads | Joint, plan: Plan) -> Engine:
    if plan.recompute:
        heads_of(heads).activation_checkpointing_enable()
    return open_engine(
        accelerator,
        heads,
        accumulation=plan.accumulation,
        clip=plan.clip,
        times=plan.adapter_lr / plan.lr,
        backend=plan.backend,
        lr=plan.lr,
        betas=plan.betas,
        weight_decay=plan.weight_decay,
    )


def _refuse_scattered(first: int, out: Path, accelerator: Accelerator) -> None:
    """Raises ValueError where ranks would begin at different steps: they would wait for each other forever."""
    steps = accelerator.gather(torch.tensor([first], device=accelerator.device)).tolist()
    if len(set(steps)) > 1:
        raise ValueError(
            f"processes found the checkpoints of different steps in {out} ({steps}): it must be a folder that all "
            "machines share"
        )


def _places(step: int, run: Run) -> Iterator[tuple[int, bool]]:
    """Which of the endless stream's micro-batches this rank takes in optimizer step ``step``.

    A window is dealt out to the ranks in turn. Where it does not come out even (a run that goes on with other than the
    number of processes it began with), some get one that belongs to another window, with False: no label of it counts.
    """
    window, world = run.facts["window"], run.accelerator.num_processes
    for place in range(run.accelerator.process_index, run.plan.accumulation * world, world):
        yield step * window + place, place < window


def _unlabelled(tokens: Tokens) -> Tokens:
    return tokens._replace(supervised=torch.zeros_like(tokens.supervised))


class Window(NamedTuple):
    """What there is in a window, over all ranks."""

    labels: int  # supervised predictions
    bad: int  # rows left out
    rows: int


def _agree(run: Run, drawn: Sequence[Tokens], parts: Sequence[Online], depths: int) -> Window:
    """Counted by every rank on its own share, summed over all."""
    counts = [int(run.heads.count(p.batch.supervised, p.batch.document, depths).sum()) for p in parts]
    bad = [row for part in parts for row in part.bad]
    if bad:
        logger.warning("rows %s of the training set are left out: their hidden states are not finite", bad)
    told = [sum(counts), len(bad), sum(len(tokens.rows) for tokens in drawn)]
    every: Tensor = run.accelerator.reduce(torch.tensor(told, device=run.accelerator.device), "sum")
    return Window(*map(int, every))


class Poor:
    """Windows in a row that taught nothing, or little: after BAD_LIMIT of them the run is not worth going on with."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def note(self, window: Window, finite: bool) -> None:
        """One window; ``finite`` as of its gradient. Raises ValueError at the limit."""
        if 2 * window.bad > window.rows:
            reason = "most of the target's hidden states are NaN or infinite: try dtype=float32 or bfloat16"
        elif window.labels == 0:
            reason = "no token in them is supervised: look at the data with its mask (headstart inspect)"
        elif not finite:
            reason = "the gradient is NaN or infinite: try a lower optim.lr, or optim.precision=fp32"
        else:
            self._reasons = []
            return
        self._reasons.append(reason)
        if len(self._reasons) >= BAD_LIMIT:
            most = max(set(self._reasons), key=self._reasons.count)
            raise ValueError(f"{BAD_LIMIT} windows in a row taught little or nothing. Of most of them, {most}")


def _fit(heads: DraftHeads, batches: Iterable[Batch], tie: Tie) -> None:
    """Lets the family solve for a better start; every rank looks at the same batches and so finds the same one."""
    if not heads.fit(batches, tie):
        raise ValueError(
            f"{heads.config.family} heads made like this have no start in closed form (Medusa's needs a draft "
            "vocabulary, EAGLE-3's residual_last and step_path); set optim.fit_batches=0"
        )
