"""`headstart distill`: let a target answer prompts; its answers are what heads are trained on."""

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from headstart.train.conversations import Conversation
    from headstart.train.distill import Progress as Callback

DTYPES = ("auto", "bfloat16", "float16", "float32")


def distill(
    target: Annotated[str, typer.Option(help="smollm2 (embedded), a Hub id or a model folder.")],
    prompts: Annotated[list[Path], typer.Option(help="JSON Lines files or folders; repeat for more.")],
    out: Annotated[Path, typer.Option(help="Folder for the answers; one that holds answers of ours is carried on.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Prompts answered at once.")] = 32,
    temperature: Annotated[list[float], typer.Option(help="Each prompt gets one of these; repeat.")] = [0.0, 0.8],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Answer this many of the prompts, picked by the seed.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Start no further batch after this time.")] = None,
    seed: Annotated[int, typer.Option(help="Picks prompts, temperatures and samples.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; on a CPU float32 is often the fastest.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
    drop_loops: Annotated[bool, typer.Option(help="Leave out answers that end in a repeated phrase.")] = False,
    template_kwargs: Annotated[
        str, typer.Option(help='JSON for the chat template, as {"enable_thinking": false}.')
    ] = "{}",
) -> None:
    """Let the target answer prompts, into OUT/answers.jsonl; run it again to carry on."""
    import torch

    from headstart.infer.embedded import load_target
    from headstart.train.conversations import load_conversations
    from headstart.train.distill import distill as answer_prompts

    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    rows, report = load_conversations(prompts, trainable=False)
    typer.echo(f"prompts: {report}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(target, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
    with _Shown() as shown:
        report = answer_prompts(
            model,
            tokenizer,
            pick(rows, limit, seed),
            out,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperatures=temperature,
            seed=seed,
            seconds=None if minutes is None else minutes * 60,
            drop_loops=drop_loops,
            target_id=None if Path(target).exists() else target,
            template_kwargs=json.loads(template_kwargs),
            progress=shown,
        )
    typer.echo(f"answers in {out}: {report}")


def pick(rows: "list[Conversation]", limit: int | None, seed: int) -> "list[Conversation]":
    """`limit` rows by a hash of (seed, id): out of all files alike, whatever the order they were given in."""
    if limit is None or limit >= len(rows):
        return rows
    return sorted(rows, key=lambda row: hashlib.sha256(f"{seed}\n{row.id}".encode()).digest())[:limit]


class _Shown:
    """Progress as a bar on a terminal, as plain lines elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console) if console.is_terminal else None
        self.task = self.bar.add_task("answering", total=None) if self.bar else None
        self.began = time.monotonic()

    def __enter__(self) -> "Callback":
        if self.bar:
            self.bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def _show(self, done: int, total: int, tokens: int) -> None:
        rate = tokens / max(time.monotonic() - self.began, 1e-9)
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=done, total=total, description=f"answering, {rate:.0f} tokens/s")
        else:
            typer.echo(f"{done}/{total} prompts, {rate:.0f} tokens/s")
