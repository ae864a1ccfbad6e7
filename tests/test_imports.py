"""Imports go one way, scripts -> train -> infer -> heads, and what only training needs stays out of inference."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["heads", "infer", "train", "scripts"]  # each may import itself and what stands before it
TRAINING_ONLY = {"accelerate", "datasets", "wandb", "pydantic", "yaml", "peft", "matplotlib", "deepspeed"}
SLOW_TO_START = {"torch", "transformers", "headstart.heads", "headstart.infer", "headstart.train"} | TRAINING_ONLY


def imported(node: ast.AST) -> list[str]:
    """Full dotted names that one statement imports; a relative import is ["."]."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["."] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under `node` that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import_time(child)


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def complaints(source: str, folder: str) -> list[str]:
    """What is wrong with the imports of a file with this source in this folder."""
    tree = ast.parse(source)
    banned = {f"headstart.{other}" for other in ORDER[ORDER.index(folder) + 1 :]}
    found = []
    for name in (name for node in ast.walk(tree) for name in imported(node)):
        if name == ".":
            found.append("relative import")
        elif name in ("headstart", "headstart.*"):
            found.append("imports the namespace itself, which holds nothing")
        elif within(name, banned):
            found.append(f"imports {name}, which is above {folder}")
        elif within(name, set(ORDER)):
            found.append(f"imports {name} without headstart in front")
    late = SLOW_TO_START if folder == "scripts" else TRAINING_ONLY if folder in ("heads", "infer") else set()
    early = [name for node in at_import_time(tree) for name in imported(node)]
    return found + [f"imports {name} at module level" for name in early if within(name, late)]


@pytest.mark.parametrize("folder", ORDER)
def test_imports_go_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).glob("*.py"))
    assert files
    found = {file.name: complaints(file.read_text(encoding="utf-8"), folder) for file in files}
    assert {name: what for name, what in found.items() if what} == {}


BAD = [
    ("heads", "import headstart.infer.tree"),
    ("heads", "from headstart import infer"),
    ("heads", "def f():\n    from headstart.train.loop import step"),
    ("infer", "from headstart.train import recipe"),
    ("infer", "if True:\n    import headstart.scripts.cli"),
    ("train", "from headstart.scripts.cli import main"),
    ("train", "from . import loop"),
    ("train", "import headstart"),
    ("train", "from infer.tree import DraftTree"),
    ("infer", "try:\n    import peft\nexcept ImportError:\n    peft = None"),
    ("heads", "class A:\n    from yaml import safe_load"),
    ("scripts", "import torch.nn as nn"),
    ("scripts", "from headstart.infer.speculator import Speculator"),
]
GOOD = [
    ("heads", "import torch\nfrom headstart.heads.tie import Tie"),
    ("infer", "from headstart.heads import base\nfrom datasets_of_ours import x"),
    ("infer", "def plot():\n    import matplotlib.pyplot"),
    ("infer", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from peft import PeftModel"),
    ("train", "import accelerate, yaml\nfrom headstart.infer.decode import decode"),
    ("scripts", "import typer\ndef f():\n    import torch\n    from headstart.train.loop import step"),
]


@pytest.mark.parametrize(("folder", "source"), BAD)
def test_the_check_sees(folder: str, source: str) -> None:
    assert len(complaints(source, folder)) == 1


@pytest.mark.parametrize(("folder", "source"), GOOD)
def test_the_check_lets_pass(folder: str, source: str) -> None:
    assert complaints(source, folder) == []
