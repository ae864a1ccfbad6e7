"""Where a run's numbers go: a progress bar or plain lines, ``log.jsonl`` always, Weights & Biases when asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headstart.train.recipe import Recipe


class Tracker:
    """Speaks on the main process only; elsewhere every call is silent."""

    def __init__(self, recipe: Recipe, out: Path, *, main: bool) -> None:
        self._main, self._recipe = main, recipe
        self._console = Console(stderr=True, quiet=not main, soft_wrap=True)
        self._log = (out / "log.jsonl").open("a", encoding="utf-8") if main else None
        self._bar: Progress | None = None
        self._task: Any = None
        self._run: Any = None
        self._began, self._told, self._tokens = monotonic(), monotonic(), 0.0
        if main and recipe.wandb is not None:
            import wandb

            part = recipe.wandb
            self._run = wandb.init(
                project=part.project, name=part.name, mode=part.mode, config=recipe.model_dump(), dir=str(out)
            )

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)
        if self._log is not None:
            self._log.close()

    def say(self, text: str) -> None:
        """A line for people."""
        self._console.print(text, highlight=False, markup=False)

    def begin(self, steps: int) -> None:
        """The loop is about to start; a bar appears where stderr is a terminal."""
        self._began = self._told = monotonic()
        if self._main and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=steps)
            self._bar.start()

    def tell(self, progress: Any) -> None:
        """Numbers of one step: printed, appended to log.jsonl, sent to W&B under the step they belong to."""
        if not self._main:
            return
        now = monotonic()
        values = dict(progress.values)
        if "tokens" in values:
            values["tokens_per_second"] = values["tokens"] / max(now - self._told, 1e-9)
        self._told = now
        line = {"step": progress.step, "seconds": round(now - self._began, 3)} | values
        assert self._log is not None
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        if self._run is not None:
            self._run.log(values, step=progress.step, commit=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.step)
        self.say(describe(progress.step, values))


def describe(step: int, values: dict[str, float]) -> str:
    """One line for people: an evaluation, or a logged step."""
    if "tokens_per_pass" in values:
        accepted = " ".join(f"{v:.2f}" for k, v in values.items() if k.startswith("accepted/"))
        tau, looping = values["tokens_per_pass"], values["looping"]
        return f"step {step:>5}  tokens per pass {tau:.3f}  accepted by depth {accepted}  looping {looping:.0%}"
    parts = [f"step {step:>5}"]
    if "loss" in values:
        parts.append(f"loss {values['loss']:.3f}")
        parts.append("accuracy " + " ".join(f"{v:.3f}" for k, v in values.items() if k.startswith("accuracy/")))
    parts.append(f"lr {values.get('lr', 0.0):.2e}")
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:.0f} tokens/s")
    if values.get("skipped_steps"):
        parts.append(f"{values['skipped_steps']:.0f} steps skipped")
    if values.get("bad_rows"):
        parts.append(f"{values['bad_rows']:.0f} rows with NaN left out")
    return "  ".join(parts)
