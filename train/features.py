"""Hidden states of the frozen target: what the heads read and what teaches them.

Legend: B rows, T tokens, F features, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headstart.heads import Batch
from headstart.train.batches import Tokens


class Online(NamedTuple):
    """A batch with features, and the rows left out because theirs were not finite."""

    batch: Batch
    bad: list[int]


@torch.no_grad()
def online(target: Any, tokens: Tokens, wants: Sequence[int]) -> Online:
    """One forward of the target over a right-padded batch. Features [B, T, F] in the order of ``wants``.

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
    features = torch.cat([states[i] for i in wants], dim=-1)
    real = (document >= 0).to(place)
    broken = (~torch.isfinite(features).all(-1) | ~torch.isfinite(states[last]).all(-1)) & real  # [B, T]
    rows = broken.any(1)
    supervised = tokens.supervised.to(place) & ~rows[:, None]
    clean = [torch.where(rows[:, None, None], 0.0, x).to(x.dtype) for x in (features, states[last])]
    bad = [tokens.rows[i] for i in rows.nonzero().flatten().tolist()]
    return Online(Batch(ids.to(place), supervised, document.to(place), *clean), bad)
