"""`headstart train`: one run in this process. For several: accelerate launch -m headstart.train, same arguments."""

from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values to use instead of the recipe's.")
    ] = None,
) -> None:
    """Train heads as RECIPE says, in this process."""
    try:
        from headstart.train.__main__ import main
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("headstart"):
            raise
        raise ImportError(
            f"training needs the package {missing.name}, which is not installed. pip install 'headstart-llm[train]'"
        ) from missing
    raise typer.Exit(main([recipe, *(overrides or [])]))
