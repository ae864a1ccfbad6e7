"""Hidden states of the frozen target: what the heads read and what teaches them.

Legend: B rows, T tokens, F features, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import Batch
from headstart.train.batches import Tokens
from headstart.train.cache import FeatureCache, Row, row_key


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
            for place, row in enumerate(tokens.rows):
                real = found.batch.document[place] >= 0
                kept = (found.batch.features[place][real].clone(), found.batch.last[place][real].clone())
                self._known[row] = Row(*kept, row in found.bad)
            return found
        known = [self._known[row] for row in tokens.rows]
        return _recalled(tokens, known, known[0].last)

    def _cached(self, tokens: Tokens, cache: FeatureCache) -> Online:
        """From disk where every row is there; else one forward of the whole batch, returned as computed."""
        real = tokens.document >= 0
        keys = [row_key(ids[mask].tolist()) for ids, mask in zip(tokens.tokens, real, strict=True)]
        known = cache.read(keys, self._wants)
        if known is not None:
            return _recalled(tokens, known, self._target.get_input_embeddings().weight)
        began = monotonic()
        found = online(self._target, tokens, cache.layers, cache.dtype)
        states = found.batch.features.view(*real.shape, len(cache.layers), -1)  # [B, T, L, Ht]
        on_cpu = states.to(cache.dtype).cpu()
        rows = [row[mask] for row, mask in zip(on_cpu, real, strict=True)]
        cache.add(keys, rows, [row in found.bad for row in tokens.rows], monotonic() - began)
        features = states[:, :, [cache.layers.index(i) for i in self._wants]].flatten(2)
        return found._replace(batch=found.batch._replace(features=features))


def _recalled(tokens: Tokens, known: Sequence[Row], like: Tensor) -> Online:
    """The batch that ``online`` gave, padded anew, with device and dtype of ``like``."""
    place = like.device
    features = torch.nn.utils.rnn.pad_sequence([row.features for row in known], batch_first=True).to(like)
    last = torch.nn.utils.rnn.pad_sequence([row.last for row in known], batch_first=True).to(like)
    bad = [row for row, k in zip(tokens.rows, known, strict=True) if k.bad]
    good = torch.tensor([not k.bad for k in known])[:, None]
    masks = ((tokens.supervised & good).to(place), tokens.document.to(place))
    return Online(Batch(tokens.tokens.to(place), *masks, features, last), bad)


@torch.no_grad()
def online(target: Any, tokens: Tokens, wants: Sequence[int], kept: torch.dtype | None = None) -> Online:
    """One forward of the target over a right-padded batch. Features [B, T, F] in the order of ``wants``, in the
    target's dtype, rounded to ``kept`` where that is given: what a cache gives back later.

    A row with NaN or infinity in it is not supervised and is named by its place in the training set.
    """
    device = target.get_input_embeddings().weight.device
    ids, document = tokens.tokens.to(device), tokens.document.to(device)
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    out = target(
        input_ids=ids,
        attention_mask=(document >= 0).long(),
        output_hidden_states=sorted({*wants, last}),
        use_cache=False,
        return_dict=True,
        **({"logits_to_keep": 1} if target._supports_logits_to_keep() else {}),
    )
    place = out.logits.device
    states = {i: out.hidden_states[i].to(place) for i in {*wants, last}}
    if kept is not None:
        states = {i: x.to(kept).to(x.dtype) for i, x in states.items()}
    features = torch.cat([states[i] for i in wants], dim=-1)
    real = (document >= 0).to(place)
    broken = (~torch.isfinite(features).all(-1) | ~torch.isfinite(states[last]).all(-1)) & real  # [B, T]
    rows = broken.any(1)
    supervised = tokens.supervised.to(place) & ~rows[:, None]
    left_out = (rows[:, None] | ~real)[:, :, None]  # zeros there: 0 times NaN would reach the gradients
    clean = [torch.where(left_out, 0.0, x).to(x.dtype) for x in (features, states[last])]
    bad = [tokens.rows[i] for i in rows.nonzero().flatten().tolist()]
    return Online(Batch(ids.to(place), supervised, document.to(place), *clean), bad)
