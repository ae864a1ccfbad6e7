"""What a heads folder tells of the run it comes from, so that its model card need not invent anything.

FOLDER/recipe.yaml       the recipe, overrides included; places on this machine are reduced to names
FOLDER/provenance.json   target, tokenizer, data, hardware, versions, and how evaluation decoded
FOLDER/log.jsonl         the run's numbers, every step once
FOLDER/plots/*.png       where matplotlib is installed (headstart-llm[bench])
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from headstart.heads import HeadsConfig
from headstart.infer.target import compute_dtype
from headstart.train.evaluate import ROWS
from headstart.train.masking import Masked
from headstart.train.recipe import Recipe
from headstart.train.redact import redacted

RECIPE, PROVENANCE, LOG, PLOTS = "recipe.yaml", "provenance.json", "log.jsonl", "plots"
ANSWERS = "answers.jsonl"  # beside the provenance.json of `headstart distill`
VERSION = 1  # of provenance.json
ABSOLUTE = re.compile(r"(file:/*)?(/|~[\w.-]*/|\.{1,2}/|[A-Za-z]:[\\/]|\\\\)")
# sections that matter on this machine alone
LOCAL: dict[str, Any] = {"out": True, "resume": True, "wandb": True, "tensorboard": True, "data": {"cache"}}


def describe(
    folder: Path,
    recipe: Recipe,
    target: Any,
    tokenizer: Any,
    rows: Sequence[Masked],
    *,
    prompts: int,
    device: torch.device,
    processes: int,
) -> None:
    """Writes all of it into ``folder``, where the heads of the finished run are saved already.

    ``rows`` were read, those put aside for validation the last of them; ``prompts`` were decoded at evaluations.
    """
    config = HeadsConfig.from_pretrained(folder)
    lines = read_log(Path(recipe.out) / LOG)
    told = {
        "version": VERSION,
        "made_by": made_by(),
        "target": {
            "name": config.target_name,
            "revision": config.target_revision or None,
            "fingerprint": config.target_fingerprint,
            "dtype": _plain(compute_dtype(target)),
        },
        "tokenizer": {"fingerprint": config.target_tokenizer, "template_sha256": template_hash(tokenizer)},
        "data": data_facts(recipe, rows),
        "training": {
            "steps": lines[-1]["step"] if lines else None,
            "seed": recipe.seed,
            "processes": processes,
            "device": device_name(device),
            "precision": recipe.optim.precision,
        },
    }
    if prompts:
        options = recipe.evaluate
        told["evaluation"] = {
            "prompts": prompts,
            "files": [Path(name).name for name in recipe.data.heldout],
            "drafts": "tree",
            "nodes": options.nodes,
            "depth": config.num_draft_heads,
            "max_new_tokens": options.max_new_tokens,
            "temperature": 0.0,
            "batch_size": min(prompts, ROWS),
            "dtype": _plain(compute_dtype(target)),
            "device": device_name(device),
        }
    (folder / PROVENANCE).write_text(json.dumps(redacted(portable(told)), indent=1) + "\n", encoding="utf-8")
    local = LOCAL | ({"heads": True} if recipe.joint else {})  # with joint, the heads are those of an earlier run
    asked = redacted(portable(recipe.model_dump(mode="json", exclude=local, exclude_none=True)))
    text = yaml.safe_dump(asked, sort_keys=False, allow_unicode=True)
    (folder / RECIPE).write_text("# The recipe of these heads, overrides included.\n" + text, encoding="utf-8")
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    draw(folder / PLOTS, lines)


def read_log(path: Path) -> list[dict[str, float]]:
    """The lines of a log.jsonl by step, training before evaluation. Where a run went back to an earlier step, or to the
    first, what was told of later ones is outdated; a line that a kill tore off is left out."""
    found: dict[tuple[float, bool], dict[str, float]] = {}
    before = 0.0
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
            key = float(line["step"]), is_evaluation(line)
        except (ValueError, TypeError, KeyError):
            continue
        if key[0] < before:
            found = {told: kept for told, kept in found.items() if told[0] < key[0]}
        found[key], before = line, key[0]
    return [found[key] for key in sorted(found)]


def is_evaluation(line: dict[str, float]) -> bool:
    """Whether a line of the log is of an evaluation, decoded or teacher forced."""
    return "tokens_per_pass" in line or "validation/chain" in line


def portable(value: Any) -> Any:
    """``value`` with every string in it that is a place on this machine reduced to its last name."""
    if isinstance(value, dict):
        return {portable(key): portable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(inner) for inner in value]
    if isinstance(value, str) and (ABSOLUTE.match(value) or ("/" in value and os.path.exists(value))):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def template_hash(tokenizer: Any) -> str | None:
    """sha256 of the chat template, None without one."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest() if tokenizer.chat_template else None


