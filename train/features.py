"""Hidden states of the frozen target: what the heads read and what teaches them.

Legend: B lines, T tokens of a line, F features, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import Batch
from headstart.heads.attention import tree_mask
from headstart.heads.batch import positions
from headstart.infer.checks import bare, check_length, check_target
from headstart.infer.target import attention_windows, compute_dtype
from headstart.train.batches import Tokens, apart
from headstart.train.cache import FeatureCache, Row, row_key

PROBES = 3  # micro-batches that tell how long filling a cache will take; the first of them only warms up


class Online(NamedTuple):
    """A batch with features, and the rows left out because theirs were not finite."""

    batch: Batch
    bad: list[int]


class Features:
    """Features of batches: a forward of the target each time, or, with ``remember`` or a ``cache``, once a row.

    What is remembered lies in memory in the target's dtype, 2 to 4 bytes a number: F + Ht numbers a token. A ``cache``
    lies on disk; whoever opened it closes it.
    """

    def __init__(
        self, target: Any, wants: Sequence[int], *, remember: bool = False, cache: FeatureCache | None = None
    ) -> None:
        if remember and cache is not None:
            raise ValueError("features are remembered in memory or cached on disk, not both")
        self._target, self._wants, self._remember, self._cache = target, list(wants), remember, cache
        self._known: dict[int, Row] = {}  # by place in the training set

    def __call__(self, tokens: Tokens) -> Online:
        """The batch with features [B, T, F] in the order of ``wants``.

        A row with NaN or infinity in it is not supervised and is named by its place in the training set.
        """
        if self._cache is not None:
            return self._cached(tokens, self._cache)
        if not self._remember:
            return online(self._target, tokens, self._wants)
        if any(row not in self._known for row in tokens.rows):
            found = online(self._target, tokens, self._wants)
            self._known |= dict(zip(tokens.rows, _rows(tokens, found), strict=True))
            return found
        known = [self._known[row] for row in tokens.rows]
        return _recalled(tokens, known, known[0].last)

    def foresee(self, micro_batches: Iterable[Tokens]) -> str:
        """How long the forwards will take that the cache still needs, in a line; "" where too few are missing.

        Computes the first few of ``micro_batches`` that are missing, and keeps them.
        """
        assert self._cache is not None
        spent: list[tuple[int, float]] = []
        for tokens in micro_batches:
            if len(spent) == PROBES or self._cache.missing <= 0:
                break
            if not all(key in self._cache for key in _keys(tokens)):
                began = monotonic()
                self._cached(tokens, self._cache)
                spent.append((int((tokens.document >= 0).sum()), monotonic() - began))
        if len(spent) < PROBES or self._cache.missing <= 0:
            return ""
        rate = sum(n for n, _ in spent[1:]) / max(sum(seconds for _, seconds in spent[1:]), 1e-9)
        left = self._cache.missing / rate
        told = f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"
        return f"feature cache: {rate:.0f} tokens/s, {told} of forwards ahead for one process"

    def _cached(self, tokens: Tokens, cache: FeatureCache) -> Online:
        """From disk where every row is there; else one forward of the whole batch, returned as computed."""
        keys = _keys(tokens)
        known = cache.read(keys, self._wants)
        if known is not None:
            return _recalled(tokens, known, self._target.get_input_embeddings().weight)
        found = online(self._target, tokens, cache.layers, cache.dtype)
        states = found.batch.features.view(*tokens.document.shape, len(cache.layers), -1)  # [B, T, L, Ht]
        on_cpu = states.to(cache.dtype).cpu()
        rows = [on_cpu[tokens.document == i] for i in range(len(tokens.rows))]
        cache.add(keys, rows, [row in found.bad for row in tokens.rows])
        features = states[:, :, [cache.layers.index(i) for i in self._wants]].flatten(2)
        return found._replace(batch=found.batch._replace(features=features))


def _keys(tokens: Tokens) -> list[str]:
    """The names of a batch's documents in a cache."""
    return [row_key(tokens.tokens[tokens.document == i].tolist()) for i in range(len(tokens.rows))]


def _rows(tokens: Tokens, found: Online) -> list[Row]:
    """What was found of each document of a batch."""
    own = (found.batch.document == i for i in range(len(tokens.rows)))
    bad = (row in found.bad for row in tokens.rows)
    return [Row(found.batch.features[mask], found.batch.last[mask], b) for mask, b in zip(own, bad, strict=True)]


