"""`headstart bench`: ways of decoding a suite of prompts, measured in turn beside plain generate."""

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from headstart.scripts.generate import DTYPES
from headstart.scripts.suites import SUITES, find_suite, read_suite, tokenised

if TYPE_CHECKING:
    from headstart.infer.bench import Contestant, Prompt
    from headstart.infer.figures import Figures, Run

VERSION = 1  # of the file that --save writes
BASELINES = ("plain", "prompt-lookup", "assisted")  # of transformers itself; plain always runs
HEADS, DRAFT = "heads", "draft-model"  # in a merge: the last --heads, and --draft-model
COLUMNS = ("n", "speed\nup", "95 %\nfrom-to", "no\nloops", "tok/\npass", "no\nloops", "tok/s", "1st\nms", "loop")
CAPTION = "Medians over n runs, with an interval for the median (its range where n < 6); again without texts that loop."
WIDTH = 160  # characters of the table where there is no terminal
INTERRUPTED = 130  # exit status, as of a shell
Names = list[str] | None


def _least(least: int) -> Callable[[int | None], int | None]:
    """A check of an option, whose error says what was given."""

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise typer.BadParameter(f"{value}; expected {least} or more")
        return value

    return check


ZERO, ONE = _least(0), _least(1)


def bench(
    suite: Annotated[str, typer.Option(help=f"JSON Lines file of prompts, or a name: {', '.join(SUITES)}.")],
    target: Annotated[str, typer.Option(help="smollm2 (embedded), a Hub id or a model folder.")] = "smollm2",
    data: Annotated[Path | None, typer.Option(envvar="HEADSTART_DATA", help="Folder of the named suites.")] = None,
    heads: Annotated[Names, typer.Option(help="Folder or Hub id of heads; repeat.")] = None,
    drafter: Annotated[Names, typer.Option(help="prompt-lookup ..., or a merge: heads+prompt-lookup; repeat.")] = None,
    baseline: Annotated[Names, typer.Option(help=f"Of transformers: {', '.join(BASELINES)}; repeat.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A small LM that drafts, for both sides.")] = None,
    limit: Annotated[int | None, typer.Option(callback=ONE, help="This many prompts, evenly over the tasks.")] = None,
    max_new_tokens: Annotated[int, typer.Option(callback=ONE, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(callback=ZERO, help="Set anew before every call.")] = 0,
    nodes: Annotated[int, typer.Option(callback=ONE, help="Tree nodes a pass verifies, root included.")] = 16,
    depth: Annotated[int | None, typer.Option(callback=ZERO, help="Guesses on the longest path; default: all.")] = None,
    rule: Annotated[str, typer.Option(help="How guesses are accepted when sampling.")] = "match",
    batch_size: Annotated[int, typer.Option(callback=ONE, help="Prompts decoded at once.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"Weights of the target: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the texts as they stand, without the chat template.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write protocol, figures and all runs here, as JSON.")] = None,
) -> None:
    """Measure drafting on the first user turns of SUITE; every text is compared with what plain generate writes."""
    _check_options(dtype, temperature, save)
    rows = read_suite(find_suite(suite, data))
    _check_names(heads, drafter, baseline, draft_model, rule)
    from headstart.heads import load_heads

    loaded = [(folder, load_heads(folder)) for folder in heads or []]
    model, tokenizer, draft = _models(target, draft_model, dtype, device)
    from headstart.infer.bench import batches, pad_token, spread, stock, warm_up
    from headstart.infer.speculator import Speculator

    contestants = stock(model, lookup="prompt-lookup" in (baseline or []), assistant=draft and draft.model)
    contestants += _ours(partial(Speculator, model, nodes=nodes, depth=depth, rule=rule), model, loaded, draft, drafter)
    work = batches(spread(tokenised(rows, model, tokenizer, raw, max_new_tokens), limit), batch_size)
    pad = pad_token(model, tokenizer)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "pad_token_id": pad}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    asked: dict[str, Any] = {"suite": suite, "target": target, "draft_model": draft_model}
    asked |= {"prompts": sum(map(len, work)), "nodes": nodes, "depth": depth, "rule": rule, "batch_size": batch_size}
    protocol = _protocol(model, asked | {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed})
    typer.echo("; ".join(f"{key} {value}" for key, value in protocol.items() if value is not None))
    warm_up(model, contestants, work[0], options)
    _measure(model, contestants, work, options, seed, protocol, save)


def _check_options(dtype: str, temperature: float, save: Path | None) -> None:
    """Raises BadParameter for values that the types of the options let through."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    if not 0.0 <= temperature < float("inf"):
        raise typer.BadParameter(f"{temperature}; expected 0 (greedy) or more", param_hint="--temperature")
    if save is not None and not save.parent.is_dir():
        raise typer.BadParameter(f"{save.parent} is no folder: make it first", param_hint="--save")


def _check_names(heads: Names, drafter: Names, baseline: Names, draft_model: str | None, rule: str) -> None:
    """Raises BadParameter for names that stand for nothing, naming the known ones."""
    from headstart.infer.accept import RULES
    from headstart.infer.speculator import DRAFTERS

    if not (heads or drafter or baseline or draft_model):
        raise typer.BadParameter("nothing to compare: give --heads, --drafter, --draft-model or --baseline")
    if rule not in RULES:
        raise typer.BadParameter(f"unknown rule {rule!r}; known are {', '.join(RULES)}", param_hint="--rule")
    for name in baseline or []:
        if name not in BASELINES:
            said = f"unknown baseline {name!r}; known are {', '.join(BASELINES)}"
            raise typer.BadParameter(said, param_hint="--baseline")
    if "assisted" in (baseline or []) and not draft_model:
        raise typer.BadParameter("assisted generation needs a draft model: give --draft-model", param_hint="--baseline")
    given = [*DRAFTERS, *([HEADS] if heads else []), *([DRAFT] if draft_model else [])]
    for part in (part for name in drafter or [] for part in name.split("+")):
        if part in (HEADS, DRAFT) and part not in given:
            raise typer.BadParameter(f"{part!r} in a merge needs --{part}", param_hint="--drafter")
        if part not in given:
            said = f"unknown drafter {part!r}; known are {', '.join(given)}, or several joined by +"
            raise typer.BadParameter(said, param_hint="--drafter")


def _models(target: str, draft_model: str | None, dtype: str, device: str | None) -> tuple[Any, Any, Any]:
    """Target, its tokenizer, and the draft model as a source of guesses, None without one."""
    import torch
    from transformers.utils import logging as transformers_logging

    from headstart.infer.draft_model import DraftModel
    from headstart.infer.embedded import load_target

    transformers_logging.disable_progress_bar()
    load = partial(
        load_target,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    model, tokenizer = load(target)
    if draft_model is None:
        return model, tokenizer, None
    small, its_tokenizer = load(draft_model)
    return model, tokenizer, DraftModel(small, tokenizer=its_tokenizer, target_tokenizer=tokenizer)


def _ours(speculate: Any, model: Any, heads: list[Any], draft: Any, drafter: Names) -> "list[Contestant]":
    """Each of ``heads``, (folder, heads) pairs, the draft model, and the named drafters and merges; names differ."""
    import torch

    from headstart.heads import Tie
    from headstart.infer.bench import Contestant

    sources: list[tuple[str, Any]] = []
    for folder, loaded in heads:
        torch.nn.Module.to(loaded, device=Tie.of(model).weight.device, dtype=model.dtype)
        family = loaded.config.family
        sources.append((f"{family} {Path(folder).name}" if len(heads) > 1 else family, loaded))
    if draft is not None:
        sources.append((DRAFT, draft))
    known = ({HEADS: heads[-1][1]} if heads else {}) | {DRAFT: draft}
    for name in drafter or []:
        parts = [known.get(part, part) for part in name.split("+")]
        sources.append((name, parts if len(parts) > 1 else parts[0]))
    made: list[Contestant] = []
    for name, source in sources:
        again = sum(contestant.name.split(" #")[0] == name for contestant in made)
        made.append(Contestant.ours(f"{name} #{again + 1}" if again else name, speculate(source)))
    return made


def _protocol(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Under what conditions the figures hold."""
    import torch
    import transformers

    from headstart.infer.accept import LOSSY

    device = model.get_input_embeddings().weight.device
    cpu = f"cpu, {platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    lossy = asked["rule"] in LOSSY and asked["temperature"] > 0
    return asked | {
        "rule": f"{asked['rule']} (LOSSY)" if lossy else asked["rule"],
        "decoding": f"temperature {asked['temperature']:g}" if asked["temperature"] > 0 else "greedy",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _measure(
    model: Any,
    contestants: "list[Contestant]",
    work: "list[list[Prompt]]",
    options: dict[str, Any],
    seed: int,
    protocol: dict[str, Any],
    save: Path | None,
) -> None:
    """Runs everything; shows and saves what there is, also after Ctrl-C or an error. Raises where a text is wrong."""
    from headstart.infer.bench import BUG, measure

    runs: list[Run] = []
    complete = False
    try:
        for found in _progress(measure(model, contestants, work, options, seed), len(work)):
            runs += found
        complete = True
    except KeyboardInterrupt:
        typer.echo(f"interrupted after {len({run.batch for run in runs})} of {len(work)} batches", err=True)
    finally:
        figures = _show(runs, contestants)
        if save is not None:
            kept = [{"name": c.name, "ours": c.fast is not None, "refused": c.refused or None} for c in contestants]
            head = {"version": VERSION, "complete": complete, "protocol": protocol, "contestants": kept}
            text = json.dumps(head | figures | {"runs": [run._asdict() for run in runs]}, indent=1)
            save.write_text(text + "\n", encoding="utf-8")
    ours = {contestant.name for contestant in contestants if contestant.fast is not None}
    wrong = [said for run in runs if run.contestant in ours and BUG in run.verdicts for said in run.remarks]
    if wrong:
        raise ValueError("texts differ from plain decoding by more than rounding, please report: " + "; ".join(wrong))
    if not complete:
        raise typer.Exit(INTERRUPTED)


def _progress(found: "Iterable[list[Run]]", total: int) -> "Iterator[list[Run]]":
    """Hands on what comes; shows how far it is as a bar on a terminal, as plain lines elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(found, "measuring", total=total, console=console)
        return
    for done, runs in enumerate(found, 1):
        yield runs
        typer.echo(f"{done}/{total} batches", err=True)


def _show(runs: "Sequence[Run]", contestants: "Sequence[Contestant]") -> dict[str, Any]:
    """Prints a row for each contestant and task; returns the figures for the file."""
    from headstart.infer.figures import ALL, summary

    with_loops, without = summary(runs), summary(runs, loops=False)
    table = Table(title="in turn with plain generate", caption=CAPTION, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("decoding", overflow="fold")
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("texts", overflow="fold")
    for contestant in contestants:
        scopes = with_loops.get(contestant.name, {})
        if len(scopes) == 2:  # one task: the same figures twice
            scopes = {ALL: scopes[ALL]}
        for scope, one in scopes.items():
            cells = _cells(one, without[contestant.name].get(scope))
            name = contestant.name if scope == ALL else f"  {scope}"
            table.add_row(name, *cells, end_section=scope == list(scopes)[-1])
    Console(width=None if Console().is_terminal else WIDTH).print(table)
    for contestant in (c for c in contestants if c.refused):
        typer.echo(f"{contestant.name} refused: {contestant.refused}")
    plain: dict[str, Any] = {}
    for key, part in (("figures", with_loops), ("figures_without_loops", without)):
        plain[key] = {name: {s: one._asdict() for s, one in scopes.items()} for name, scopes in part.items()}
    return plain


def _cells(one: "Figures", without: "Figures | None") -> list[str]:
    """One figure a column, then the texts by verdict."""
    return [
        str(one.runs),
        f"{one.speedup:.2f}x",
        f"{one.low:.2f}-{one.high:.2f}",
        f"{without.speedup:.2f}x" if without else "-",
        f"{one.tokens_per_pass:.2f}",
        f"{without.tokens_per_pass:.2f}" if without else "-",
        f"{one.speed:.1f}",
        f"{1000 * one.first_token:.0f}",
        f"{one.looping:.0%}",
        ", ".join(f"{count} {kind}" for kind, count in one.verdicts.items()),
    ]
