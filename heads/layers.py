"""Layers that more than one family uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from headstart.heads.attention import attend, rotated, tree_mask


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


class Rotary:
    """cos and sin of positions, by transformers' own tables. Holds no tensor that a checkpoint would have to bring."""

    def __init__(self, facts: dict[str, Any]) -> None:
        """``facts`` as of ``layer_facts``."""
        self._facts = facts
        self._tables: dict[torch.device, LlamaRotaryEmbedding] = {}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n] -> two of [B, n, c] float32."""
        device = positions.device
        if device not in self._tables:
            with torch.device(device):
                self._tables[device] = LlamaRotaryEmbedding(LlamaConfig(**self._facts))
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = self._tables[device](like, positions)
        return cos, sin


class DecoderLayer(nn.Module):
    """A Llama layer without its input norm: what attention reads and what the residual starts from are the family's.

    What attention and MLP add starts at zero, so that a fresh layer hands on its residual. h heads, g key/value heads,
    c channels of a head, W what attention reads, H width.
    """

    def __init__(self, facts: dict[str, Any], width: int) -> None:
        """``facts`` as of ``layer_facts``, ``width`` W."""
        super().__init__()
        hidden, self._channels = facts["hidden_size"], facts["head_dim"]
        queries, keys = facts["num_attention_heads"] * self._channels, facts["num_key_value_heads"] * self._channels
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=facts["rms_norm_eps"])
        self.mlp = LlamaMLP(LlamaConfig(**facts))
        self.rotary = Rotary(facts)

    def reset(self) -> None:
        """Random where it reads (as torch does), zero where it writes."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.mlp.gate_proj, self.mlp.up_proj):
            linear.reset_parameters()
        for linear in (self.o_proj, self.mlp.down_proj):
            nn.init.zeros_(linear.weight)
        nn.init.ones_(self.post_attention_layernorm.weight)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, n, W] -> [B, h, n, c]."""
        return rotated(self._apart(self.q_proj(x)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n, W] -> two of [B, g, n, c]."""
        return rotated(self._apart(self.k_proj(x)), cos, sin), self._apart(self.v_proj(x))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [B, n, H] and what attention found [B, n, h * c] -> [B, n, H]."""
        hidden = residual + self.o_proj(attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def _apart(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._channels).transpose(1, 2)

    def cached(self, x: Tensor, residual: Tensor, seen: Tensor, depth: Tensor, cache: Any, index: int = 0) -> Tensor:
        """One forward over the last n of m nodes past each row's end: their keys and values go into ``cache``.

        ``x`` [B, n, W], ``residual`` [B, n, H]; ``seen`` [B, n, m] and ``depth`` [B, m] as of ``tree_mask``. The caller
        decides what of it is kept. -> [B, n, H].
        """
        n, m = seen.shape[1:]
        slots = cache.begin(n, held=m - n)
        cos, sin = self.rotary(cache.lengths[:, None] + depth[:, -n:])
        keys, values = cache.update(*self.keys_values(x, cos, sin), index)
        mask = tree_mask(seen, depth, cache.lengths, slots, None, x.dtype)
        return self.finish(residual, attend(self.queries(x, cos, sin), keys, values, mask))
