"""Attention of a target whose query heads share keys and values, without a copy of those for every head.

transformers repeats keys and values for each query head as soon as a mask is there, in every layer of every pass; the
longer the text, the more of a pass that is. Here the heads of a group become rows of one attention over what they
share: the same sums.

A model looks its attention up in its config by name, so the name is another one while a forward of ours runs, and
what it was afterwards. What other threads run on the model in that time looks the name up too, and gets the same
function of the same tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headstart.heads.attention import GROUPED_ROWS, grouped

STOCK, NAME = "sdpa", "headstart_grouped"


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: queries [B, h, n, c], keys and values [B, g, S, c] -> [B, n, h, c].

    A masked pass over few rows goes by groups; anything else as "sdpa" does it.
    """
    plain = dropout or any(options.get(name) is not None for name in ("position_bias", "softcap"))
    masked = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == 1
    if plain or not masked or query.shape[2] > GROUPED_ROWS or query.shape[1] == key.shape[1]:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return found
    assert attention_mask is not None
    return grouped(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[STOCK])

_lock = threading.Lock()
_open: dict[int, int] = {}  # forwards under way, by id of the config, which they hold


@contextmanager
def by_groups(model: Any) -> Iterator[None]:
    """The attention of ``model`` by groups while a forward runs, where it has groups and is transformers' "sdpa".

    Threads may be in it together, and nested.
    """
    text = model.config.get_text_config(decoder=True)
    with _lock:
        used = has_groups(model)
        if used:
            _open[id(text)] = _open.get(id(text), 0) + 1
            text._attn_implementation = NAME
    try:
        yield
    finally:
        if used:
            with _lock:
                _open[id(text)] -= 1
                if not _open[id(text)]:
                    del _open[id(text)]
                    if text._attn_implementation == NAME:
                        text._attn_implementation = STOCK


def has_groups(model: Any) -> bool:
    """Whether ``by_groups`` changes anything for this model."""
    text = model.config.get_text_config(decoder=True)
    heads, shared = (getattr(text, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    several = isinstance(heads, int) and isinstance(shared, int) and shared < heads
    looked_up = bool(getattr(model, "_supports_attention_backend", False))  # attention found by its name in the config
    return several and looked_up and attention_of(model) == STOCK


def attention_of(model: Any) -> str | None:
    """The name of a model's attention outside of any forward of ours."""
    found: str | None = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    return STOCK if found == NAME else found