def _recalled(tokens: Tokens, known: Sequence[Row], like: Tensor) -> Online:
    """The batch that ``online`` gave, laid out anew, with device and dtype of ``like``; ``known`` of each document."""
    document = tokens.document.to(known[0].last.device)
    laid = [x.new_zeros(*document.shape, x.shape[-1]) for x in known[0][:2]]
    for i, row in enumerate(known):
        mine = document == i
        laid[0][mine], laid[1][mine] = row.features, row.last
    hit = torch.tensor([i for i, row in enumerate(known) if row.bad], dtype=torch.int64)
    spoiled = torch.isin(tokens.document, hit)
    masks = ((tokens.supervised & ~spoiled).to(like.device), tokens.document.to(like.device))
    bad = [row for row, k in zip(tokens.rows, known, strict=True) if k.bad]
    return Online(Batch(tokens.tokens.to(like.device), *masks, *(x.to(like) for x in laid)), bad)


@torch.no_grad()
def online(target: Any, tokens: Tokens, wants: Sequence[int], kept: torch.dtype | None = None) -> Online:
    """One forward of the target over a right-padded or packed batch. Features [B, T, F] in the order of ``wants``, in
    the target's dtype, rounded to ``kept`` where that is given: what a cache gives back later.

    A row with NaN or infinity in it is not supervised and is named by its place in the training set.
    """
    device = target.get_input_embeddings().weight.device
    ids, document = tokens.tokens.to(device), tokens.document.to(device)
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    several = holds_several(tokens.document)
    out = target(
        input_ids=ids,
        output_hidden_states=sorted({*wants, last}),
        use_cache=False,
        return_dict=True,
        **kept_apart(target, document, several),
        **({"logits_to_keep": 1} if target._supports_logits_to_keep() else {}),
    )
    place = out.logits.device
    states = {i: out.hidden_states[i].to(place) for i in {*wants, last}}
    if kept is not None:
        states = {i: x.to(kept).to(x.dtype) for i, x in states.items()}
    features, document = torch.cat([states[i] for i in wants], dim=-1), document.to(place)
    real = document >= 0
    broken = (~torch.isfinite(features).all(-1) | ~torch.isfinite(states[last]).all(-1)) & real  # [B, T]
    hit = sorted(set(document[broken].tolist()))
    if several and hit:  # a NaN reaches its neighbours, as attention to them weighs 0 and 0 times NaN is NaN
        alone = apart(tokens)
        return _recalled(tokens, _rows(alone, online(target, alone, wants, kept)), states[last])
    spoiled = torch.isin(document, torch.tensor(hit, dtype=torch.int64, device=place))  # [B, T]
    left_out = (spoiled | ~real)[:, :, None]  # zeros there: 0 times NaN would reach the gradients
    clean = [torch.where(left_out, 0.0, x).to(x.dtype) for x in (features, states[last])]
    bad = [tokens.rows[i] for i in hit]
    return Online(Batch(ids.to(place), tokens.supervised.to(place) & ~spoiled, document, *clean), bad)


def holds_several(document: Tensor) -> bool:
    """Whether a line of [B, T] holds more than one document."""
    return bool(((document[:, 1:] != document[:, :-1]) & (document[:, 1:] >= 0)).any())


def kept_apart(target: Any, document: Tensor, several: bool) -> dict[str, Any]:
    """Arguments of a forward of ``target`` in which the documents [B, T] do not see each other.

    Where a line holds ``several`` of them, an additive mask for each kind of layer, as for trees, and positions that
    begin anew: what a stock model makes of positions alone depends on its attention.
    """
    if not several:
        return {"attention_mask": (document >= 0).long()}
    (rows, width), place = document.shape, positions(document)
    index = torch.arange(width, device=document.device)
    seen = (document[:, :, None] == document[:, None]) & (index[:, None] >= index)  # padding sees padding: no empty row
    none, dtype = place.new_zeros(rows), compute_dtype(target)
    masks = {
        kind: tree_mask(seen, place, none, width, window, dtype, chunks=kind == "chunked_attention")
        for kind, window in attention_windows(target.config.get_text_config(decoder=True)).items()
    }
    return {"attention_mask": masks if len(masks) > 1 else next(iter(masks.values())), "position_ids": place}


def check_packing(target: Any, capacity: int) -> list[str]:
    """Raises ValueError where ``target`` cannot keep documents in a line of ``capacity`` tokens apart.

    Returns what a user should know: attention without masks of its own is switched, on the model, to one that has them.
    """
    model = bare(target)
    try:
        notes = check_target(model)
        check_length(model, capacity, 1)
    except ValueError as error:
        raise ValueError(
            f"data.packing needs a target that takes masks and positions as for a tree of guesses: {error}. Set "
            "data.packing=false"
        ) from error
    return notes
