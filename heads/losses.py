"""Divergences between the target's next-token law and a head's, in float32, one value a row.

Legend: R rows, D draft vocabulary. ``p`` is the target's law restricted to the draft vocabulary and *not*
renormalised: what the head cannot say weighs nothing, so a row whose mass lies outside pulls little.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]


def soft_cross_entropy(p: Tensor, logits: Tensor) -> Tensor:
    """-sum_v p_v log q_v: target law [R, D], draft logits [R, D] -> [R] float32."""
    return -(p.float() * torch.log_softmax(logits.float(), dim=-1)).sum(-1)


def forward_kl(p: Tensor, logits: Tensor) -> Tensor:
    """sum_v p_v (log p_v - log q_v): same gradient as the cross entropy, zero where the laws agree. [R] float32."""
    p = p.float()
    negative_entropy: Tensor = torch.special.xlogy(p, p).sum(-1)
    return negative_entropy + soft_cross_entropy(p, logits)


def acceptance(p: Tensor, logits: Tensor) -> Tensor:
    """alpha = sum_v min(p_v, q_v), the chance that one sampled guess is kept (Leviathan et al.). [R] float32."""
    return torch.minimum(p.float(), torch.softmax(logits.float(), dim=-1)).sum(-1)


def acceptance_loss(p: Tensor, logits: Tensor) -> Tensor:
    """-log alpha: what sampling accepts, and nothing else. [R] float32."""
    return -torch.log(acceptance(p, logits).clamp(min=1e-6))


def hybrid(p: Tensor, logits: Tensor, eta: float = 3.0) -> Tensor:
    """lambda KL + (1 - lambda) (1 - alpha) with lambda = exp(-eta alpha), not differentiated: far from the target the
    KL pulls, near it acceptance itself counts (LK, eta as published). [R] float32."""
    alpha = acceptance(p, logits)
    weight = torch.exp(-eta * alpha.detach())
    return weight * forward_kl(p, logits) + (1 - weight) * (1 - alpha)


DIVERGENCES: dict[str, Divergence] = {
    "soft_ce": soft_cross_entropy,
    "kl": forward_kl,
    "lk_alpha": acceptance_loss,
    "lk": hybrid,
}
