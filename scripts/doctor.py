"""`headstart doctor`: is what was trained what is decoded, and are labels and masks where they belong?"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headstart.scripts.generate import DTYPES

if TYPE_CHECKING:
    from headstart.heads import DraftHeads
    from headstart.train.conversations import Messages
    from headstart.train.doctor import Check, Examination, Label

WIDTH = 160  # characters of a line where there is no terminal
SHOWN = 14  # characters of a token
CAPTION = (
    "slot: a position whose features the heads read. By depth: the label they are taught there, in brackets where it "
    "does not count; then the first guess, + where the target would say it, - where not."
)


def doctor(
    target: Annotated[str, typer.Option(help="smollm2 (embedded), a Hub id or a model folder.")],
    heads: Annotated[str, typer.Option(help="Folder or Hub id of the heads.")],
    conversation: Annotated[
        Path | None,
        typer.Option(help="JSON Lines file whose first row is looked at; default: one the target answers itself."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens of its last answer to look at.")] = 48,
    dtype: Annotated[str, typer.Option(help=f"Weights: {', '.join(DTYPES)}; float32 finds most.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
) -> None:
    """Check HEADS against TARGET: parity of training and decoding, exactness, leaks, labels. Exit status 1 if any
    failed."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    messages = None if conversation is None else first_conversation(conversation)
    import torch
    from transformers.utils import logging as transformers_logging

    from headstart.infer.embedded import load_target
    from headstart.train.doctor import Check, examine

    transformers_logging.disable_progress_bar()
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    try:
        loaded = load(heads)
    except ValueError as error:  # a folder of heads that is not whole is what the doctor is asked about
        _show_check(console, Check("heads", False, str(error)))
        raise typer.Exit(1) from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(target, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
    _place(loaded, model)
    found = examine(model, tokenizer, loaded, messages, tokens=tokens)
    for check in found.checks:
        _show_check(console, check)
    if found.slots:
        console.print(_table(found, tokenizer))
    if not found.ok:
        raise typer.Exit(1)


def first_conversation(file: Path) -> "Messages":
    """The first usable row: one with an answer, or else one for the target to answer. Raises ValueError for none."""
    from headstart.train.conversations import load_conversations

    rows, report = load_conversations([file])
    rows = rows or load_conversations([file], trainable=False)[0]
    if not rows:
        raise ValueError(f"{file} holds no conversation that can be looked at; expected one with a user turn: {report}")
    return rows[0].messages


def load(source: str) -> "DraftHeads":
    """Raises OSError where nothing is there to load, ValueError where what is there is not whole."""
    from headstart.heads import load_heads

    with _reading(source):
        return load_heads(source)


def look_at(source: str) -> None:
    """As ``load``, of the config alone: a wrong name shows before a large target is loaded."""
    from headstart.heads import HeadsConfig

    with _reading(source):
        HeadsConfig.from_pretrained(source).check_format()


@contextmanager
def _reading(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot load heads from '{source}': expected a folder with config.json and model.safetensors, such as the "
            f"folder heads that training writes, or a Hub id that can be reached. transformers says: {error}"
        ) from error


def _place(heads: "DraftHeads", model: Any) -> None:
    """Heads as the decoder has them: in the target's dtype, on its output's device."""
    import torch

    from headstart.heads import Tie
    from headstart.infer.target import compute_dtype

    torch.nn.Module.to(heads, device=Tie.of(model).weight.device, dtype=compute_dtype(model))


def _show_check(console: Console, check: "Check") -> None:
    """One line, and one for each warning."""
    line = Text("ok      " if check.ok else "FAILED  ", style="green" if check.ok else "bold red")
    console.print(line.append(f"{check.name:<11} {check.figure}", style="default"), soft_wrap=True)
    for warning in check.warnings:
        console.print(Text("warning ", style="yellow").append(f"{check.name:<11} {warning}", "default"), soft_wrap=True)


def _table(found: "Examination", tokenizer: Any) -> Table:
    """The slots around the answer's first tokens: what each is taught, and what it guesses."""
    table = Table(title="labels and masks around the answer's first tokens", caption=CAPTION, caption_justify="left")
    depths = len(found.slots[0].labels)
    for heading in ("slot", "token", "supervised", "next", "target says"):
        table.add_column(heading, justify="right" if heading == "slot" else "left", no_wrap=True)
    for depth in range(depths):
        table.add_column(f"depth {depth + 1}: slot + {depth + 2}")
    for slot in found.slots:
        words = [Text(_word(tokenizer, token)) for token in (slot.token, slot.following, slot.best)]
        labels = [_label(tokenizer, label) for label in slot.labels]
        table.add_row(str(slot.slot), words[0], "yes" if slot.supervised else "no", *words[1:], *labels)
    return table


def _label(tokenizer: Any, label: "Label") -> Text:
    if label.token is None:
        return Text("")
    word = _word(tokenizer, label.token)
    if label.guess is None:
        return Text(f"({word})", style="dim")
    guess = Text(f"{'+' if label.right else '-'}{_word(tokenizer, label.guess)}", "green" if label.right else "red")
    return Text(f"{word} ").append_text(guess)


def _word(tokenizer: Any, token: int) -> str:
    """A token as text in quotes, line ends and the like escaped."""
    text = repr(tokenizer.decode([token]))
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + ".."
