"""`headstart generate`: decode with heads; with --compare, plain decoding beside it, in turn."""

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from headstart.scripts.draw import PassStreamer, drawn, legend, watched

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.infer.report import Report
    from headstart.infer.speculator import Speculator

DTYPES = ("auto", "bfloat16", "float16", "float32")
WARM_TOKENS = 16


def check_prepack(prepack: bool, dtype: str, device: str | None) -> None:
    """Raises BadParameter where nothing can be prepacked, before a model loads."""
    if prepack and (dtype not in ("auto", "bfloat16") or device not in (None, "cpu")):
        said = f"it is for bfloat16 weights on a CPU; got --dtype {dtype}, --device {device or 'unset'}"
        raise typer.BadParameter(said, param_hint="--prepack")


class Run(NamedTuple):
    """One prompt decoded by plain generate and by one source of guesses."""

    prompt: str
    source: str
    plain: float  # tokens per second, the whole call
    fast: float
    tokens: int
    tokens_per_pass: float
    verdict: str  # "equal", or what the first difference is


def generate(
    prompt: Annotated[list[str] | None, typer.Argument(help="What to answer; several are answered in turn.")] = None,
    target: Annotated[str, typer.Option(help="smollm2 (embedded), a Hub id or a model folder.")] = "smollm2",
    heads: Annotated[str | None, typer.Option(help="Folder or Hub id of the heads.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="prompt-lookup, token-recycling or lookahead: instead of heads, or merged with them."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines file of prompts, instead of arguments.")] = None,
    compare: Annotated[bool, typer.Option(help="Run plain decoding beside it, both warm, in turn.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the samples; under the rule match both ways draw the same.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Tree nodes a pass verifies, root included.")] = 16,
    depth: Annotated[
        int | None, typer.Option(min=0, help="Guesses on the longest path; default: all the heads have.")
    ] = None,
    rule: Annotated[
        str, typer.Option(help="How guesses are accepted when sampling: match, rejection, or typical, which is lossy.")
    ] = "match",
    dtype: Annotated[str, typer.Option(help=f"Weights of the target: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text as it stands, without the chat template.")] = False,
    prepack: Annotated[bool, typer.Option(help="Keep bfloat16 weights on a CPU packed for it too.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the figures of --compare here, as JSON.")] = None,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Draw the tree of the pass that gave most tokens.")
    ] = False,
) -> None:
    """Answer prompts with TARGET and HEADS; the text is what TARGET alone would have written."""
    if bool(prompt) == bool(prompts):
        raise typer.BadParameter("give prompts as arguments or a file with --prompts: one of them, not both")
    _check_compare(compare, show_tree, save)
    if not heads and not drafter:
        raise typer.BadParameter("give --heads, or --drafter, or both to merge their guesses")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    if not 0.0 <= temperature < float("inf"):
        raise typer.BadParameter(f"{temperature}; expected 0 (greedy) or more", param_hint="--temperature")
    check_prepack(prepack, dtype, device)
    named = _named_prompts(prompt, prompts)
    import torch
    from transformers.utils import logging as transformers_logging

    from headstart.infer.accept import RULES
    from headstart.infer.drafters import DRAFTERS
    from headstart.infer.embedded import load_target
    from headstart.infer.speculator import Speculator
    from headstart.scripts.doctor import look_at  # which imports DTYPES from here

    if rule not in RULES:
        raise typer.BadParameter(f"{rule!r}; expected one of {', '.join(RULES)}", param_hint="--rule")
    if drafter and drafter not in DRAFTERS:
        raise typer.BadParameter(f"{drafter!r}; expected one of {', '.join(DRAFTERS)}", param_hint="--drafter")
    if heads:
        look_at(heads)

    transformers_logging.disable_progress_bar()  # of loading weights: it would stand between the texts
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(target, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
    options: dict[str, Any] = {"nodes": nodes, "depth": depth, "rule": rule, "prepack": prepack}
    sources = []  # with --heads and --drafter the heads alone are compared too
    if heads and (compare or not drafter):
        sources.append(Speculator.from_pretrained(heads, model, tokenizer=tokenizer, **options))
    if heads and drafter:
        sources.append(Speculator.from_pretrained(heads, model, tokenizer=tokenizer, also=[drafter], **options))
    elif drafter:
        sources.append(Speculator(model, drafter, **options))
    inputs = [(name, _ids(text, tokenizer, raw).to(device)) for name, text in named]
    options = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    if compare:
        _compare(sources, inputs, options, seed, save)
    else:
        _stream(sources[-1], tokenizer, inputs, options, seed, show_tree)


def _check_compare(compare: bool, show_tree: bool, save: Path | None) -> None:
    """Raises BadParameter for options that do not go with --compare, or with its absence."""
    if save is not None and not compare:
        raise typer.BadParameter("figures are those of --compare: give that too", param_hint="--save")
    if save is not None and not save.parent.is_dir():
        raise typer.BadParameter(f"{save.parent} is not there: make that folder first", param_hint="--save")
    if show_tree and compare:
        raise typer.BadParameter(
            "a tree is drawn of a text that streams: leave out --compare", param_hint="--show-tree"
        )


def _named_prompts(prompt: list[str] | None, prompts: Path | None) -> list[tuple[str, str]]:
    """(name, text) of every prompt: of a file, the first user turn of each row. Raises ValueError where it has none."""
    if prompts is None:
        return [(f"prompt {i + 1}", text) for i, text in enumerate(prompt or [])]
    from headstart.train.conversations import load_conversations

    rows, report = load_conversations([prompts], trainable=False)
    if not rows:
        raise ValueError(f"{prompts} holds no prompt; expected rows with a user turn: {report}")
    return [(row.id, next(m["content"] for m in row.messages if m["role"] == "user")) for row in rows]


def _ids(text: str, tokenizer: Any, raw: bool) -> "Tensor":
    """Prompt ids [P]."""
    import torch

    from headstart.train.masking import prompt_ids

    if raw or not tokenizer.chat_template:
        return torch.tensor(tokenizer(text)["input_ids"])
    return torch.tensor(prompt_ids([{"role": "user", "content": text}], tokenizer))


def _stream(
    fast: "Speculator", tokenizer: Any, inputs: list[Any], options: dict[str, Any], seed: int, show_tree: bool
) -> None:
    """Answers as they come, on a terminal coloured by what each pass gave, and what the call did."""
    import torch
    from transformers import TextStreamer

    console, beside = Console(), Console(stderr=True)
    coloured = console.is_terminal and not console.no_color
    streamer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if coloured:
        streamer = PassStreamer(tokenizer, console)
        beside.print(legend())
    watch = watched(fast, streamer.passed if coloured else None) if coloured or show_tree else None
    for _, ids in inputs:
        torch.manual_seed(seed)
        fast.generate(ids[None], attention_mask=torch.ones_like(ids[None]), streamer=streamer, **options)
        if show_tree and watch is not None and watch.best is not None:
            beside.print(drawn(watch.best, watch.passes, tokenizer))
        _show_report(fast.report)


def _show_report(report: "Report") -> None:
    """What a call did, as a table on the error stream."""
    found = report.as_dict()
    total = sum(found["seconds"].values()) or 1.0
    table = Table(show_header=False, title=f"{found['drafter']}, rule {found['rule']}, {found['dtype']}")
    ranks = "; ".join(" ".join(f"{share:.2f}" for share in depth) for depth in found["accepted_by_rank"]) or "-"
    depths = " ".join(f"{share:.2f}" for share in found["accepted_by_depth"]) or "-"
    rows = {
        "text": "the target's own" if found["lossless"] else "LOSSY: not the target's own law",
        "tokens per pass": f"{found['tokens_per_pass']:.2f} ({found['tokens']} tokens in {found['passes']} passes)",
        "tokens per second": f"{found['tokens_per_second']:.1f}",
        "accepted by depth": depths,
        "accepted by place among siblings": ranks,
        "nodes verified a pass": f"{found['nodes'] / max(found['passes'], 1):.1f}",
        "time": ", ".join(f"{part} {value / total:.0%}" for part, value in found["seconds"].items()),
        "waits for the device a step": f"{found['syncs'] / max(found['steps'], 1):.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for note in found["notes"]:
        table.add_row("note", note)
    Console(stderr=True).print("\n", table)


def _compare(
    sources: "list[Speculator]", inputs: list[Any], options: dict[str, Any], seed: int, save: Path | None
) -> None:
    """Plain generate and every source in turn on every prompt, after one short warm-up of each; a table of all."""
    import torch

    target = sources[0].target

    def timed(method: Any, ids: "Tensor", **changes: Any) -> tuple["Tensor", float]:
        torch.manual_seed(seed)
        began = time.perf_counter()
        out = method(ids[None], attention_mask=torch.ones_like(ids[None]), **(options | changes))[0]
        tokens = out.shape[0] - ids.shape[0]
        return out.cpu(), tokens / (time.perf_counter() - began)

    for method in (target.generate, *(fast.generate for fast in sources)):
        timed(method, inputs[0][1], max_new_tokens=WARM_TOKENS)
    runs = []
    for name, ids in inputs:
        plain, speed = timed(target.generate, ids)
        for fast in sources:
            ours, fast_speed = timed(fast.generate, ids)
            verdict = _verdict(target, ids, plain, ours, options["do_sample"])
            tokens = ours.shape[0] - ids.shape[0]
            runs.append(Run(name, fast.source.name, speed, fast_speed, tokens, fast.report.tokens_per_pass, verdict))
    medians = _table(runs, f"{target.dtype}".removeprefix("torch."))
    if save is not None:
        figures = {"median_speedup": medians, "runs": [run._asdict() for run in runs]}
        save.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    bugs = sum("a bug" in run.verdict for run in runs)
    if bugs:
        raise ValueError(f"{bugs} of {len(runs)} texts differ from plain decoding by more than rounding: please report")


def _verdict(target: Any, ids: "Tensor", plain: "Tensor", ours: "Tensor", sampled: bool) -> str:
    """Whether two texts of one prompt [P] are equal, and if not, why."""
    import torch

    from headstart.infer.parity import first_difference

    if torch.equal(plain, ours):
        return "equal"
    if sampled:
        return "other draws: compare sampled texts under the rule match, in float32"
    return str(first_difference(target, ids, plain.to(ids.device), ours.to(ids.device)))


def _table(runs: list[Run], dtype: str) -> dict[str, float]:
    """Prints a row a run and the medians; returns the median speedup of every source."""
    table = Table(title=f"plain generate and Headstart in turn, {dtype}")
    for heading in ("prompt", "guesses", "tokens", "plain tok/s", "fast tok/s", "speedup", "tokens per pass", "ids"):
        table.add_column(heading, justify="left" if heading in ("prompt", "guesses", "ids") else "right")
    for run in runs:
        speeds = (f"{run.plain:.1f}", f"{run.fast:.1f}", f"{run.fast / run.plain:.2f}x")
        table.add_row(run.prompt, run.source, str(run.tokens), *speeds, f"{run.tokens_per_pass:.2f}", run.verdict)
    table.add_section()
    medians = {}
    for source in dict.fromkeys(run.source for run in runs):
        own = [run for run in runs if run.source == source]
        medians[source] = statistics.median(run.fast / run.plain for run in own)
        passes = statistics.median(run.tokens_per_pass for run in own)
        equal = f"{sum(run.verdict == 'equal' for run in own)} of {len(own)} equal"
        table.add_row("median", source, "", "", "", f"{medians[source]:.2f}x", f"{passes:.2f}", equal)
    Console(width=None if Console().is_terminal else 150).print(table)
    return medians
