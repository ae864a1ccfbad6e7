"""`scripts/gpu-check`: what Headstart does on a machine with one accelerator, in a few minutes and without a download.

    python -m headstart.scripts.gpu_check --save out/gpu-check     # --tiny: small shapes, also on a CPU

1. a random target of the shape of Llama 3.1 8B in bfloat16, made on the device
2. t_verify(n), n = 1 ... 128, with 512, 4k and 32k tokens cached, and what drafting takes
3. decoding with an oracle that is right as often as asked, eager, compiled and with CUDA graphs: speed beside plain
   decoding in turn, where a step's time goes, and whether the ids are those of plain decoding up to near ties
4. `accelerate launch` of headstart.train under FSDP2

Every part is printed and saved as soon as it is there. What fails is noted and the next part begins; what would begin
later than ``--minutes`` is left out, and said to be.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from headstart.scripts.gpu_launch import fsdp_launch
from headstart.scripts.gpu_steps import FULL, TINY, Mode, Setup, decode_rows, machine, random_target, verify_curve
from headstart.scripts.journal import write_whole

VERSION = 1  # of the file; it grows where a reader of the older one would misread the newer one
FILE = "gpu-check.json"
WIDTH = 180  # characters of a table where there is no terminal
FAILED = 1  # exit status


class Findings:
    """What was found, as in the file. ``complete`` at the end, where nothing is ``missing`` and no text is wrong."""

    def __init__(self, path: Path, setup: Setup, minutes: float) -> None:
        self._path, self._began, self._limit = path, perf_counter(), 60 * minutes
        self.data: dict[str, Any] = {
            "version": VERSION,
            "complete": False,
            "machine": {},
            "setup": setup._asdict() | {"modes": [mode._asdict() for mode in setup.modes]},
            "seconds": {},  # by part
            "verify": [],  # a row a context: nodes, seconds of a pass over so many, seconds of drafting
            # a row for each mode, context and acceptance: infer.figures.Figures; what was asked for and kept; "ready",
            # seconds until compiled; "step", seconds by part
            "steps": [],
            "launch": None,  # configuration, seconds, losses by step
            "missing": {},  # by part: why
        }

    def attempt(self, name: str, part: Callable[[], Any]) -> Any:
        """The result of a part; None where it failed, or time is up."""
        began = perf_counter()
        if began - self._began > self._limit:
            return self.miss(name, f"left out, more than {self._limit / 60:g} minutes had passed")
        typer.echo(f"== {name}")
        try:
            return part()
        except Exception as error:  # whatever it is: the machine may not be there for another try
            return self.miss(name, f"{type(error).__name__}: {error}")
        finally:
            self.data["seconds"][name] = round(perf_counter() - began, 3)

    def miss(self, name: str, reason: str) -> None:
        """Notes a part that is not there."""
        self.data["missing"][name] = reason
        typer.echo(f"   {name}: {reason}", err=True)
        self.save()

    def add(self, where: str, row: Any, said: str) -> None:
        """Keeps and prints a row of a list."""
        self.data[where].append(row)
        typer.echo(f"   {said}")
        self.save()

    def save(self) -> None:
        """The file as it is now."""
        write_whole(self._path, json.dumps(self.data, indent=1))


def check(
    tiny: Annotated[bool, typer.Option("--tiny", help="Small shapes: does all of it run? Also on a CPU.")] = False,
    save: Annotated[Path, typer.Option(help="Folder for the figures as JSON, and for the launch.")] = Path(
        "out/gpu-check"
    ),
    minutes: Annotated[float, typer.Option(min=0, help="No part begins later than this.")] = 4.0,
    device: Annotated[str | None, typer.Option(help="cuda, cpu, ...; default: the accelerator.")] = None,
) -> None:
    """Measure passes, steps and the FSDP launch on this machine's accelerator."""
    import torch
    from transformers.utils import logging as transformers_logging

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None and device is None and not tiny:
        raise typer.BadParameter(
            "torch sees no accelerator here; --tiny runs small shapes on the CPU", param_hint="--device"
        )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    setup, where = TINY if tiny else FULL, device or str(found or "cpu")
    save.mkdir(parents=True, exist_ok=True)
    findings = Findings(save / FILE, setup, minutes)
    model = findings.attempt("target", partial(random_target, setup.target, where))
    if model is not None:
        findings.data["machine"] = findings.attempt("machine", partial(machine, model)) or {}
        typer.echo("".join(f"   {name}: {value}\n" for name, value in findings.data["machine"].items()), nl=False)
        curves(findings, model, setup)
        decode(findings, model, setup, setup.modes[:1])
    findings.data["launch"] = findings.attempt("FSDP launch", partial(fsdp_launch, save / "launch", where))
    if model is not None:
        decode(findings, model, setup, setup.modes[1:])  # what may take long to compile comes last
    wrong = [row for row in findings.data["steps"] if row["verdicts"].get("bug")]
    findings.data["complete"] = not (findings.data["missing"] or wrong)
    findings.save()
    show(findings.data)
    typer.echo(f"{sum(findings.data['seconds'].values()):.0f} s; figures are in {save / FILE}")
    if not findings.data["complete"]:
        raise typer.Exit(FAILED)


