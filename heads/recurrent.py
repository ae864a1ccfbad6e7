"""What the EAGLE families share: one decoder layer that runs on its own output, a step for each token guessed.

Slot t begins with a hidden state made of the target's features at t; at step d it also reads the embedding of token
t + 1 + d and guesses token t + 2 + d. In training the later tokens are the true ones (never sampled); the hidden states
are the layer's own. A query of step d sees the keys of step 0 up to its slot, and of the steps since its own slot only:
when decoding, those are the committed text and the node's own path.

Legend: B rows, T tokens, M slots that are needed, k committed tokens of a step, w frontier, F features, H width, W what
attention reads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstart.heads.attention import Branches, additive, attend, attend_steps
from headstart.heads.base import DraftHeads
from headstart.heads.batch import Batch, positions, predictions
from headstart.heads.layers import DecoderLayer
from headstart.heads.tie import Tie


class RecurrentState:
    """Draft-side state: the cache of committed keys, the hidden of the last level, and who sees whom in the tree."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.root: Tensor | None = None  # [B, 1, H]
        self.level: Tensor | None = None  # [B, w, H]
        self.branches = Branches()


class RecurrentHeads(DraftHeads):
    """A family of one recurrent decoder layer."""

    attention_layers: ClassVar[int] = 1
    layer: DecoderLayer

    @property
    def trained_depths(self) -> int:
        """Steps of the unroll."""
        return self.config.unroll

    @abstractmethod
    def begin(self, features: Tensor) -> Tensor:
        """Target features [B, k, F] -> the hidden [B, k, H] that a slot begins with."""

    @abstractmethod
    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden [B, k, H] and next embedding [B, k, Ht] -> what attention reads [B, k, W], residual [B, k, H]."""

    def leave(self, out: Tensor) -> Tensor:
        """The layer's output [B, k, H] -> the hidden that the next step and ``logits`` are given."""
        return out

    def unroll(self, batch: Batch, tie: Tie, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step over the slots [B, M] that lead to a label at any of the ``depths``: hidden [B, M, H]."""
        slots = needed_slots(batch, depths)
        hidden, tokens = self.begin(batch.features), batch.tokens
        length = tokens.shape[1]
        embedded = self.embed(_ahead(tokens, 1), tie)
        place = positions(batch.document)
        cos, sin = self.layer.rotary(place)
        x, residual = self.mix(hidden, embedded)
        k, v = self.layer.keys_values(x, cos, sin)

        x, residual, cos, sin = (_picked(part, slots) for part in (x, residual, cos, sin))
        document, index = batch.document.gather(1, slots), torch.arange(length, device=tokens.device)
        allowed = (slots[:, :, None] >= index) & (document[:, :, None] == batch.document[:, None])
        mask = additive(allowed, x.dtype)
        attended = attend(self.layer.queries(x, cos, sin), k, v, mask)
        hidden = self.leave(self.layer.finish(residual, attended))
        yield slots, hidden

        own: tuple[tuple[Tensor, Tensor], ...] = ()  # keys and values of the steps since; never changed in place
        for depth in range(1, depths):
            embedded = self.embed(_ahead(tokens, 1 + depth).gather(1, slots), tie)
            turn = self.layer.rotary(place.gather(1, slots) + depth)
            hidden, own = self.recomputed(self._further, hidden, embedded, turn, k, v, mask, own)
            yield slots, hidden

    def _further(
        self,
        hidden: Tensor,
        embedded: Tensor,
        turn: tuple[Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        own: tuple[tuple[Tensor, Tensor], ...],
    ) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """A later step of the unroll: hidden [B, M, H] and, with its own keys and values added, those of the steps
        since. ``turn`` cos and sin [B, M, c]; ``k``, ``v``, ``mask`` and ``own`` as of ``attend_steps``."""
        x, residual = self.mix(hidden, embedded)
        own = (*own, self.layer.keys_values(x, *turn))
        keys, values = zip(*own, strict=True)
        attended = attend_steps(self.layer.queries(x, *turn), k, v, mask, keys, values)
        return self.leave(self.layer.finish(residual, attended)), own

    def open(self, rows: int, room: int, cache: Any) -> RecurrentState:
        """``cache`` for one layer; see ``DraftHeads.open``."""
        return RecurrentState(cache)

    def refresh(self, features: Tensor, tokens: Tensor, count: Tensor, state: RecurrentState, tie: Tie) -> Tensor:
        """One forward over the committed rows [B, k], whose guessed keys the target's features now replace."""
        rows, k = tokens.shape
        depth = torch.arange(k, device=tokens.device).expand(rows, -1)
        seen = (depth[:, :, None] >= depth[:, None]).contiguous()
        x, residual = self.mix(self.begin(features), self.embed(tokens, tie))
        hidden = self.leave(self.layer.cached(x, residual, seen, depth, state.cache))
        at = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        fresh = hidden.gather(1, at)
        old = state.root
        state.root = fresh if old is None else torch.where((count > 0)[:, None, None], fresh, old)
        state.level, state.branches = state.root, Branches()
        return state.root

    def level(self, tokens: Tensor, parent: Tensor, depth: int, state: RecurrentState, tie: Tie) -> Tensor:
        """One forward over all frontier nodes of a depth; each goes on from its parent's output. [B, w, H]."""
        if depth == 1:  # the tree may be grown again from the same root
            state.level, state.branches = state.root, Branches()
        assert state.level is not None
        seen = state.branches.add(parent, depth - 1)  # the root's slot is committed: depth 1 stands at a row's end
        depths = torch.tensor(state.branches.depth, device=tokens.device).expand(tokens.shape[0], -1)
        hidden = state.level.gather(1, parent[:, :, None].expand(-1, -1, state.level.shape[-1]))
        x, residual = self.mix(hidden, self.embed(tokens, tie))
        state.level = self.leave(self.layer.cached(x, residual, seen, depths, state.cache))
        return state.level


def needed_slots(batch: Batch, depths: int) -> Tensor:
    """[B, M] slots that lead to a label at some depth below ``depths``, ascending; rows with fewer are filled with
    others. At least one a row."""
    rows, length = batch.tokens.shape
    needed = torch.zeros(rows, length, dtype=torch.bool, device=batch.tokens.device)
    for d in range(depths):
        shift = 2 + d
        if shift < length:
            needed[:, :-shift] |= predictions(batch.supervised, batch.document, d)[:, shift:]
    most = max(1, int(needed.sum(1).max()))
    order = torch.sort(~needed, dim=1, stable=True).indices[:, :most]
    return order.sort(1).values


def _ahead(tokens: Tensor, by: int) -> Tensor:
    """Tokens [B, T] moved left by ``by``, the end filled with token 0: no slot there has a label."""
    return torch.nn.functional.pad(tokens[:, by:], (0, min(by, tokens.shape[1])))


def _picked(x: Tensor, slots: Tensor) -> Tensor:
    """[B, T, X] at slots [B, M] -> [B, M, X]."""
    return x.gather(1, slots[:, :, None].expand(-1, -1, x.shape[-1]))
