"""A recipe's file: YAML, ``key=value`` overrides on top, and errors that name what is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from headstart.train.recipe import JointPart, Recipe, WandbPart


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and put ``section.key=value`` overrides on top (values are YAML).

    Raises ValueError that lists every wrong key or value with what is allowed there.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no recipe at {path}; a YAML file was expected, for example recipes/medusa1-smollm2.yaml")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {type(tree).__name__}; a mapping with target, out and data was expected")
    for override in overrides:
        _override(tree, override)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise ValueError(f"{path}: " + "\n  ".join(["what is wrong:", *map(_explain, error.errors())])) from None
    for part in ("train", "heldout"):
        setattr(recipe.data, part, [_find(name, path.parent) for name in getattr(recipe.data, part)])
    return recipe


def _override(tree: dict[str, Any], text: str) -> None:
    """``a.b=value`` into ``tree``; ``a.b+=value`` appends to a list."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ValueError(f"override {text!r} is not key=value, for example optim.lr=5e-4")
    append, *names = key.endswith("+"), *key.removesuffix("+").split(".")
    at: Any = tree
    for name in names[:-1]:
        if at.get(name) is None:  # not there, or null
            at[name] = {}
        at = at[name]
        if not isinstance(at, dict):
            raise ValueError(f"override {text!r}: {name} is not a section")
    parsed, there = _value(value), at.get(names[-1]) or []
    if append and not isinstance(there, list):
        raise ValueError(f"override {text!r}: {names[-1]} is {there!r}, += goes on a list")
    at[names[-1]] = [*there, parsed] if append else parsed


def _value(text: str) -> Any:
    """YAML, but 1e-3 is a number (YAML 1.1 takes it for text)."""
    try:
        return float(text) if "e" in text.lower() and text.lower()[:1] in "0123456789.-+" else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "recipe"
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg']}; got {error.get('input')!r}"
    part: Any = Recipe
    for name in error["loc"][:-1]:
        part = part.model_fields[name].annotation
        part = {"wandb": WandbPart, "joint": JointPart}.get(name, part)  # where the annotation says "or None"
    return f"{where}: unknown key; known here are {sorted(part.model_fields)}"


def _find(name: str, folder: Path) -> str:
    """A data path as it stands in the recipe's folder, else in the working folder. Raises ValueError naming both."""
    for candidate in (folder / name, Path(name)):
        if candidate.exists():
            return str(candidate)
    raise ValueError(f"data {name!r} is neither in the recipe's folder ({folder}) nor in the working folder")
