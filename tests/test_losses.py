"""Divergences against float64, and the draft vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.heads.losses import (
    DIVERGENCES,
    acceptance,
    acceptance_loss,
    forward_kl,
    hybrid,
    soft_cross_entropy,
)
from headstart.heads.vocab import choose, count_tokens, coverage


def test_closed_forms() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]])
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert soft_cross_entropy(p, logits).item() == pytest.approx(0.5 * 1.3862944 + 0.25 * 0.6931472 + 0.25 * 1.3862944)
    assert forward_kl(p, p.log()).item() == pytest.approx(0.0, abs=1e-6)
    assert acceptance(p, logits).item() == pytest.approx(0.75)


def exactly(name: str, p: Tensor, logits: Tensor) -> Tensor:
    """The divergences again, in the precision of what is given, rows summed."""
    q = torch.softmax(logits, -1)
    kl = (p * (p.log() - q.log())).sum(-1)
    alpha = torch.where(p < q, p, q).sum(-1)
    weight = torch.exp(-3 * alpha).detach()
    return {
        "soft_ce": kl,  # plus a constant
        "kl": kl,
        "lk_alpha": -alpha.log(),
        "lk": weight * kl + (1 - weight) * (1 - alpha),
    }[name].sum()


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_gradients_of_close_laws_in_bf16_keep_their_precision(name: str) -> None:
    """FC-037: draft = target + small noise over 32k tokens, both bf16; within 2 % of float64."""
    g = torch.Generator().manual_seed(0)
    target = (4 * torch.randn(4, 32_000, generator=g)).bfloat16()
    draft = (target + 0.05 * torch.randn(4, 32_000, generator=g)).bfloat16()
    found = draft.clone().requires_grad_()
    DIVERGENCES[name](torch.softmax(target.float(), -1), found.float()).sum().backward()
    exact = draft.double().requires_grad_()
    exactly(name, torch.softmax(target.double(), -1), exact).backward()
    assert found.grad is not None and exact.grad is not None
    error = (found.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.02


def test_acceptance_losses_are_least_where_the_laws_agree_and_finite_where_they_do_not() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    logits = torch.tensor([[0.5, 0.25, 0.25], [1e-9, 0.5, 0.5]]).log().requires_grad_()
    assert hybrid(p, logits)[0].item() == pytest.approx(0.0, abs=1e-6)
    assert acceptance_loss(p, logits)[0].item() == pytest.approx(0.0, abs=1e-6)
    (hybrid(p, logits) + acceptance_loss(p, logits)).sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert logits.grad[1, 0] < 0  # far away the KL part still pulls


def test_what_a_head_cannot_say_pulls_nothing() -> None:
    """Mass outside the draft vocabulary is left out, not renormalised: the pull on the logits is in proportion."""
    logits = torch.zeros(2, 3, requires_grad=True)
    p = torch.tensor([[0.6, 0.2, 0.2], [0.06, 0.02, 0.02]])
    soft_cross_entropy(p, logits).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[1] * 10, logits.grad[0])


def test_the_draft_vocabulary_holds_the_most_frequent_supervised_tokens() -> None:
    rows = [([1, 1, 1, 5, 5, 7, 9], [False, True, True, True, True, True, False])]
    counts = count_tokens(rows, 12)
    assert counts.tolist() == [0, 2, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0]
    assert choose(counts, 3).tolist() == [1, 5, 7]
    assert choose(counts, 3, always=[11]).tolist() == [1, 5, 11]
    assert choose(counts, 5).tolist() == [0, 1, 2, 5, 7]  # ties go to the smaller id
    assert coverage(counts, choose(counts, 2)) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="13 tokens asked for"):
        choose(counts, 13)
    with pytest.raises(ValueError, match="must be in it"):
        choose(counts, 1, always=[3, 4])
