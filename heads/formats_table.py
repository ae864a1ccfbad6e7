"""Rows of names and shapes, the audit of a checkpoint against them, and the files checkpoints lie in."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "medusa_lm_head.pt")
"""Where tensors are looked for: the first pattern that finds files counts. Pickles are read as plain tensors only."""


class Row(NamedTuple):
    """One line of a format: tensors that exist once, or for every value of the letters in their name."""

    name: str  # theirs; {k} runs over range(sizes["k"])
    shape: tuple[str, ...]  # names of sizes
    ours: str | None = None  # our tensor, with the same letters; None = made when writing
    dtype: torch.dtype | None = None  # None = any floating one
    when: str = ""  # a size: where it is 0, the row is not there


class Tensors(NamedTuple):
    """A row for one value of its letters."""

    shape: tuple[int, ...]
    ours: str | None
    dtype: torch.dtype | None


class Export(NamedTuple):
    """What goes into a folder, and what its user should know."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    table: dict[str, Tensors]
    notes: tuple[str, ...] = ()


def expand(rows: Iterable[Row], sizes: Mapping[str, int]) -> dict[str, Tensors]:
    """The rows of heads of these sizes: tensor names -> what is expected of them."""
    table = {}
    for row in rows:
        if row.when and not sizes[row.when]:
            continue
        letters = [letter for _, letter, _, _ in Formatter().parse(row.name) if letter]
        for values in product(*(range(sizes[letter]) for letter in letters)):
            at = dict(zip(letters, values, strict=True))
            ours = None if row.ours is None else row.ours.format(**at)
            table[row.name.format(**at)] = Tensors(tuple(sizes[size] for size in row.shape), ours, row.dtype)
    return table


def audit(tensors: Mapping[str, Tensor], table: Mapping[str, Tensors], where: str) -> None:
    """Raises ValueError that lists every missing, unknown, misshapen, mistyped or not finite tensor of ``where``."""
    wrong = [f"missing: {name} {row.shape}" for name, row in table.items() if name not in tensors]
    wrong += [f"unknown: {name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if name not in table]
    for name in (name for name in table if name in tensors):
        tensor, row = tensors[name], table[name]
        if tuple(tensor.shape) != row.shape:
            wrong.append(f"misshapen: {name} is {tuple(tensor.shape)}, expected {row.shape}")
        if tensor.dtype != row.dtype if row.dtype else not tensor.is_floating_point():
            wrong.append(f"mistyped: {name} is {tensor.dtype}, expected {row.dtype or 'a floating type'}")
        elif tensor.is_floating_point() and not tensor.isfinite().all():
            wrong.append(f"not finite: {name}")
    if wrong:
        raise ValueError(f"the tensors of {where} are not those its config describes:\n  " + "\n  ".join(wrong))


def named_as_theirs(state: Mapping[str, Tensor], table: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """Our tensors by their names; those that are made when writing are left to the caller."""
    return {name: state[row.ours] for name, row in table.items() if row.ours is not None and row.ours in state}


def named_as_ours(tensors: Mapping[str, Tensor], table: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """Audited tensors by our names."""
    return {row.ours: tensors[name] for name, row in table.items() if row.ours is not None}


# the draft vocabulary -----------------------------------------------------------------------------------------------


def vocabulary_tables(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Target ids [D] -> d2t [D] int64, the offset of each target id from its draft id, and t2d [V] bool, membership."""
    ids = draft_ids.cpu()
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids] = True
    return {"d2t": ids - torch.arange(ids.numel()), "t2d": member}


def draft_ids_of(tables: Mapping[str, Tensor], vocab_size: int, where: str) -> Tensor:
    """Target ids [D] of audited ``d2t`` [D] and, where it is there, ``t2d`` [V]. Raises ValueError where they leave the
    vocabulary or contradict each other."""
    offsets = tables["d2t"]
    ids = offsets + torch.arange(offsets.numel())
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise ValueError(
            f"d2t of {where} leads to token {int(outside[0])}, the target has {vocab_size}: it holds offsets, target "
            "id = draft id + d2t; these tables are of another target, or hold target ids"
        )
    if "t2d" in tables:
        members = tables["t2d"].nonzero().squeeze(1)
        if not torch.equal(members, ids.sort().values):
            both = f"t2d has {members.numel()} tokens, d2t {ids.numel()}"
            raise ValueError(f"d2t and t2d of {where} do not name the same tokens ({both}): they are of other heads")
    return ids


# files --------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ValueError where there is none that can be read."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json: expected the folder of a draft model, as published")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON, get it again: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {type(config).__name__}, expected an object")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, on the CPU. Raises ValueError where there are none, or a file is damaged."""
    files = next((found for pattern in WEIGHTS if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise ValueError(f"{folder} holds no weights; expected {' or '.join(WEIGHTS)}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded = (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            what = "damaged, cut short or no file of plain tensors"
            raise ValueError(f"{file} is {what}, get it again: {error}") from error
        if not isinstance(loaded, dict):
            raise ValueError(f"{file} holds {type(loaded).__name__}, expected tensors by name")
        strange = sorted(key for key, value in loaded.items() if not isinstance(value, Tensor))
        if strange:
            raise ValueError(f"{file} holds more than tensors: {strange}")
        tensors |= loaded
    return tensors


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str) -> None:
    """config.json and the tensors in ``file``. Raises ValueError where the folder holds something already, which an
    engine might read along."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: an engine might read what lies there; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
