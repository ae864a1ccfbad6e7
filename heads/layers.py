"""Layers that more than one family uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResBlock(nn.Module):
    """y = x + SiLU(W x + b), the residual block of Medusa (arXiv 2401.10774).

    W and b start at zero, so that a fresh block is exactly the identity.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.reset()

    def reset(self) -> None:
        """Back to the identity."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return x + F.silu(self.linear(x))


def stack(width: int, depth: int) -> nn.Sequential:
    """``depth`` distinct residual blocks one after the other."""
    return nn.Sequential(*(ResBlock(width) for _ in range(depth)))


def born_nan(module: nn.Module) -> None:
    """Fill every floating tensor with NaN, so that one which loading forgot shows at once."""
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
