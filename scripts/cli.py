"""The command `headstart`: one file here per command; this one registers them and words their errors.

Nothing heavy is imported at module level, here or in the files of the commands, so that `--help` and `--version` answer
at once.
"""

import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from headstart.scripts.bench import bench
from headstart.scripts.distill import distill
from headstart.scripts.doctor import doctor
from headstart.scripts.export import export, import_
from headstart.scripts.generate import generate
from headstart.scripts.inspect_data import inspect
from headstart.scripts.push import push
from headstart.scripts.train import train
from headstart.scripts.tune import tune

USER_ERROR = 2  # exit status, as for a wrong option
DEBUG = "HEADSTART_DEBUG"

app = typer.Typer(
    name="headstart",
    help="Light prediction heads for a frozen causal LM: train them, and decode with them, token for token the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(distill)
app.command()(inspect)
app.command()(train)
app.command()(generate)
app.command()(bench)
app.command()(tune)
app.command()(doctor)
app.command()(push)
app.command()(export)
app.command(name="import")(import_)


def _show_version(wanted: bool) -> None:
    if wanted:
        ours, torch, transformers = map(importlib.metadata.version, ("headstart-llm", "torch", "transformers"))
        typer.echo(f"headstart {ours} (torch {torch}, transformers {transformers})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


def main() -> None:
    """Run the command line. An error of the user is one message without a traceback, which HEADSTART_DEBUG=1 shows."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get(DEBUG, "0") not in ("", "0"):
            raise
        typer.echo(f"headstart: {error or type(error).__name__}\n({DEBUG}=1 shows where this comes from)", err=True)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
