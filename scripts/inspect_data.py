"""`headstart inspect`: what a set of conversations becomes as training data, and what of it is supervised.

The file is not called inspect.py: run by its path, that would stand before the standard library's module of this name.
"""

import contextlib
import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from headstart.train.conversations import Conversation, Report
    from headstart.train.masking import Masked

OPEN, CLOSE = "⟦", "⟧"  # around supervised tokens where there is no colour
SUPERVISED = ("black on green", "black on bright_green")  # in turn, so that the borders of tokens show
OTHER = ("dim", "dim underline")


def inspect(
    data: Annotated[list[str], typer.Argument(help="JSONL, folder of `distill`, or data set NAME[:CONFIG][:SPLIT].")],
    target: Annotated[
        str | None, typer.Option(help="Whose tokenizer; default: the target that wrote the data.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Conversations to pass over before.")] = 0,
    max_length: Annotated[int | None, typer.Option(help="Tokens a row, as a recipe's data.max_length.")] = None,
    train_on: Annotated[str, typer.Option(help="assistant, or all: as a recipe's data.train_on.")] = "assistant",
    template_kwargs: Annotated[str, typer.Option(help='JSON for the template: {"enable_thinking": false}.')] = "{}",
    tokens: Annotated[bool, typer.Option("--tokens", help="A line a token: place, id, supervised, text.")] = False,
) -> None:
    """Show rows of DATA as the target's tokens, those supervised in colour, and a summary of the set."""
    from headstart.infer.embedded import load_tokenizer
    from headstart.scripts.distill import json_object
    from headstart.train.conversations import load_conversations
    from headstart.train.masking import encode

    if train_on not in ("assistant", "all"):
        raise typer.BadParameter(f"{train_on!r}; expected assistant or all", param_hint="--train-on")
    console = Console(highlight=False)
    sources = list(_provenance(data))
    target = target or next((told["target"] for told in sources), None)
    if target is None:
        raise typer.BadParameter("nothing beside the data names its target; say whose tokenizer", param_hint="--target")
    conversations, read = load_conversations(data)
    if not conversations:
        raise ValueError(f"{', '.join(data)}: no conversation to look at:\n{read}")
    try:
        tokenizer = load_tokenizer(target)
    except (ValueError, OSError) as error:
        raise ValueError(f"no tokenizer for the target {target!r}, say where it is with --target: {error}") from error
    arguments = json_object(template_kwargs, "--template-kwargs")
    options: dict[str, Any] = {"max_length": max_length, "train_on": train_on, "template_kwargs": arguments}
    masked, made = encode(conversations, tokenizer, **options)
    for conversation in islice(conversations, first, None):
        if rows > 0:
            with contextlib.suppress(ValueError):  # a row that is skipped stands in the summary
                _show(console, conversation, encode([conversation], tokenizer, **options)[0][0], tokenizer, tokens)
                rows -= 1
    for line in summary(sources, read, made, masked):
        console.print(line, soft_wrap=True, markup=False)


def summary(sources: list[dict[str, Any]], read: "Report", made: "Report", rows: "list[Masked]") -> Iterator[str]:
    """Lines on a whole set: rows, tokens, supervised share, what was cut or skipped and why, what wrote it."""
    lengths = sorted(len(row.ids) for row in rows)
    supervised = sum(sum(row.supervised) for row in rows)
    yield f"rows read: {read}"
    yield f"rows for training: {made}"
    yield (
        f"{sum(lengths)} tokens, {supervised} of them supervised ({supervised / sum(lengths):.1%}); "
        f"a row: median {statistics.median(lengths):.0f}, longest {lengths[-1]} tokens"
    )
    for told in sources:
        sampling = told.get("sampling") or {}
        yield (
            f"written by {told.get('target')} ({told.get('answered', 'in process')}), template "
            f"{str(told.get('template_sha256'))[:8]} {told.get('template_kwargs') or {}}, temperatures "
            f"{sampling.get('temperatures')}, at most {sampling.get('max_new_tokens')} tokens, "
            f"seed {sampling.get('seed')}"
        )


def marked(row: "Masked", tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """(text, supervised) of a row, token by token; tokens that are parts of one character come as one."""
    begun = 0
    for end in range(1, len(row.ids) + 1):
        text = tokenizer.decode(row.ids[begun:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        same = end < len(row.ids) and row.supervised[end] == row.supervised[begun]
        if text.endswith("\ufffd") and same and end - begun < 4:  # no character is longer than four bytes
            continue
        yield text, row.supervised[begun]
        begun = end


def _show(console: Console, conversation: "Conversation", row: "Masked", tokenizer: Any, by_token: bool) -> None:
    count = f"{len(row.ids)} tokens, {sum(row.supervised)} supervised"
    console.print(Text(f"{conversation.id}: {count}", "bold"), soft_wrap=True)
    if by_token:
        for place, (token, on) in enumerate(zip(row.ids, row.supervised, strict=True)):
            text = repr(tokenizer.decode([token], clean_up_tokenization_spaces=False))
            line = f"{place:>6} {token:>7} {'+' if on else ' '} {text}"
            console.print(Text(line, SUPERVISED[0] if on else ""), soft_wrap=True)
    elif console.is_terminal:
        shown = Text()
        for index, (text, on) in enumerate(marked(row, tokenizer)):
            shown.append(text, (SUPERVISED if on else OTHER)[index % 2])
        console.print(shown)
    else:
        console.print(plain_text(row, tokenizer), soft_wrap=True, markup=False)


def plain_text(row: "Masked", tokenizer: Any) -> str:
    """The row's text, marks around each supervised run."""
    told, inside = "", False
    for text, on in marked(row, tokenizer):
        told += (OPEN if on else CLOSE) * (on != inside) + text
        inside = on
    return told + CLOSE * inside


def _provenance(data: list[str]) -> Iterator[dict[str, Any]]:
    """What `headstart distill` left beside the data."""
    from headstart.train.provenance import read_provenance

    for source in data:
        path = Path(source)
        found = (path if path.is_dir() else path.parent) / "provenance.json"
        if path.exists() and found.is_file():
            told = read_provenance(found)
            if isinstance(told.get("target"), str):  # a folder of heads has a file of this name too, of other form
                yield told
