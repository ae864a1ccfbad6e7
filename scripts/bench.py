"""`headstart bench`: ways of decoding a suite of prompts, measured in turn beside plain generate."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from headstart.scripts.bench_report import content, markdown, show
from headstart.scripts.contestants import BASELINES, Names, check_names, load_models, speculators
from headstart.scripts.generate import DTYPES, check_prepack
from headstart.scripts.journal import AFTER, Journal, write_whole
from headstart.scripts.plots import check_plots, draw
from headstart.scripts.suites import SUITES, find_suite, read_suite, tokenised

if TYPE_CHECKING:
    from headstart.infer.bench import Contestant, Job, Prompt
    from headstart.infer.figures import Run

NEW_TOKENS, FIRST_LENGTHS = 128, (128, 2048, 8192)
QUICK_PROMPTS, QUICK_TOKENS, QUICK_LENGTHS = 12, 32, (128,)
FIRST_TIMES = 3  # calls of each for each length
INTERRUPTED = 130  # exit status, as of a shell


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
    baseline: Annotated[Names, typer.Option(help=f"Without heads: {', '.join(BASELINES)}; repeat.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A small LM that drafts, for both sides.")] = None,
    limit: Annotated[int | None, typer.Option(callback=ONE, help="This many prompts, evenly over the tasks.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(callback=ONE, help="Longest answer; default: 128.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0 = greedy, the default; repeat for both.")] = None,
    seed: Annotated[int, typer.Option(callback=ZERO, help="Set anew before every call.")] = 0,
    nodes: Annotated[int, typer.Option(callback=ONE, help="Tree nodes a pass verifies, root included.")] = 16,
    depth: Annotated[int | None, typer.Option(callback=ZERO, help="Guesses on the longest path; default: all.")] = None,
    chain: Annotated[bool, typer.Option("--chain", help="One guess a depth from --heads, as engines draft.")] = False,
    rule: Annotated[str, typer.Option(help="How guesses are accepted when sampling.")] = "match",
    plan: Annotated[Names, typer.Option(help="What a step spends: fixed, adaptive, or a tree as 8x2; repeat.")] = None,
    batch_size: Annotated[int, typer.Option(callback=ONE, help="Prompts decoded at once.")] = 1,
    prepack: Annotated[bool, typer.Option(help="Keep bfloat16 weights on a CPU packed for it too.")] = False,
    first_token: Annotated[
        list[int] | None,
        typer.Option(help="Time it after so many prompt tokens; repeat; default: 128, 2048, 8192; 0 = not at all."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="12 prompts, 32 tokens, unless told otherwise.")] = False,
    dtype: Annotated[str, typer.Option(help=f"Weights of the target: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the texts as they stand, without the chat template.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Keep it all here as JSON, and beside it as Markdown and PNG; resumes.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Whether --save draws a PNG; needs matplotlib.")] = True,
) -> None:
    """Measure drafting on the first user turns of SUITE; every text is compared with what plain generate writes."""
    temperatures = list(dict.fromkeys(temperature or [0.0]))
    lengths = list(dict.fromkeys(first_token or (QUICK_LENGTHS if quick else FIRST_LENGTHS)))
    plans = list(dict.fromkeys(plan or ["fixed"]))
    new = max_new_tokens or (QUICK_TOKENS if quick else NEW_TOKENS)
    limit = limit or (QUICK_PROMPTS if quick else None)
    _check_options(dtype, temperatures, lengths, save, plots)
    check_prepack(prepack or "prepacked" in (baseline or []), dtype, device)
    rows = read_suite(find_suite(suite, data))
    check_names(heads, drafter, baseline, draft_model, rule, plans)
    from headstart.heads import load_heads
    from headstart.infer.bench import batches, spread, stock
    from headstart.infer.speculator import Speculator

    loaded = [(folder, load_heads(folder)) for folder in heads or []]
    model, tokenizer, draft = load_models(target, draft_model, dtype, device)
    wanted = baseline or []
    contestants = stock(model, "prompt-lookup" in wanted, draft and draft.model, "prepacked" in wanted)
    speculate = partial(Speculator, model, nodes=nodes, depth=depth, rule=rule, prepack=prepack)
    contestants += speculators(speculate, model, loaded, draft, drafter, plans, chain)
    prompts = spread(tokenised(rows, model, tokenizer, raw, new), limit)
    lengths = _fitting(model, lengths, max([nodes, *(one.fast.nodes for one in contestants if one.fast)]))
    work = _jobs(model, tokenizer, batches(prompts, batch_size), prompts, temperatures, new, lengths)
    asked: dict[str, Any] = {"suite": suite, "target": target, "draft_model": draft_model, "prompts": len(prompts)}
    asked |= {"nodes": nodes, "depth": depth, "chain": chain or None, "rule": rule, "plan": ", ".join(plans)}
    asked |= {"batch_size": batch_size, "prepack": "yes" if prepack else None}
    asked |= {"max_new_tokens": new, "seed": seed, "first_token": " ".join(map(str, lengths)) or None}
    protocol = _protocol(model, asked, loaded, prompts, temperatures)
    typer.echo("; ".join(f"{key} {value}" for key, value in protocol.items() if value is not None))
    _measure(model, contestants, work, seed, protocol, save, plots)


def _check_options(
    dtype: str, temperatures: Sequence[float], lengths: Sequence[int], save: Path | None, plots: bool
) -> None:
    """Raises BadParameter for values that the types of the options let through."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    for value in temperatures:
        if not 0.0 <= value < float("inf"):
            raise typer.BadParameter(f"{value}; expected 0 (greedy) or more", param_hint="--temperature")
    if min(lengths) < 0 or (0 in lengths and len(lengths) > 1):
        said = f"{' '.join(map(str, lengths))}; expected numbers of tokens, or a single 0"
        raise typer.BadParameter(said, param_hint="--first-token")
    if save is None:
        return
    if not save.parent.is_dir():
        raise typer.BadParameter(f"{save.parent} is no folder: make it first", param_hint="--save")
    if save.suffix in (".md", ".png"):
        raise typer.BadParameter(f"{save} is the JSON file, {save.suffix} goes beside it", param_hint="--save")
    if plots:
        check_plots()


