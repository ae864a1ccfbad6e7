"""What is trained, and nothing else: prediction heads, their losses and their file format."""

from __future__ import annotations

from typing import Any

from headstart.heads.base import DraftHeads
from headstart.heads.batch import Batch, Losses
from headstart.heads.config import HeadsConfig
from headstart.heads.eagle import Eagle
from headstart.heads.eagle3 import Eagle3
from headstart.heads.hydra import Hydra
from headstart.heads.medusa import Medusa
from headstart.heads.tie import Tie

FAMILIES: dict[str, type[DraftHeads]] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "eagle": Eagle,
    "eagle3": Eagle3,
}
"""Every family by name: a new one is a file in this folder and a line here."""


def family(name: str) -> type[DraftHeads]:
    """The class of a family. Raises ValueError naming the known ones."""
    if name not in FAMILIES:
        raise ValueError(f"unknown head family {name!r}; known are {sorted(FAMILIES)}")
    return FAMILIES[name]


def load_heads(source: str, **kwargs: Any) -> DraftHeads:
    """Heads of whatever family ``source`` (a folder or Hub id) holds; keywords as in ``from_pretrained``."""
    passed = {k: kwargs[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in kwargs}
    config = HeadsConfig.from_pretrained(source, **passed)
    if not config.family:
        raise ValueError(f"{source} has a config but no 'family' in it: it holds no Headstart heads")
    config.check_format()  # before the family, which a later release may have added
    if commit := getattr(config, "_commit_hash", None):
        kwargs["revision"] = commit  # the weights of the same commit, whatever is pushed in between
    return family(config.family).from_pretrained(source, **kwargs)


__all__ = [
    "FAMILIES",
    "Batch",
    "DraftHeads",
    "Eagle",
    "Eagle3",
    "HeadsConfig",
    "Hydra",
    "Losses",
    "Medusa",
    "Tie",
    "family",
    "load_heads",
]
