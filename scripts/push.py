"""`headstart push`: a heads folder as a repository of the Hub, in one commit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from headstart.train.hub import Staged

WIDTH = 120  # characters of a line where there is no terminal


def push(
    heads: Annotated[Path, typer.Argument(help="Folder of the heads, such as the folder heads that training writes.")],
    repo: Annotated[str, typer.Argument(help="Where to: user/my-heads.")],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Who may see it; default: a new repository is private, one that is there stays as it is.",
        ),
    ] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the heads, as the Hub names it: apache-2.0.")] = None,
    dry_run: Annotated[bool, typer.Option(help="List the files and their sizes; asks nobody on the network.")] = False,
    token: Annotated[str | None, typer.Option(help="Of the Hub; default: that of `hf auth login` or HF_TOKEN.")] = None,
) -> None:
    """Upload HEADS with a model card from the run's own numbers and code for `custom_generate="user/my-heads"`."""
    try:
        from headstart.train import hub
        from headstart.train.leaks import secrets_here
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("headstart"):
            raise
        said = f"a model card needs the package {missing.name}, which is not installed"
        raise ImportError(f"{said}. pip install 'headstart-llm[train]'") from missing

    known = [*secrets_here(), token] if token else secrets_here()
    found = hub.staged(heads, repo, license=license, secrets=known)
    _show(found)
    if license is None:
        typer.echo("no licence is stated: give the one of the heads with --license")
    if dry_run:
        return
    done = hub.push(found, repo, private=private, token=token)
    seen = "private" if done.private else "public"
    typer.echo(f"{done.url} ({seen})" if done.changed else f"{repo} ({seen}) holds all of it already: {done.url}")


def _show(found: "Staged") -> None:
    """The files, and what stays here."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("file")
    table.add_column("bytes", justify="right")
    for item in found.items:
        table.add_row(item.path, f"{item.size:,}")
    table.add_row(f"{len(found.items)} files", f"{sum(item.size for item in found.items):,}")
    Console(width=None if Console().is_terminal else WIDTH).print(table)
    for reason in found.left_out:
        typer.echo(f"left out: {reason}")
