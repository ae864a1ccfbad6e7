"""Adaptive plans against fixed trees, in the time that costs say passes: on claims that hold, promise too much, or are
rarely kept."""

from __future__ import annotations

import pytest

from headstart.infer.plan import Costs, Curve, Draft
from tests.virtual import Kind, made_up, played, speed

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


@pytest.mark.parametrize("name", KINDS)
def test_no_fixed_tree_is_faster(name: str) -> None:
    """By more than learning takes, beginning with nothing, on 600 tokens: 4 %; whatever a level of drafting costs."""
    texts = [made_up(KINDS[name], 60, seed) for seed in range(10)]
    fixed = {shape: played(texts, *shape, None) for shape in FIXED}
    for level in (0.03, 0.1, 0.3):
        found = speed(played(texts, 16, 5, costs(level)), costs(level))
        others = {shape: speed(steps, costs(level)) for shape, steps in fixed.items()}
        assert found >= 0.96 * max(others.values()), (level, others)
