"""Attention over slots and trees, as pure functions of tensors, and the bookkeeping of a tree that grows by levels.

Legend: B rows, h heads, g key/value heads, n queries, m tree nodes, w frontier, S slots in view, T slots of a training
row, M of them that are queried, c channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import rotate_half

GROUPED_ROWS = 64  # queries up to which heads that share keys are put together: more of them make the mask too large


def tree_mask(
    seen: Tensor,
    depth: Tensor,
    lengths: Tensor,
    slots: int,
    window: int | None,
    dtype: torch.dtype,
    chunks: bool = False,
) -> Tensor:
    """Additive float mask [B, 1, n, S]: 0 where a node may look, the dtype's minimum elsewhere.

    ``seen`` [B, n, m] which of the m tree nodes the last n of them see, ``depth`` [B, m], ``lengths`` [B] committed
    tokens. A window compares *positions*: siblings stand in later slots than their depth; with ``chunks`` it is the
    size of chunks the text is cut into. Never bool: eager attention adds a bool mask.
    """
    n, m = seen.shape[1:]
    slot = torch.arange(slots, device=seen.device)
    past = slot < lengths[:, None]  # [B, S]
    place = (slot - lengths[:, None]).clamp(min=0, max=m - 1)  # [B, S] tree node standing in a slot
    fresh = (slot >= lengths[:, None]) & (slot < lengths[:, None] + m)
    allowed = seen.gather(2, place[:, None].expand(-1, n, -1)) & fresh[:, None] | past[:, None]
    if window is not None:
        position = torch.where(past, slot, lengths[:, None] + depth.gather(1, place))
        own = lengths[:, None] + depth[:, -n:]
        far = own[:, :, None] % window + 1 if chunks else window  # [B, n, 1] positions in view, its own among them
        allowed = allowed & (own[:, :, None] - position[:, None] < far)
    return additive(allowed, dtype)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, n, S] bool -> [B, 1, n, S] of zeros and the dtype's minimum."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


class Branches:
    """Which nodes of a tree that grows level by level see which: a node sees itself and the path above it."""

    def __init__(self) -> None:
        self.depth: list[int] = []  # of the m nodes so far
        self._seen: Tensor | None = None  # [B, m, m]
        self._frontier: Tensor | None = None  # [B, w] where the last level stands among them

    def add(self, parent: Tensor, depth: int) -> Tensor:
        """A level at ``depth`` whose nodes hang on ``parent`` [B, w] of the level above (the first level on nothing
        that is counted here) -> [B, w, m + w] what each new node sees, itself included."""
        rows, w = parent.shape
        m = len(self.depth)
        eye = torch.eye(w, dtype=torch.bool, device=parent.device).expand(rows, -1, -1)
        if self._seen is None or self._frontier is None:
            fresh = self._seen = eye
        else:
            above = self._frontier.gather(1, parent)  # [B, w] in 0..m-1
            line = self._seen.gather(1, above[:, :, None].expand(-1, -1, m))
            fresh = torch.cat([line, eye], 2)
            self._seen = torch.cat([torch.cat([self._seen, self._seen.new_zeros(rows, m, w)], 2), fresh], 1)
        self.depth += [depth] * w
        self._frontier = torch.arange(m, m + w, device=parent.device).expand(rows, -1)
        return fresh


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, h, n, c] turned by its positions' cos and sin [B, n, c]."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    turned: Tensor = x * cos + rotate_half(x) * sin
    return turned


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Queries [B, h, n, c], keys and values [B, g, S, c], additive mask [B, 1, n, S] -> [B, n, h * c]."""
    if q.shape[1] == k.shape[1] or q.shape[2] > GROUPED_ROWS:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    else:
        out = grouped(q, k, v, mask)
    return out.transpose(1, 2).flatten(2)


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Queries [B, h, n, c], keys and values [B, g, S, c], mask [B or 1, 1, n, S] -> [B, h, n, c].

    The h / g heads that share keys become rows of one attention, so that keys and values are read once and never
    repeated; the mask is, so this is for few rows. ``scale`` None = the root of c.
    """
    (rows, heads, n, channels), shared = q.shape, k.shape[1]
    together = q.reshape(rows, shared, heads // shared * n, channels)
    if n > 1:  # one query's is that of all its heads
        mask = mask.repeat(1, 1, heads // shared, 1)
    out = F.scaled_dot_product_attention(together, k, v, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, n, v.shape[-1])


def attend_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
) -> Tensor:
    """Attention of a later step of the training-time test (EAGLE-3, arXiv 2503.01840): one softmax over the causal
    block of step 0 and, for each step since, the key in the query's own slot.

    ``q`` [B, h, M, c]; ``k``, ``v`` [B, g, T, c] of step 0; ``mask`` [B, 1, M, T] additive; ``own_keys`` and
    ``own_values`` one [B, g, M, c] a step since. -> [B, M, h * c]. Nothing is larger than [B, h, M, T].
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5
    block = torch.matmul(q, k.transpose(2, 3)) * scale + mask
    diagonal = [(q * x.repeat_interleave(groups, 1)).sum(-1, keepdim=True) * scale for x in own_keys]
    scores = torch.cat([block, *diagonal], -1)
    share = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    length = k.shape[2]
    out = torch.matmul(share[..., :length], v)
    for step, value in enumerate(own_values):
        out = out + share[..., length + step, None] * value.repeat_interleave(groups, 1)
    return out.transpose(1, 2).flatten(2)
