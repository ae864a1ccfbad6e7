"""`headstart tune`: what passes and guesses cost here and how many are kept, measured and written down as a plan."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from headstart.scripts.generate import DTYPES, check_prepack
from headstart.scripts.journal import write_whole
from headstart.scripts.suites import Rows, read_suite, tokenised

if TYPE_CHECKING:
    from headstart.infer.bench import Prompt
    from headstart.infer.plan import Best, Costs, Plan
    from headstart.infer.speculator import Speculator

WIDTH = 160  # characters of a table where there is no terminal
GROWING_CONTEXTS, GROWING_ROWS = (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)  # of growth curves, unless told
PROMPTS = (  # several kinds of text: what is kept of guesses differs from kind to kind
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Summarise in three sentences: The heart pumps blood through the body. The right side sends it to the lungs, where "
    "it takes up oxygen; the left side sends it to all other organs. Valves keep it from flowing back.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "A train leaves at 9:40 and arrives at 13:15. It stops for 25 minutes in all. How long does it move?",
    "Translate into French: The meeting was moved to Thursday because the room was not free.",
    "List five things to check before buying a used bicycle.",
)


def tune(
    target: Annotated[str, typer.Option(help="smollm2 (embedded), a Hub id or a model folder.")] = "smollm2",
    heads: Annotated[str | None, typer.Option(help="Folder or Hub id of heads; a folder is given the plan.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="prompt-lookup, ...: instead of heads, or merged with them.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines file of prompts; default: six of our own.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded after each prompt.")] = 128,
    nodes: Annotated[int, typer.Option(min=2, help="Largest tree looked at, root included.")] = 64,
    depth: Annotated[int | None, typer.Option(min=1, help="Guesses on the longest path; default: all.")] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Tokens cached, repeat; default 128, 1024.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes, repeat; default 1.")] = None,
    curves: Annotated[
        Path | None,
        typer.Option(help="JSON file for how a step's time grows: contexts to 4096, batches to 8, unless told."),
    ] = None,
    prepack: Annotated[bool, typer.Option(help="Keep bfloat16 weights on a CPU packed for it too.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Times each figure is measured; the median counts.")] = 7,
    dtype: Annotated[str, typer.Option(help=f"Weights of the target: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
) -> None:
    """Measure passes and drafting of TARGET, and what is kept of the guesses; write the plan into the heads' folder."""
    if not heads and not drafter:
        raise typer.BadParameter("give --heads, or --drafter, or both to merge their guesses")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    check_prepack(prepack, dtype, device)
    if curves is not None and not curves.parent.is_dir():
        raise typer.BadParameter(f"{curves.parent} is no folder: make it first", param_hint="--curves")
    asked = _own_prompts() if prompts is None else read_suite(prompts)
    import torch
    from transformers.utils import logging as transformers_logging

    from headstart.infer.costs import FILE, cached_path, key_of
    from headstart.infer.embedded import load_target
    from headstart.infer.measuring import CONTEXTS, measure
    from headstart.infer.plan import Plan
    from headstart.infer.speculator import Speculator, heads_for

    transformers_logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(target, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
    parts: list[Any] = [*([drafter] if drafter else []), *([heads_for(model, heads)] if heads else [])]
    source = parts if len(parts) > 1 else parts[0]
    speculate = partial(Speculator, model, source, nodes=nodes, depth=depth, prepack=prepack)
    fast = speculate()
    work = tokenised(asked, model, tokenizer, False, max_new_tokens)

    typer.echo("measuring passes and drafting", err=True)
    usual = (CONTEXTS, (1,)) if curves is None else (GROWING_CONTEXTS, GROWING_ROWS)
    costs = measure(fast, contexts=context or usual[0], rows=rows or usual[1], repeats=repeats)
    plan = Plan(key_of(fast), costs, best=_static(fast, costs, work, max_new_tokens))
    adaptive = speculate(plan=plan)
    figures = _adapted(adaptive, costs, work, max_new_tokens)
    plan = plan._replace(learned=adaptive.planning.learned["greedy"].as_dict())
    _show(costs, plan.best, figures)
    if curves is not None:
        _grow(costs, plan.key, curves)
    beside = [Path(heads) / FILE] if heads and not drafter and Path(heads).is_dir() else []
    _written(plan, [cached_path(plan.key), *beside])


def _own_prompts() -> Rows:
    return [(f"prompt {i}", "tune", [{"role": "user", "content": text}]) for i, text in enumerate(PROMPTS, 1)]


def _written(plan: "Plan", places: list[Path]) -> None:
    """Keeps the plan at all places and says so."""
    from headstart.infer.costs import keep

    for place in places:
        keep(plan, place)
        typer.echo(f"written: {place}")


def _static(fast: "Speculator", costs: "Costs", work: "list[Prompt]", new: int) -> "Best | None":
    """The best static tree, from what is kept of trees as large as they may be; only heads can fill one."""
    from headstart.infer.draft_heads import HeadsSource
    from headstart.infer.plan import best_static, conditional

    if not isinstance(fast.source, HeadsSource):
        return None
    rounds: list[tuple[int, int]] = []
    ranks: dict[tuple[int, int], int] = {}
    for prompt in work:
        _decode(fast, prompt, new)
        rounds += fast.report.rounds
        for place, count in fast.report.ranks.items():
            ranks[place] = ranks.get(place, 0) + count
    return best_static(conditional(ranks, rounds), costs, 1, _context(work, new), fast.nodes)


def _adapted(fast: "Speculator", costs: "Costs", work: "list[Prompt]", new: int) -> dict[str, float]:
    """What the adaptive plan makes of the same prompts, the second time it sees them."""
    for prompt in work:
        _decode(fast, prompt, new)
    tokens = steps = passes = nodes = plain = 0
    for prompt in work:
        _decode(fast, prompt, new)
        report = fast.report
        tokens, steps, passes = tokens + report.tokens, steps + report.steps, passes + report.passes
        nodes, plain = nodes + report.nodes, plain + report.plain_steps
    known = fast.planning.learned["greedy"]
    return {
        "tokens per pass": tokens / passes,
        "nodes a pass": nodes / passes,
        "share of plain steps": plain / steps,
        "expected speed over plain steps": max(1.0, known.speed) if known.on else 1.0,
        "milliseconds of a plain step": 1000 * costs.plain(1, _context(work, new)),
    }


def _context(work: "list[Prompt]", new: int) -> int:
    """Tokens that are cached in the middle of an answer, on average."""
    return sum(len(prompt.ids) for prompt in work) // len(work) + new // 2


def _decode(fast: "Speculator", prompt: "Prompt", new: int) -> None:
    import torch

    ids = prompt.ids[None].to(fast.model.get_input_embeddings().weight.device)
    fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)


