"""Adaptive plans against every fixed tree, in the time that costs say passes: on claims that hold, that promise too
much, that rarely come true."""

from __future__ import annotations

import pytest

from headstart.infer.plan import Costs, Curve, Draft
from tests.virtual import Kind, made_up, played

SIZES = (1, 2, 4, 6, 8, 12, 16)
PASSES = (1.0, 1.02, 1.05, 1.12, 1.2, 1.35, 1.5)  # of a small target on a CPU, in plain steps
FIXED = ((1, 0), (4, 1), (6, 1), (6, 2), (8, 2), (8, 3), (12, 3), (16, 5))
KINDS = {
    "sure": Kind(6.0, 2.0, 0.95),
    "greedy": Kind(3.0, 2.0, 0.85),
    "sampled": Kind(2.0, 3.0, 0.85),
    "overclaiming": Kind(2.0, 3.0, 0.5),
    "weak": Kind(1.0, 6.0, 0.5),
    "useless": Kind(3.0, 2.0, 0.02),
}


def costs(level: float) -> Costs:
    """A level of drafting costs ``level`` plain steps."""
    return Costs(SIZES, (Curve(1, 64, PASSES),), (Draft(1, tuple(level * depth for depth in range(6))),), 0.03)


@pytest.mark.parametrize("level", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("name", KINDS)
def test_no_fixed_tree_is_faster(name: str, level: float) -> None:
    """By more than what learning takes: 3 % on 500 tokens, beginning with nothing."""
    texts = [made_up(KINDS[name], 60, seed) for seed in range(10)]
    fixed = {shape: played(texts, costs(level), *shape, adaptive=False) for shape in FIXED}
    found = played(texts, costs(level), 16, 5, adaptive=True)
    assert found >= 0.97 * max(fixed.values()), fixed
