"""Where a run's numbers go: a progress bar or plain lines, out/log.jsonl and out/drafts.jsonl always, Weights & Biases
and TensorBoard when asked for (boards.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headstart.train.boards import Board, Written, merged, open_boards
from headstart.train.evaluate import Draft
from headstart.train.recipe import Recipe
from headstart.train.redact import redacted

LOG, DRAFTS = "log.jsonl", "drafts.jsonl"


class Tracker:
    """Speaks on the main process only; elsewhere every call is silent. Secrets are told to nobody (redact.py)."""

    def __init__(self, recipe: Recipe, out: Path, tokenizer: Any, *, main: bool) -> None:
        from headstart.train.checkpoint import complete

        self._main, self._tokenizer = main, tokenizer
        self._console = Console(stderr=True, quiet=not main, soft_wrap=True)
        self._files = {name: (out / name).open("a", encoding="utf-8") for name in (LOG, DRAFTS) if main}
        self._bar: Progress | None = None
        self._task: Any = None
        self._shown: dict[str, str] = {}  # beside the bar
        self._began, self._told, self._evaluated = monotonic(), monotonic(), 0.0
        self._drafts: list[Written] = []
        self._boards: list[Board] = []
        if main:
            goes_on, quiet = recipe.resume and bool(complete(out)), not self._console.is_terminal
            config = redacted(recipe.model_dump(mode="json"))
            self._boards = open_boards(recipe, config, out, goes_on=goes_on, quiet=quiet)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        for board in self._boards:
            board.close(failed=error is not None)
        for file in self._files.values():
            file.close()

    def say(self, text: str) -> None:
        """A line for people."""
        self._console.print(text, highlight=False, markup=False)

    def facts(self, **facts: Any) -> None:
        """What the run is made of, by name: plain mappings and values."""
        for board in self._boards:
            board.facts(redacted(facts))

    def begin(self, steps: int) -> None:
        """The loop is about to start; a bar appears where stderr is a terminal."""
        self._began = self._told = monotonic()
        if self._main and self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            beside = TextColumn("{task.description}")
            self._bar = Progress(TextColumn("training"), *columns, beside, console=self._console)
            self._task = self._bar.add_task("", total=steps)
            self._bar.start()

    def wrote(self, drafts: Sequence[Draft]) -> None:
        """What an evaluation wrote; it goes out with the evaluation's numbers."""
        self._drafts = [in_words(draft, self._tokenizer) for draft in drafts] if self._main else []

    def tell(self, progress: Any) -> None:
        """Numbers of one step or evaluation: printed, appended to log.jsonl, and shown on the boards."""
        if not self._main:
            return
        now = monotonic()
        values = dict(progress.values)
        if "tokens" in values:
            values["tokens_per_second"] = values["tokens"] / max(now - self._told, 1e-9)
            values |= peak_memory()
        if "evaluation_seconds" in values:
            self._evaluated += values["evaluation_seconds"]
            values["evaluation_share"] = self._evaluated / max(now - self._began, 1e-9)
        self._told = now
        drafts, self._drafts = self._drafts, []
        self._append(LOG, {"step": progress.step, "seconds": round(now - self._began, 3)} | values)
        for draft in drafts:
            told = {"prompt": draft.prompt, "accepted": round(draft.accepted, 4), "pieces": merged(draft)}
            self._append(DRAFTS, {"step": progress.step} | told)
        for board in self._boards:
            board.log(progress.step, values, drafts)
        if self._bar is not None:
            beside = {"loss": "loss {:.3f}", "tokens_per_pass": "{:.2f} tokens per pass", "lr": "lr {:.1e}"}
            self._shown |= {name: form.format(values[name]) for name, form in beside.items() if name in values}
            self._bar.update(self._task, completed=progress.step, description="  ".join(self._shown.values()))
        self.say(describe(progress.step, values))

    def heads(self, out: Path) -> None:
        """The finished heads in ``out/heads``, and the adapter beside them where there is one."""
        for board in self._boards:
            board.heads(out)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(line) + "\n")
        self._files[name].flush()


def in_words(draft: Draft, tokenizer: Any) -> Written:
    """Text piece by piece, each with whether it was guessed. A character that several tokens spell is not torn apart:
    one guess among them counts."""
    pieces, done, first = list[tuple[str, bool]](), "", 0
    for end in range(1, len(draft.tokens) + 1):
        text = tokenizer.decode(draft.tokens[:end], clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and end < len(draft.tokens):
            continue
        pieces.append((text[len(done) :], any(draft.guessed[first:end])))
        done, first = text, end
    prompt = tokenizer.decode(draft.prompt, clean_up_tokenization_spaces=False)
    return Written(prompt, pieces, sum(draft.guessed) / max(1, len(draft.guessed)))


def peak_memory() -> dict[str, float]:
    """The most that was in use so far, in GB: on the accelerator where there is one, else by this process."""
    if torch.cuda.is_available():
        return {"memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_gb": peak * (1 if sys.platform == "darwin" else 1024) / 1e9}


def describe(step: int, values: dict[str, float]) -> str:
    """One line for people: a logged step, or an evaluation."""
    return "  ".join([f"step {step:>5}", *_training(values), *_evaluation(values)])


def _training(values: dict[str, float]) -> Iterator[str]:
    if "loss" in values:
        yield f"loss {values['loss']:.3f}"
        yield "accuracy " + _each(values, "accuracy/", ".3f")
        yield "alpha " + _each(values, "alpha/", ".3f")
    if "target_kl" in values:
        yield f"target KL {values['target_kl']:.4f}"
    if "lr" in values:
        yield f"lr {values['lr']:.2e}"
    if "tokens_per_second" in values:
        yield f"{values['tokens_per_second']:.0f} tokens/s"
    if values.get("skipped_steps"):
        yield f"{values['skipped_steps']:.0f} steps skipped"
    if values.get("bad_rows"):
        yield f"{values['bad_rows']:.0f} rows with NaN left out"


def _evaluation(values: dict[str, float]) -> Iterator[str]:
    if "tokens_per_pass" in values:
        yield f"tokens per pass {values['tokens_per_pass']:.3f}"
        yield "accepted by depth " + _each(values, "accepted/", ".2f")
        yield f"looping {values['looping']:.0%}"
    if "validation/chain" in values:
        yield f"held-out answers: accuracy {_each(values, 'validation/accuracy/', '.3f')}"
        yield f"alpha {_each(values, 'validation/alpha/', '.3f')}"
        yield f"chain {values['validation/chain']:.3f}"
    if "target_perplexity" in values:
        yield f"target perplexity {values['target_perplexity']:.3f}"
    if "evaluation_seconds" in values:
        yield f"({values['evaluation_seconds']:.1f} s, evaluations {values['evaluation_share']:.0%} of the time)"


def _each(values: dict[str, float], prefix: str, form: str) -> str:
    """The numbers under a prefix, in their order."""
    return " ".join(f"{v:{form}}" for name, v in values.items() if name.startswith(prefix))
