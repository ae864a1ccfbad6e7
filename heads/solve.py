"""Least squares for starts in closed form: sums over batches, solved once.

Legend: R rows, X inputs, Y outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.003  # of the mean input power: the best of 0.001 to 1 on held-out answers of SmolLM2-135M


class LeastSquares:
    """Sums in float64 of x x' and x y', whatever precision the rows come in."""

    def __init__(self) -> None:
        self._power: Tensor | None = None  # [X, X]
        self._cross: Tensor | None = None  # [X, Y]

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows [R, X] and what they should map to [R, Y]."""
        power, cross = (x.T.float() @ x.float()).double(), (x.T.float() @ y.float()).double()
        self._power = power if self._power is None else self._power + power
        self._cross = cross if self._cross is None else self._cross + cross

    def solve(self, ridge: float = RIDGE) -> Tensor:
        """The map [X, Y] that x @ map is nearest to y with, ``ridge`` of the mean power added. Raises
        ValueError where no row was added."""
        if self._power is None or self._cross is None or not self._power.any():
            raise ValueError(
                "nothing to solve a start from: no slot of these batches leads to a label at some depth; "
                "give more or longer answers, or set optim.fit_batches=0"
            )
        weight = ridge * self._power.diagonal().mean().clamp(min=1e-12)
        eye = torch.eye(self._power.shape[0], dtype=torch.float64, device=self._power.device)
        found: Tensor = torch.linalg.solve(self._power + weight * eye, self._cross)
        return found
