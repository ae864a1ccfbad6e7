"""Adapters on the target that heads were trained together with: told by their tensors alone, without PEFT."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def lora_tensors(target: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The LoRA tensors on ``target``, by adapter and by place, the same inside a PeftModel and without it."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in target.named_parameters():
        parts = name.removeprefix("base_model.model.").split(".")
        at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), len(parts))
        if at + 1 < len(parts):  # layer . lora_A . adapter . weight
            found.setdefault(parts[at + 1], {})[".".join(parts[: at + 1] + parts[at + 2 :])] = tensor
    return found


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Names a set of tensors; the same whether they are kept in float32 or bfloat16."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().bfloat16().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def adapter_notes(wanted: str | None, target: Any) -> list[str]:
    """What a user should know where heads go with the adapter of digest ``wanted`` and ``target`` does not show it.

    An adapter that was merged into the weights shows nowhere.
    """
    if wanted is None:
        return []
    carried = lora_tensors(target)
    if wanted in map(digest, carried.values()):
        return []
    has = "carries another one" if carried else "carries none, unless it was merged into the weights"
    return [
        f"the heads were trained together with an adapter on the target, and this target {has}: the text stays exactly "
        "this target's, but without that adapter fewer guesses will be accepted"
    ]
