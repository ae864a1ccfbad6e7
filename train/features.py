"""Hidden states of the frozen target: what the heads read and what teaches them.

Legend: B rows, T tokens, F features, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import Batch
from headstart.train.batches import Tokens


class Online(NamedTuple):
    """A batch with features, and the rows left out because theirs were not finite."""

    batch: Batch
    bad: list[int]


class Features:
    """Features of batches: a forward of the target each time, or, with ``remember``, once a row.

    What is remembered lies in memory in the target's dtype, 2 to 4 bytes a number: F + Ht numbers a token.
    """

    def __init__(self, target: Any, wants: Sequence[int], *, remember: bool = False) -> None:
        self._target, self._wants, self._remember = target, list(wants), remember
        self._known: dict[int, tuple[Tensor, Tensor, bool]] = {}  # row -> features [t, F], last [t, Ht], not finite

    def __call__(self, tokens: Tokens) -> Online:
        """The batch with features [B, T, F] in the order of ``wants``.

        A row with NaN or infinity in it is not supervised and is named by its place in the training set.
        """
        if not self._remember:
            return online(self._target, tokens, self._wants)
        if any(row not in self._known for row in tokens.rows):
            found = online(self._target, tokens, self._wants)
            for place, row in enumerate(tokens.rows):
                real = found.batch.document[place] >= 0
                kept = (found.batch.features[place][real].clone(), found.batch.last[place][real].clone())
                self._known[row] = (*kept, row in found.bad)
            return found
        return self._recalled(tokens)

    def _recalled(self, tokens: Tokens) -> Online:
        known = [self._known[row] for row in tokens.rows]
        features = torch.nn.utils.rnn.pad_sequence([f for f, _, _ in known], batch_first=True)
        last = torch.nn.utils.rnn.pad_sequence([h for _, h, _ in known], batch_first=True)
        bad = [row for row, k in zip(tokens.rows, known, strict=True) if k[2]]
        place = last.device
        good = torch.tensor([not k[2] for k in known])[:, None]
        masks = ((tokens.supervised & good).to(place), tokens.document.to(place))
        return Online(Batch(tokens.tokens.to(place), *masks, features, last), bad)


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
    left_out = (rows[:, None] | ~real)[:, :, None]  # zeros there: 0 times NaN would reach the gradients
    clean = [torch.where(left_out, 0.0, x).to(x.dtype) for x in (features, states[last])]
    bad = [tokens.rows[i] for i in rows.nonzero().flatten().tolist()]
    return Online(Batch(ids.to(place), supervised, document.to(place), *clean), bad)
