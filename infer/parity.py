"""Whether a text that differs from plain decoding differs by a near tie or by a bug.

In half precision a forward over many rows and one over a single row round differently, so where the two best tokens
are close, either may win. That is honest only if it is checked: here, at the first difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """The first place where two texts part."""

    position: int  # index into the new tokens
    plain: int  # what plain decoding wrote there
    fast: int  # what the other wrote
    margin: float  # logit of the plain token minus logit of the other, in a one-row forward
    noise: float  # largest difference of any logit between a one-row forward and a forward over the whole prefix

    @property
    def near_tie(self) -> bool:
        """Rounding of the size seen here can turn the order of the two tokens around."""
        return abs(self.margin) <= 2 * self.noise

    def __str__(self) -> str:
        verdict = "near tie" if self.near_tie else "NOT a near tie: a bug"
        return f"{verdict} at token {self.position}: margin {self.margin:.3g}, rounding up to {self.noise:.3g}"


@torch.no_grad()
def first_difference(model: Any, prompt: Tensor, plain: Tensor, fast: Tensor) -> Difference | None:
    """Where greedy texts ``plain`` [P + a] and ``fast`` [P + b] of one prompt [P] part; None where they are equal."""
    start, length = prompt.shape[0], min(plain.shape[0], fast.shape[0])
    unequal = (plain[:length] != fast[:length]).nonzero()
    if not len(unequal):
        if plain.shape == fast.shape:
            return None
        raise ValueError(f"one text goes on where the other has ended, after {length - start} equal tokens: a bug")
    at = int(unequal[0])
    prefix = plain[None, :at]
    whole = model(input_ids=prefix).logits[0, -1].float()
    out = model(input_ids=prefix[:, :-1], use_cache=True) if at > 1 else None
    last = prefix[:, -1:] if out is not None else prefix
    single = model(input_ids=last, cache=None if out is None else out.cache, use_cache=True).logits[0, -1].float()
    a, b = int(plain[at]), int(fast[at])
    noise = float((single - whole).abs().max())
    return Difference(at - start, a, b, float(single[a] - single[b]), noise)
