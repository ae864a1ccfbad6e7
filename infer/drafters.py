"""Where guesses come from: what a Speculator may be given, made into a Source.

A new source of guesses that needs no weights is a file draft_x.py and a line in DRAFTERS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from headstart.heads import DraftHeads
from headstart.infer.draft_heads import HeadsSource
from headstart.infer.draft_lookahead import Lookahead
from headstart.infer.draft_merge import Merged
from headstart.infer.draft_model import DraftModel
from headstart.infer.draft_ngram import PromptLookup, TokenRecycling
from headstart.infer.drafter import Source

DRAFTERS: dict[str, Callable[..., Source]] = {
    "prompt-lookup": PromptLookup,
    "token-recycling": TokenRecycling,
    "lookahead": Lookahead,
}
"""Sources of guesses that need no weights, by name."""


def source_of(source: Any, options: dict[str, Any]) -> Source:
    """What a Speculator was given as a Source; a list becomes a merge. Raises ValueError naming what is known."""
    if isinstance(source, (list, tuple)):
        share = {"share": options.pop("share")} if "share" in options else {}
        if options and not any(isinstance(part, DraftHeads) for part in source):
            raise ValueError(f"options {sorted(options)} belong to heads, and there are none in this merge")
        return Merged(
            tuple(source_of(part, options if isinstance(part, DraftHeads) else {}) for part in source), **share
        )
    make: Callable[..., Source] | None = HeadsSource if isinstance(source, DraftHeads) else None
    if make is None and isinstance(source, PreTrainedModel):
        make = DraftModel
    if isinstance(source, str):
        if source not in DRAFTERS:
            raise ValueError(f"unknown drafter {source!r}; known are {sorted(DRAFTERS)}, or heads in memory")
        make = DRAFTERS[source]
    if make is None:
        if options:
            raise ValueError(f"options {sorted(options)} belong to heads or a named drafter; this is a made Source")
        return source  # type: ignore[no-any-return]
    known = [f.name for f in dataclasses.fields(make) if f.name not in ("heads", "model", "name", "wants")]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown options {unknown}; known here are {sorted(known)}")
    return make(**options) if isinstance(source, str) else make(source, **options)


def check_shapes(source: Source, nodes: int) -> None:
    """Raises ValueError where a fixed shape has more nodes than its source may fill."""
    parts = source.sources if isinstance(source, Merged) else (source,)
    for place, part in enumerate(parts):
        shape = getattr(part, "shape", None)
        room = source.first(nodes) if isinstance(source, Merged) and place == 0 else nodes
        if shape is not None and len(shape.parents) > room:
            raise ValueError(
                f"the shape has {len(shape.parents)} nodes, {part.name} may fill {room} of nodes={nodes} here: raise "
                "nodes (in a merge also share), or take nodes out of the shape"
            )