def device_name(device: torch.device) -> str:
    """What computes there, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    kind = platform.processor() or platform.machine()
    if device.type != "cpu":
        return f"{device.type}, {kind}"
    return f"cpu, {kind}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def draw(folder: Path, lines: Sequence[dict[str, float]]) -> None:
    """training.png and acceptance.png from the lines of a log; nothing where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    folder.mkdir(exist_ok=True)
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, name in zip(panels, ("loss", "tokens_per_pass"), strict=True):
        points = [(line["step"], line[name]) for line in lines if name in line]
        panel.plot([step for step, _ in points], [y for _, y in points], marker="." if len(points) < 20 else "")
        panel.set(xlabel="step", title=name.replace("_", " "))
    figure.savefig(folder / "training.png")
    shares = accepted(next((line for line in reversed(lines) if "tokens_per_pass" in line), {}))
    if shares:
        figure = Figure(figsize=(4, 3), layout="constrained")
        figure.subplots().bar(range(1, len(shares) + 1), shares)
        figure.axes[0].set(xlabel="depth", ylabel="share of passes", title="accepted guesses", ylim=(0, 1))
        figure.axes[0].set_xticks(range(1, len(shares) + 1))
        figure.savefig(folder / "acceptance.png")


def accepted(line: dict[str, float]) -> list[float]:
    """Cumulative acceptance by depth in a line of the log."""
    depths = sorted(int(name.split("/")[1]) for name in line if name.startswith("accepted/"))
    return [line[f"accepted/{depth}"] for depth in depths]


def made_by() -> dict[str, str]:
    """The versions that a run depends on."""
    return {name: version(name) for name in ("headstart-llm", "torch", "transformers", "accelerate")}


def data_facts(recipe: Recipe, rows: Sequence[Masked]) -> dict[str, Any]:
    """What was trained on: counts, and each source with a checksum and what made it."""
    used = rows[: len(rows) - recipe.data.validate_rows]
    return {
        "rows": len(used),
        "tokens": sum(len(row.ids) for row in used),
        "supervised_tokens": sum(sum(row.supervised) for row in used),
        "max_length": recipe.data.max_length,
        "sources": [_source(name, recipe.data.licenses) for name in recipe.data.train],
    }


def _source(name: str, licenses: Mapping[str, str]) -> dict[str, Any]:
    """Name, licence and, of what lies here, sha256, with the provenance.json that `headstart distill` left there."""
    path = Path(name)
    if not path.exists():  # a data set of the Hub
        return {"name": name, "license": licenses.get(name), "sha256": None}
    every = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in every if file.suffix == ".jsonl"] or every
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            while part := data.read(1 << 20):
                digest.update(part)
    license = licenses.get(path.name, licenses.get(name))
    told: dict[str, Any] = {"name": path.name, "license": license, "sha256": digest.hexdigest()}
    beside = (path if path.is_dir() else path.parent) / PROVENANCE
    if (path.is_dir() or path.name == ANSWERS) and beside.is_file():
        told["made_by"] = read_provenance(beside)
    return told


def read_provenance(path: Path) -> dict[str, Any]:
    """What a provenance.json says. Raises ValueError, naming the file, where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also what is no UTF-8
        raise ValueError(
            f"{path} is damaged ({error}): restore it, or delete it and go without what it told"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, an object was expected: restore it, or delete it")
    return found


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