def _fitting(model: Any, lengths: Sequence[int], nodes: int) -> list[int]:
    """Lengths of prompts to time the first token after, no longer than the target takes; says which it does not."""
    from headstart.infer.bench import FIRST_TOKENS
    from headstart.infer.checks import check_length

    known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    most = max(lengths) if known is None else max(known - FIRST_TOKENS, 0)
    fitting = sorted({min(length, most) for length in lengths} - {0})
    if max(lengths) > most:
        longer = " ".join(str(length) for length in lengths if length > most)
        typer.echo(f"first token after {most} tokens instead of {longer}: the target knows {known} positions", err=True)
    for length in list(fitting):
        try:
            check_length(model, length + FIRST_TOKENS, nodes)
        except ValueError as reason:
            fitting.remove(length)
            typer.echo(f"first token not timed after {length} tokens: {reason}", err=True)
    return fitting


def _jobs(
    model: Any,
    tokenizer: Any,
    work: "list[list[Prompt]]",
    prompts: "list[Prompt]",
    temperatures: Sequence[float],
    new: int,
    lengths: Sequence[int],
) -> "list[Job]":
    """Every batch greedily and at every temperature, then the first tokens."""
    from headstart.infer.bench import first_token_jobs, jobs, pad_token

    base: dict[str, Any] = {"max_new_tokens": new, "pad_token_id": pad_token(model, tokenizer)}
    greedy = base | {"do_sample": False}
    wanted = {
        _decoding(t): base | {"do_sample": True, "temperature": t, "top_k": 0} if t > 0 else greedy
        for t in temperatures
    }
    return jobs(work, wanted) + first_token_jobs(prompts, lengths, FIRST_TIMES, greedy)


def _decoding(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature > 0 else "greedy"


def _protocol(
    model: Any, asked: dict[str, Any], heads: list[Any], prompts: "list[Prompt]", temperatures: Sequence[float]
) -> dict[str, Any]:
    """Under what conditions the figures hold, weights and prompts by digest."""
    import torch
    import transformers

    from headstart.heads import Tie
    from headstart.heads.adapter import digest
    from headstart.heads.tie import fingerprint
    from headstart.infer.accept import LOSSY

    device = model.get_input_embeddings().weight.device
    cpu = f"cpu, {platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    lossy = asked["rule"] in LOSSY and max(temperatures) > 0
    ids = json.dumps([prompt.ids.tolist() for prompt in prompts])
    return asked | {
        "rule": f"{asked['rule']} (LOSSY)" if lossy else asked["rule"],
        "decoding": ", ".join(map(_decoding, temperatures)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target_digest": fingerprint(Tie.of(model)),
        "heads": "; ".join(f"{folder} {digest(loaded.state_dict())}" for folder, loaded in heads) or None,
        "prompts_digest": hashlib.sha256(ids.encode()).hexdigest()[:16],
    }


def _measure(
    model: Any,
    contestants: "list[Contestant]",
    work: "list[Job]",
    seed: int,
    protocol: dict[str, Any],
    save: Path | None,
    plots: bool,
) -> None:
    """Does what is not in the journal yet; shows and saves what there is, also after Ctrl-C or an error. Raises where
    a text is wrong."""
    from headstart.infer.bench import BUG, measure, warm_up

    settings = protocol | {"contestants": [one.name for one in contestants], "jobs": len(work)}
    journal = None if save is None else Journal(save.with_name(save.name + AFTER), settings)
    runs: list[Run] = [] if journal is None else list(journal.runs)
    left = [job for job in work if journal is None or job.key not in journal.done]
    if len(left) < len(work):
        typer.echo(f"{len(work) - len(left)} of {len(work)} jobs are done already: going on", err=True)
    warm_up(model, contestants, work)
    complete = False
    try:
        for found in _progress(measure(model, contestants, left, seed), len(left)):
            runs += found
            if journal is not None:
                journal.add(found)
        complete = True
    except KeyboardInterrupt:
        done = len({(run.decoding, run.batch) for run in runs})
        again = "" if save is None else ": give the same command again to go on"
        typer.echo(f"interrupted after {done} of {len(work)} jobs{again}", err=True)
    finally:
        result = content(runs, contestants, protocol, complete)
        show(result)
        if save is not None:
            write_whole(save, json.dumps(result, indent=1, allow_nan=False) + "\n")
            write_whole(save.with_suffix(".md"), markdown(result))
            if plots and result["figures"]:
                draw(result, save.with_suffix(".png"))
        if journal is not None:
            journal.close(remove=complete)
    ours = {contestant.name for contestant in contestants if contestant.fast is not None}
    wrong = [said for run in runs if run.contestant in ours and BUG in run.verdicts for said in run.remarks]
    if wrong:
        raise ValueError("texts differ from plain decoding by more than rounding, please report: " + "; ".join(wrong))
    if not complete:
        raise typer.Exit(INTERRUPTED)


def _progress(found: "Iterable[list[Run]]", total: int) -> "Iterator[list[Run]]":
    """Hands on what comes; shows how far it is as a bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    yield from track(found, "measuring", total=total, console=console, disable=not console.is_terminal)
