"""Least squares for starts in closed form: sums over batches, solved once.

Legend: R rows, X inputs, Y outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.003  # of the mean input power: the best of 0.001 to 1 on held-out answers of SmolLM2-135M


class LeastSquares:
    """Sums in float64 of x x' and x y', whatever precision the rows come in."""

    def __init__(self, power: Tensor | None = None) -> None:
        """``power`` [X, X]: that of an earlier solver over the very same inputs, which is then not summed again."""
        self._known = power is not None
        self.power = power
        self._cross: Tensor | None = None  # [X, Y]

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows [R, X] and what they should map to [R, Y]."""
        if not self._known:
            power = (x.T.float() @ x.float()).double()
            self.power = power if self.power is None else self.power + power
        cross = (x.T.float() @ y.float()).double()
        self._cross = cross if self._cross is None else self._cross + cross

    def solve(self, ridge: float = RIDGE) -> Tensor:
        """The map [X, Y] that x @ map is nearest to y with, ``ridge`` of the mean power added. Raises
        ValueError where no row was added."""
        if self.power is None or self._cross is None or not self.power.any():
            raise ValueError(
                "nothing to solve a start from: no slot of these batches leads to a label at some depth; "
                "give more or longer answers, or set optim.fit_batches=0"
            )
        weight = ridge * self.power.diagonal().mean().clamp(min=1e-12)
        eye = torch.eye(self.power.shape[0], dtype=torch.float64, device=self.power.device)
        found: Tensor = torch.linalg.solve(self.power + weight * eye, self._cross)
        return found
