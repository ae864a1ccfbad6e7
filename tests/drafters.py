"""Every source of guesses the lossless suites run with; a new family or drafter joins by one line in SOURCES."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads import FAMILIES, DraftHeads
from headstart.infer.draft_heads import HeadsSource
from headstart.infer.draft_model import DraftModel
from headstart.infer.grow import Sampling, Shape
from tests.toys import Scripted


@dataclass(frozen=True)
class ScriptedSource:
    """A scripted drafter as a Source."""

    make: Callable[[Any], Scripted]
    name: str = "scripted"
    depth: int = 4
    wants: tuple[int, ...] = ()

    def check(self, model: Any) -> list[str]:
        return []

    chain = False

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Scripted:
        return self.make(model)


def oracle(model: Any, depth: int = 4, **options: Any) -> ScriptedSource:
    """Right child at a random sibling place among decoys that have children of their own."""
    return ScriptedSource(_sharing(depth=depth, **options), "oracle", depth)


def replay(text: Tensor, depth: int = 4, **options: Any) -> ScriptedSource:
    """Knows the text [P + new] to come, sampled or not; among decoys, as the oracle."""
    return ScriptedSource(lambda m: Scripted.replay(m, text.tolist(), depth=depth, **options), "replay", depth)


def adversary(model: Any) -> ScriptedSource:
    """Never right."""
    return ScriptedSource(_sharing(depth=4, right=False), "adversary")


def _sharing(**options: Any) -> Callable[[Any], Scripted]:
    """Drafters of one source share what they found out about the target: it is asked once for a text."""
    known: dict[tuple[int, ...], int] = {}

    def make(model: Any) -> Scripted:
        drafter = Scripted(model, **options)
        drafter.known = known
        return drafter

    return make


def untrained(family: str, **options: Any) -> Callable[[Any], DraftHeads]:
    """Fresh heads, as precise as the target."""

    def make(model: Any) -> DraftHeads:
        heads = FAMILIES[family].from_target(model, **options)
        torch.nn.Module.to(heads, dtype=model.dtype)
        return heads

    return make


def shaped(model: Any) -> HeadsSource:
    """Fresh heads that fill one fixed shape."""
    return HeadsSource(untrained("medusa")(model), shape=Shape.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]))


def smaller(model: Any) -> Any:
    """The target's first layers as a draft model: right now and then."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    small = type(model)(config).eval().to(model.dtype)
    small.load_state_dict(model.state_dict(), strict=False)
    return small


SOURCES: dict[str, Callable[[Any], Any]] = {
    "oracle": oracle,
    "adversary": adversary,
    "medusa": untrained("medusa"),
    "medusa-draft-vocabulary": untrained("medusa", draft_ids=torch.arange(2, 320, 3)),
    "medusa-two-layers": untrained("medusa", num_draft_layers=2, num_draft_heads=2),
    "medusa-shape": shaped,
    "hydra": untrained("hydra"),
    "eagle": untrained("eagle"),
    "eagle3": untrained("eagle3"),
    "eagle3-draft-vocabulary": untrained("eagle3", draft_ids=torch.arange(2, 320, 3)),
    "prompt-lookup": lambda model: "prompt-lookup",
    "token-recycling": lambda model: "token-recycling",
    "draft-model": lambda model: DraftModel(smaller(model)),
    "draft-model-tree": lambda model: DraftModel(smaller(model), width=3, branch=3, depth=4),
    "draft-model-is-the-target": lambda model: DraftModel(copy.deepcopy(model), depth=3),
    "lookahead": lambda model: "lookahead",
    "medusa-and-prompt-lookup": lambda model: ["prompt-lookup", untrained("medusa")(model)],
}
