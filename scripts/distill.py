"""`headstart distill`: let a target answer prompts; its answers are what heads are trained on."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from headstart.train.answers import Answerer
    from headstart.train.conversations import Conversation, Report
    from headstart.train.distill import Progress as Callback

DTYPES = ("auto", "bfloat16", "float16", "float32")
KEY = "OPENAI_API_KEY"  # read from the environment where a server wants one
AT_ONCE = 32  # prompts, in process and asked of a server
# vLLM and SGLang cut the tail of the law by the model's generation_config, llama.cpp by habits of its own, unless they
# are told not to.
WHOLE_LAW = '{"top_k": -1, "min_p": 0.0}'
PAUSE = 2.0  # seconds between two lines of progress


def distill(
    target: Annotated[str, typer.Option(help="smollm2 (embedded), a Hub id or a model folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the answers; one that holds answers of ours is carried on.")],
    prompts: Annotated[list[str], typer.Option(help="JSONL, folder, or data set NAME[:CONFIG][:SPLIT]; repeat.")] = [],  # noqa: B006
    write: Annotated[
        bool, typer.Option("--self", help="No prompts: the target writes --limit user turns too.")
    ] = False,
    server: Annotated[str | None, typer.Option(help="Let a server answer: http://HOST:PORT/v1 (vLLM, SGLang).")] = None,
    served_model: Annotated[str | None, typer.Option(help="The target's name there; default: --target.")] = None,
    server_args: Annotated[str, typer.Option(help="JSON of further fields of each request.")] = WHOLE_LAW,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = AT_ONCE,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once, in process.")] = AT_ONCE,
    temperature: Annotated[list[float], typer.Option(min=0, help="Each prompt gets one; repeat.")] = [0.0, 0.8],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="Answer this many prompts, picked by the seed.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no further prompt after this time.")] = None,
    seed: Annotated[int, typer.Option(help="Picks prompts, temperatures and samples.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; on a CPU float32 is often the fastest.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
    drop_loops: Annotated[bool, typer.Option(help="Leave out answers that end in a repeated phrase.")] = False,
    template_kwargs: Annotated[str, typer.Option(help='JSON for the template: {"enable_thinking": false}.')] = "{}",
) -> None:
    """Let the target answer prompts, into OUT/answers.jsonl; run it again to carry on."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    if bool(prompts) == write:
        raise typer.BadParameter("expected prompts, or --self for none, but not both", param_hint="--prompts")
    if write and limit is None:
        raise typer.BadParameter("--self wants to know how many conversations to make", param_hint="--limit")
    in_process = dtype != "auto" or device or batch_size != AT_ONCE
    if in_process if server else served_model or server_args != WHOLE_LAW or concurrency != AT_ONCE:
        raise typer.BadParameter(
            "--dtype, --device and --batch-size are without --server; --served-model, --server-args and --concurrency "
            "are with it"
        )
    common: dict[str, Any] = {"target_id": None if Path(target).exists() else target, "max_new_tokens": max_new_tokens}
    common["template_kwargs"] = json_object(template_kwargs, "--template-kwargs")
    body = json_object(server_args, "--server-args")
    rows = [] if write else _prompts(prompts, limit, seed)
    if server is None:
        answerer = _in_process(target, dtype, device, batch_size=batch_size, **common)
    else:
        answerer = _by_server(target, server, model=served_model, concurrency=concurrency, body=body, **common)
    seconds = None if minutes is None else minutes * 60
    options = {"temperatures": temperature, "seed": seed, "seconds": seconds, "drop_loops": drop_loops}
    typer.echo(f"answers in {out}: {_run(answerer, rows, limit if write else None, out, options)}")


def pick(rows: "list[Conversation]", limit: int | None, seed: int) -> "list[Conversation]":
    """`limit` rows by a hash of (seed, id): out of all files alike, whatever the order they were given in."""
    if limit is None or limit >= len(rows):
        return rows
    return sorted(rows, key=lambda row: hashlib.sha256(f"{seed}\n{row.id}".encode()).digest())[:limit]


def _prompts(sources: list[str], limit: int | None, seed: int) -> "list[Conversation]":
    from headstart.train.conversations import load_conversations

    rows, report = load_conversations(sources, trainable=False)
    typer.echo(f"prompts: {report}")
    if not rows:
        raise ValueError("no prompt is left to answer; expected rows such as {'prompt': 'Why is the sky blue?'}")
    return pick(rows, limit, seed)


def _run(
    answerer: "Answerer", rows: "list[Conversation]", count: int | None, out: Path, options: dict[str, Any]
) -> "Report":
    """Has `rows` answered, or `count` conversations made without any."""
    from headstart.train.distill import distill as answer_prompts
    from headstart.train.distill import distill_self

    with _Shown() as shown:
        if count is not None:
            return distill_self(answerer, count, out, progress=shown, **options)
        return answer_prompts(answerer, rows, out, progress=shown, **options)


def _in_process(target: str, dtype: str, device: str | None, **options: Any) -> "Answerer":
    import torch

    from headstart.infer.embedded import load_target
    from headstart.train.sampler import Sampler

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(target, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
    return Sampler(model, tokenizer, **options)


def _by_server(target: str, server: str, *, target_id: str | None, **options: Any) -> "Answerer":
    from headstart.infer.embedded import load_tokenizer

    try:
        from headstart.train.server import Server
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: asking a server wants pip install 'headstart-llm[train]'") from error
    name = target_id or Path(target).name
    return Server(server, load_tokenizer(target), target_id=name, api_key=os.environ.get(KEY), **options)


def json_object(text: str, option: str) -> dict[str, Any]:
    """An option that is a JSON object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{text!r} is no JSON: {error.msg}", param_hint=option) from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r}; expected a JSON object", param_hint=option)
    return found


class _Shown:
    """Progress as a bar on a terminal, as a plain line now and then elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console) if console.is_terminal else None
        self.task = self.bar.add_task("answering", total=None) if self.bar else None
        self.began = time.monotonic()
        self.told = -PAUSE

    def __enter__(self) -> "Callback":
        if self.bar:
            self.bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def _show(self, done: int, total: int, tokens: int) -> None:
        spent = time.monotonic() - self.began
        rate = tokens / max(spent, 1e-9)
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=done, total=total, description=f"answering, {rate:.0f} tokens/s")
        elif done == total or spent - self.told >= PAUSE:  # a server's answers come one by one
            typer.echo(f"{done}/{total} prompts, {rate:.0f} tokens/s")
            self.told = spent