def _show(costs: "Costs", best: "Best | None", figures: dict[str, float]) -> None:
    """Passes and drafting in plain steps, and what the plans bring."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    table = Table(title="a pass over n nodes, drafting to depth d: in plain steps", box=SIMPLE)
    for heading in ("rows", "context", "plain, ms", *(f"n {size}" for size in costs.sizes)):
        table.add_column(heading, justify="right")
    for curve in costs.curves:
        plain = costs.plain(curve.rows, curve.context)
        cells = [f"{(seconds + costs.overhead) / plain:.2f}" for seconds in curve.seconds]
        table.add_row(str(curve.rows), str(curve.context), f"{1000 * plain:.1f}", *cells)
    console.print(table)
    for draft in costs.drafts:
        plain = costs.plain(draft.rows, costs.curves[0].context)
        shares = " ".join(f"d {d}: {seconds / plain:.3f}" for d, seconds in enumerate(draft.seconds) if d)
        console.print(f"drafting, {draft.rows} rows: {shares or '-'}")
    console.print(f"beside both models: {1000 * costs.overhead:.2f} ms a step")
    for name, value in figures.items():
        console.print(f"{name}: {value:.2f}")
    if best is not None:
        console.print(
            f"best static tree: {best.nodes} nodes, depth {best.depth}, {best.tokens:.2f} tokens a pass expected, "
            f"{best.speedup:.2f} times as fast as plain steps"
        )
    if figures["expected speed over plain steps"] <= 1.0:
        console.print("guesses do not pay here: an adaptive plan decodes plainly, and tries them now and then")


def _grow(costs: "Costs", key: dict[str, str], path: Path) -> None:
    """Shows how a step's time grows with context, tree and batch, and keeps it at ``path``."""
    points = []
    for curve in costs.curves:
        for nodes, seconds in zip(costs.sizes, curve.seconds, strict=True):
            whole = seconds + costs.overhead
            place = {"rows": curve.rows, "context": curve.context, "nodes": nodes}
            points.append({**place, "seconds": whole, "seconds_a_row": whole / curve.rows})
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    title = "milliseconds a step and row, trees of n nodes, without drafting: over tokens per pass, of a token"
    table = Table(title=title, box=SIMPLE)
    for heading in ("rows", "context", *(f"n {size}" for size in costs.sizes)):
        table.add_column(heading, justify="right")
    for curve in costs.curves:
        own = [p for p in points if (p["rows"], p["context"]) == (curve.rows, curve.context)]
        table.add_row(str(curve.rows), str(curve.context), *(f"{1000 * p['seconds_a_row']:.2f}" for p in own))
    console.print(table)
    drafts = [{"rows": d.rows, "depth": at, "seconds": s} for d in costs.drafts for at, s in enumerate(d.seconds)]
    found = {"key": key, "overhead": costs.overhead, "points": points, "drafts": drafts}
    write_whole(path, json.dumps(found, indent=1) + "\n")
    typer.echo(f"written: {path}")
