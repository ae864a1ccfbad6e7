"""Whether a text that differs from plain decoding differs by a near tie or by a bug.

In half precision a forward over many rows and one over a single row round differently, so where the two best tokens
are close, either may win. That is honest only if it is checked: here, at the first difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.infer.target import Target, compute_dtype
from headstart.infer.tree import DraftTree

ROWS = 8  # of the passes that steps are compared with
# Most that rounding makes of a logit, in units of the dtype's epsilon times the largest logit; several times what a
# 30-layer model shows (1.3 in bfloat16, 1.2e-4 in float32). What is above that is another computation.
ROUNDING = {torch.bfloat16: 32.0, torch.float16: 64.0}
ROUNDING_OTHERS = 1024.0


class Difference(NamedTuple):
    """The first place where two texts part."""

    position: int  # index into the new tokens
    plain: int  # what plain decoding wrote there
    fast: int  # what the other wrote
    margin: float  # logit of the plain token minus logit of the other, in a one-token step
    noise: float  # largest difference of any logit between steps and passes of several rows, over the text up to there
    limit: float = float("inf")  # more than this is no rounding: steps and passes compute different things

    @property
    def near_tie(self) -> bool:
        """Rounding of the size seen here can turn the order of the two tokens around, and it is rounding."""
        return abs(self.margin) <= 2 * self.noise and self.noise <= self.limit

    def __str__(self) -> str:
        verdict = "near tie" if self.near_tie else "NOT a near tie: a bug"
        if self.noise > self.limit:
            verdict += f" (passes differ from steps by more than rounding, which is below {self.limit:.3g})"
        return f"{verdict} at token {self.position}: margin {self.margin:.3g}, rounding up to {self.noise:.3g}"


@torch.no_grad()
def first_difference(model: Any, prompt: Tensor, plain: Tensor, fast: Tensor) -> Difference | None:
    """Where greedy texts ``plain`` [P + a] and ``fast`` [P + b] of one prompt [P] part; None where they are equal.

    Rounding is what one-token steps and passes of several rows differ by over the text before that place, keys and
    values included, which each computes its own way.
    """
    start, length = prompt.shape[0], min(plain.shape[0], fast.shape[0])
    unequal = (plain[:length] != fast[:length]).nonzero()
    if not len(unequal):
        if plain.shape == fast.shape:
            return None
        raise ValueError(f"one text goes on where the other has ended, after {length - start} equal tokens: a bug")
    at = int(unequal[0])
    a, b = int(plain[at]), int(fast[at])
    noise, margin, largest = 0.0, 0.0, 0.0
    text = plain[: at + 1 + ROWS]  # some tokens more, so that the pass over the place in question is a full one
    for place, (step, wide) in enumerate(_both_ways(model, text, start, ROWS), start):
        noise, largest = max(noise, float((step - wide).abs().max())), max(largest, float(step.abs().max()))
        margin = float(step[a] - step[b]) if place == at else margin
    dtype = compute_dtype(model)
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # logits are compared in float32
    limit = ROUNDING.get(dtype, ROUNDING_OTHERS) * eps * largest
    return Difference(at - start, a, b, margin, noise, limit)


class Ledger(NamedTuple):
    """Plain steps and passes over several rows, position by position, over one text whose tokens are given."""

    positions: int
    flips: int  # positions where the two say another token
    noise: float  # largest difference of any logit
    margin: float  # largest margin, in the plain step, of the token it prefers over the other's, where they flip
    variation: float  # largest total variation between the two laws

    @property
    def bugs(self) -> bool:
        """A flip where the plain step was surer than rounding explains."""
        return self.margin > 2 * self.noise

    def __str__(self) -> str:
        verdict = "NOT all near ties: a bug" if self.bugs else "all near ties" if self.flips else "none"
        return (
            f"{self.flips} flips in {self.positions} positions ({verdict}); largest margin of one {self.margin:.3g}, "
            f"rounding up to {self.noise:.3g}, total variation up to {self.variation:.3g}"
        )


@torch.no_grad()
def ledger(model: Any, text: Tensor, start: int, width: int = 8) -> Ledger:
    """One-token steps against passes of ``width`` rows, at every position of text [P + T] from ``start`` = P on."""
    flips, noise, margin, variation = 0, 0.0, 0.0, 0.0
    for step, wide in _both_ways(model, text, start, width):
        noise = max(noise, float((step - wide).abs().max()))
        variation = max(variation, float((step.softmax(-1) - wide.softmax(-1)).abs().sum()) / 2)
        ours, theirs = int(wide.argmax()), int(step.argmax())
        if ours != theirs:
            flips, margin = flips + 1, max(margin, float(step[theirs] - step[ours]))
    return Ledger(text.shape[0] - start, flips, noise, margin, variation)


def _both_ways(model: Any, text: Tensor, start: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each token of text [P + T] from ``start`` = P on, the logits [V] before it: by a step, by a pass."""
    plain = model(input_ids=text[None, : start - 1], use_cache=True) if start > 1 else None
    cache = None if plain is None else plain.cache
    target = Target(model)
    for _ in target.prefill(text[None], torch.tensor([start], device=text.device)):
        pass
    places = range(start - 1, text.shape[0] - 1)
    for begin in range(places.start, places.stop, width):
        rows = text[None, begin : min(begin + width, places.stop)]
        parents = torch.arange(-1, rows.shape[1] - 1, device=text.device)[None]
        passed = target.verify(DraftTree(rows, parents, torch.ones_like(rows, dtype=torch.bool))).logits[0].float()
        for place, row in enumerate(rows[0]):
            out = model(input_ids=row[None, None], cache=cache, use_cache=True)
            cache = out.cache
            yield out.logits[0, -1].float(), passed[place]
        target.cache.advance([rows.shape[1]])
