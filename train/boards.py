"""Where a run's numbers can be looked at: Weights & Biases and TensorBoard, behind one face.

out/wandb-run       the id under which a run that goes on is found again
out/wandb/          Weights & Biases; offline, `wandb sync` sends it later: the parts of one run under one id
out/tensorboard/    TensorBoard
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headstart.train.recipe import Recipe, WandbPart

RUN = "wandb-run"


class Written(NamedTuple):
    """What a held-out prompt was answered with, in words."""

    prompt: str
    pieces: list[tuple[str, bool]]  # the answer in order; True = guessed by the heads and accepted
    accepted: float  # share of its tokens that were


class Board(Protocol):
    """What a run tells it, on the main process alone."""

    def facts(self, facts: dict[str, Any]) -> None:
        """What the run is made of, known before it starts."""

    def log(self, step: int, values: dict[str, float], drafts: Sequence[Written]) -> None:
        """Numbers after ``step`` optimizer steps, and what an evaluation wrote."""

    def heads(self, out: Path) -> None:
        """The finished heads in ``out/heads``, and the adapter beside them where there is one."""

    def close(self, *, failed: bool) -> None:
        """Nothing more comes."""


def check_boards(recipe: Recipe) -> None:
    """Raises ValueError for what a recipe asks for and is not installed, before anything is loaded."""
    asked = {"wandb": recipe.wandb is not None, "tensorboard": recipe.tensorboard}
    missing = [name for name, wanted in asked.items() if wanted and find_spec(name) is None]
    if missing:
        without = " ".join({"wandb": "wandb=null", "tensorboard": "tensorboard=false"}[name] for name in missing)
        raise ValueError(
            f"the recipe asks for {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}, or go "
            f"without ({without}); log.jsonl is always written"
        )


def open_boards(recipe: Recipe, config: dict[str, Any], out: Path, *, goes_on: bool, quiet: bool) -> list[Board]:
    """Those that ``recipe`` asks for. ``config`` is shown; ``goes_on`` where there is a checkpoint to go on from."""
    boards: list[Board] = []
    if recipe.wandb is not None:
        boards.append(WandB(recipe.wandb, config, out, goes_on=goes_on, quiet=quiet))
    if recipe.tensorboard:
        boards.append(TensorBoard(config, out))
    return boards


class WandB:
    """Weights & Biases, with "step" as an axis of the run's own: what is told again after a checkpoint is recorded
    again, where W&B's counter would drop all entries up to where the run had been."""

    def __init__(self, part: WandbPart, config: dict[str, Any], out: Path, *, goes_on: bool, quiet: bool) -> None:
        import wandb

        kept = out / RUN
        known = kept.read_text(encoding="utf-8").strip() if goes_on and kept.is_file() else None
        self._run = wandb.init(
            project=part.project,
            name=part.name,
            mode=part.mode,
            config=config,
            dir=str(out),
            id=known,
            resume="allow" if known and part.mode == "online" else None,  # offline, the id alone says which run it is
            settings=wandb.Settings(console="off", quiet=quiet),  # lines for people are no part of the record
        )
        if part.mode != "disabled":
            kept.write_text(self._run.id + "\n", encoding="utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def facts(self, facts: dict[str, Any]) -> None:
        """Into the run's config."""
        config: Any = self._run.config
        config.update(facts, allow_val_change=True)

    def log(self, step: int, values: dict[str, float], drafts: Sequence[Written]) -> None:
        """One entry; drafts as a table, accepted guesses in green."""
        import wandb

        entry: dict[str, Any] = values | {"step": step}
        if drafts:
            entry["drafts"] = wandb.Table(
                columns=["step", "prompt", "answer", "accepted"],
                data=[[step, d.prompt, wandb.Html(coloured(d), inject=False), d.accepted] for d in drafts],
            )
        self._run.log(entry)

    def heads(self, out: Path) -> None:
        """As an artifact of type "model", named after family and target."""
        import wandb

        config = json.loads((out / "heads" / "config.json").read_text(encoding="utf-8"))
        name = re.sub(r"[^\w.-]+", "-", f"{config['family']}-{config.get('target_name') or 'heads'}")
        artifact = wandb.Artifact(name, type="model", metadata={"family": config["family"]})
        for folder in (out / "heads", out / "adapter"):
            if folder.is_dir():
                artifact.add_dir(str(folder), folder.name, policy="immutable")  # where they are: no copy beside them
        self._run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        """Waits until all of it is written, and sent where W&B is online."""
        self._run.finish(exit_code=int(failed))


class TensorBoard:
    """Scalars and texts in ``out/tensorboard``; what a run tells again after a checkpoint replaces what it told."""

    def __init__(self, config: dict[str, Any], out: Path) -> None:
        self._folder, self._facts = out / "tensorboard", {"recipe": config}
        self._writer: Any = None  # made at the first entry, whose step says what is outdated

    def facts(self, facts: dict[str, Any]) -> None:
        """As text."""
        self._facts |= facts

    def log(self, step: int, values: dict[str, float], drafts: Sequence[Written]) -> None:
        """Scalars; drafts as text, accepted guesses in bold."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            for name, facts in self._facts.items():
                self._writer.add_text(name, f"```\n{json.dumps(facts, indent=1, default=str)}\n```", step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if drafts:
            shown = "\n\n".join(f"{html.escape(d.prompt)}\n\n> {marked(d)}" for d in drafts)
            self._writer.add_text("drafts", shown, step)
        self._writer.flush()

    def heads(self, out: Path) -> None:
        """TensorBoard keeps no files: where they are."""
        if self._writer is not None:
            self._writer.add_text("heads", str(out / "heads"))

    def close(self, *, failed: bool) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()


def coloured(draft: Written) -> str:
    """HTML of an answer, accepted guesses in green."""
    parts = (
        f'<span style="color:green">{html.escape(text)}</span>' if guessed else html.escape(text)
        for text, guessed in merged(draft)
    )
    return f'<div style="white-space:pre-wrap">{"".join(parts)}</div>'


def marked(draft: Written) -> str:
    """Markdown of an answer on one line, accepted guesses in bold."""
    lines = ((re.sub(r"([\\`*_<>|#])", r"\\\1", text).replace("\n", "↵"), guessed) for text, guessed in merged(draft))
    return "".join(f"<b>{text}</b>" if guessed else text for text, guessed in lines)


def merged(draft: Written) -> list[tuple[str, bool]]:
    """The pieces, neighbours of one kind together."""
    runs: list[tuple[str, bool]] = []
    for text, guessed in draft.pieces:
        if runs and runs[-1][1] == guessed:
            runs[-1] = (runs[-1][0] + text, guessed)
        else:
            runs.append((text, guessed))
    return runs
