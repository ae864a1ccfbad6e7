"""Foreign checkpoint formats: our heads as engines load them, and what others trained as our heads.

A format is rows of names and shapes (``formats_table``), audited both ways before anything is written or made: nothing
missing, nothing unknown. What a layout has no place for is put into what it has, exactly, or refused by name.

| ``--to`` | EAGLE-3 | EAGLE-1/2 | Medusa |
|---|---|---|---|
| vllm | speculators format | fc without bias | one block list, outputs and token_map |
| sglang | flat config | fc with a zero bias | |
| eagle | flat config, the published layers | bias told by the config | |
| medusa | | | FasterDecoding, V1 or V2 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads import formats_eagle, formats_eagle3, formats_eagle3_read, formats_medusa
from headstart.heads.adapter import adapter_notes
from headstart.heads.base import DraftHeads
from headstart.heads.config import target_facts
from headstart.heads.formats_table import Export, audit, read_config, read_tensors, write_folder
from headstart.heads.tie import name_notes
from headstart.heads.vocab import check_draft_ids

Write = Callable[[DraftHeads, Any, str, str], Export]
Read = Callable[[Mapping[str, Any], Mapping[str, Tensor], Any, str, Sequence[int] | None], tuple[DraftHeads, list[str]]]

WRITERS: dict[str, dict[str, Write]] = {
    "vllm": {"eagle3": formats_eagle3.write, "eagle": formats_eagle.write, "medusa": formats_medusa.write},
    "sglang": {"eagle3": formats_eagle3.write, "eagle": formats_eagle.write},
    "eagle": {"eagle3": formats_eagle3.write, "eagle": formats_eagle.write},
    "medusa": {"medusa": formats_medusa.write},
}
"""Formats by name, and the families that they have a layout for."""

EAGLES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM")
ARCHITECTURES = (*EAGLES, "LlamaForCausalLMEagle3", "Eagle3Speculator", "MedusaModel")


def check_format(to: str, family: str) -> Write:
    """The writer of a format for a family. Raises ValueError naming what there is."""
    if to not in WRITERS:
        raise ValueError(f"no format {to!r}; expected one of {', '.join(WRITERS)}")
    if family in WRITERS[to]:
        return WRITERS[to][family]
    others = [name for name, families in WRITERS.items() if family in families]
    where = f"export them to {' or '.join(others)}" if others else "no serving engine does: they run with Headstart"
    raise ValueError(f"the format {to} takes {', '.join(WRITERS[to])} heads and these are {family} heads; {where}")


def export_heads(
    heads: DraftHeads, to: str, out: Path, target: Any = None, base: str | None = None
) -> tuple[list[str], list[str]]:
    """Writes ``heads`` to the folder ``out`` in the format ``to``; returns the files' names and what to know of them.

    ``target`` is needed where the layout holds something of it; ``base`` is the name to write for it. Heads that were
    trained with an adapter need both, the adapter merged into the target. Raises ValueError for what cannot be
    expressed, and where ``out`` holds something.
    """
    write, config = check_format(to, heads.config.family), heads.config
    if config.adapter is not None and (target is None or base is None):
        raise ValueError(
            "these heads were trained together with an adapter on the target, and no engine loads the two as one: "
            "give --target and --adapter: the target is then exported with the adapter merged into it"
        )
    if target is not None:
        known = adapter_notes(config.adapter, target)  # of an adapter in the weights nothing is to be seen
        renamed = name_notes(config.target_name, target_facts(target.config)["target_name"])  # a copy will do
        notes = [note for note in heads.check_target(target) if note not in known + renamed]
        if notes:
            raise ValueError(f"tensors of this target go into the checkpoint: {'; '.join(notes)}. Give the right one")
    name = config.target_name if base is None else base
    found = write(heads, target, name, to)
    audit(found.tensors, found.table, f"the {to} export")
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in found.tensors.values() if t.is_floating_point()})
    if len(kinds) != 1:
        raise ValueError(f"these heads mix the types {kinds}: one was expected")
    described = {**found.config, "torch_dtype": kinds[0]}
    if name == config.target_name and config.target_revision:
        described["base_model_revision"] = config.target_revision  # for people: no engine reads it
    pickled = to == "medusa"  # its own code reads nothing but this
    file = "medusa_lm_head.safetensors" if pickled else "model.safetensors"
    write_folder(out, described, found.tensors, file)
    if pickled:
        torch.save(dict(found.tensors), out / "medusa_lm_head.pt")
    return sorted(path.name for path in out.iterdir()), list(found.notes)


def import_heads(
    folder: Path, target: Any, features: Sequence[int] | None = None, name: str | None = None
) -> tuple[DraftHeads, list[str]]:
    """What others trained for ``target``, as heads of ours in float32, and what to know of them.

    ``features`` are hidden_states indices that EAGLE-3 heads read, where their config does not say; ``name`` is what
    the target is called, None = as its config says. Raises ValueError that names both sides where something is
    missing, unknown or of another target.
    """
    config = read_config(folder)
    if config.get("model_type") == "headstart":
        raise ValueError(f"{folder} holds Headstart heads already: use them as they are, --heads {folder}")
    tensors = read_tensors(folder)
    read = reader(config, tensors, folder.name)
    heads, notes = read(config, tensors, target, folder.name, features)
    if heads.draft_ids is not None:
        check_draft_ids(heads.draft_ids, heads.config.target_vocab_size)
    torch.nn.Module.to(heads, dtype=torch.float32)
    heads.config.target_name = heads.config.target_name if name is None else name
    told = told_base(config)
    if told and heads.config.target_name and told != heads.config.target_name:
        notes.append(f"the folder names {told} as its target, and these heads are now for {heads.config.target_name}")
    return heads, notes


def reader(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Read:
    """Which format a folder has, by its config and by what fc reads. Raises ValueError where it is none of ours."""
    if "hydra_num_heads" in config:
        raise ValueError(f"{where} holds Hydra heads of another project, whose layout is not read")
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return formats_medusa.read
    if "speculators_model_type" in config:
        return formats_eagle3_read.read
    named = config.get("architectures") or []
    known = [name for name in named if name in ARCHITECTURES]
    fc = next((tensor for name, tensor in tensors.items() if name.removeprefix("model.") == "fc.weight"), None)
    if not known or fc is None:
        found = f"architectures {named}" if not known else "no fc.weight among its tensors"
        raise ValueError(
            f"{where} has {found}; known are the EAGLE and Medusa layouts of vLLM, SGLang, speculators, SafeAILab and "
            f"FasterDecoding (architectures {', '.join(ARCHITECTURES)}, or a config with medusa_num_heads)"
        )
    two = fc.dim() == 2 and fc.shape[1] == 2 * fc.shape[0]
    is_three = "draft_vocab_size" in config or "eagle_config" in config or not two
    return formats_eagle3_read.read if is_three else formats_eagle.read


def told_base(config: Mapping[str, Any]) -> str:
    """The target that a folder names."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or config.get("base_model_name_or_path") or "")