def curves(findings: Findings, model: Any, setup: Setup) -> None:
    """Passes at every context."""
    for context in setup.contexts:
        row = findings.attempt(f"passes, {context} tokens cached", partial(verify_curve, model, setup, context))
        if row is not None:
            pairs = zip(row["nodes"], row["seconds"], strict=True)
            findings.add("verify", row, ", ".join(f"{n}: {ms(s)}" for n, s in pairs) + f" ms; draft {ms(row['draft'])}")


def decode(findings: Findings, model: Any, setup: Setup, modes: Sequence[Mode]) -> None:
    """Every mode at its contexts."""
    for mode in modes:
        if mode.graphs and model.device.type != "cuda":
            findings.miss(mode.name, f"left out, the device is {model.device.type}")
            continue
        for context in setup.contexts[: mode.contexts]:
            part = partial(decode_rows, model, setup, mode, context)
            for row in findings.attempt(f"steps, {mode.name}, {context} tokens cached", part) or []:
                pairs = zip(COLUMNS, cells(row), strict=True)
                findings.add("steps", row, ", ".join(f"{name} {value}" for name, value in pairs))


# showing -------------------------------------------------------------------------------------------------------------

PARTS = ("draft", "plan", "verify", "accept", "commit", "other")
COLUMNS = ("mode", "context", "asked", "kept", "tokens/pass", "plain", *PARTS, "loop x", "predicted", "text")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table of steps; times in milliseconds."""
    text = ", ".join(f"{count} {verdict}" for verdict, count in row["verdicts"].items())
    times = [ms(row["plain_step"]), *(ms(row["step"][part]) for part in PARTS)]
    ratios = [f"{row[name]:.2f}" if row[name] else "-" for name in ("loop_speedup", "predicted")]
    return [
        row["mode"] + (" (none recorded)" if row["why_not_recorded"] else ""),
        str(row["context"]),
        f"{row['asked']:.2f}",
        f"{row['kept']:.2f}",
        f"{row['tokens_per_pass']:.2f}",
        *times,
        *ratios,
        text,
    ]


def ms(seconds: float | None) -> str:
    """Milliseconds."""
    return "-" if seconds is None else f"{1000 * seconds:.2f}"


def show(data: dict[str, Any]) -> None:
    """Both tables, the launch, and what is missing."""
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    sizes = data["verify"][0]["nodes"] if data["verify"] else []
    passes = Table("context", *map(str, sizes), "draft", box=SIMPLE, title="ms of a pass over so many nodes")
    for row in data["verify"]:
        passes.add_row(str(row["context"]), *map(ms, row["seconds"]), ms(row["draft"]))
    steps = Table(*COLUMNS, box=SIMPLE, title="ms of a step by part, and of a plain step; tokens/s over plain")
    for row in data["steps"]:
        steps.add_row(*cells(row))
    console.print(passes, steps)
    for remark in dict.fromkeys(remark for row in data["steps"] for remark in row["remarks"]):
        typer.echo(remark)
    if data["launch"] is not None:
        losses = data["launch"]["losses"]
        typer.echo(f"FSDP2 launch: loss {losses[0]:.3f} to {losses[-1]:.3f}, {data['launch']['seconds']:.0f} s")
    for name, reason in data["missing"].items():
        typer.echo(f"missing: {name}: {reason}")


if __name__ == "__main__":
    typer.run(check)
