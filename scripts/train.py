"""`headstart train`: one run, in this process or in several on this machine.

Several machines, FSDP2 and DeepSpeed: accelerate launch --config_file recipes/accelerate-*.yaml -m headstart.train.
"""

from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values to use instead of the recipe's.")
    ] = None,
    num_processes: Annotated[
        int, typer.Option(min=1, help="Processes on this machine, one a device; on the CPU as many as you like.")
    ] = 1,
) -> None:
    """Train heads as RECIPE says."""
    try:
        from headstart.train.__main__ import main
        from headstart.train.launch import launch
        from headstart.train.recipe_file import load_recipe
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("headstart"):
            raise
        raise ImportError(
            f"training needs the package {missing.name}, which is not installed. pip install 'headstart-llm[train]'"
        ) from missing
    arguments = [recipe, *(overrides or [])]
    if num_processes == 1:
        raise typer.Exit(main(arguments))
    load_recipe(recipe, overrides or [])  # what is wrong is told here once, not by every process
    raise typer.Exit(launch(num_processes, arguments))
