"""TreeCache: keys and values for rows of unequal length, with trees written past each row's end.

Legend: B rows, n tree nodes, k path length, L capacity, S slots in view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from headstart.infer.accept import Accepted
from headstart.infer.tree import sent

GROWTH = 256  # capacities are multiples of it


class TreeCache(Cache):
    """Slot j of a row holds its position j; slots at and past a row's length hold the tree being verified.

    A stock forward with a 4D mask and explicit positions touches nothing but ``update``. Tensors of one shape on one
    device share a block [tensors, B, heads, L, dim] and are views of it, so that ``commit`` is one gather and one copy
    for all layers. Every layer keeps its full length, also sliding-window ones: the window lives in the mask.
    """

    def __init__(self, rows: int, layers: int, room: int, device: torch.device, fixed: bool = False) -> None:
        """``rows`` B, ``layers`` of the model, ``room`` tokens a row to begin with; grows by doubling. ``fixed`` keeps
        all of the capacity in view and every place a tensor, so that a compiled forward sees one shape."""
        super().__init__(layers=[])
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)  # [B] tokens kept
        self.kept = [0] * rows  # the same, known on the host
        self.end = 0  # the longest row
        self.level = True  # all rows are equally long
        self._layers, self._fixed = layers, fixed
        self._capacity = 1 << (_rounded(room) - 1).bit_length() if fixed else _rounded(room)  # few shapes to compile
        self._views: dict[tuple[int, int], Tensor] = {}  # (layer, 0 keys | 1 values) -> [B, heads, L, dim]
        self._blocks: dict[Any, Tensor] = {}  # (device, dtype, heads, dim) -> [tensors, B, heads, L, dim]
        self._members: dict[Any, list[tuple[int, int]]] = {}
        self._start = 0  # where this forward writes in the longest row
        self._slots: Tensor | None = None  # [B, n] where this forward writes; None = every row at `_start`

    def begin(self, width: int, held: int = 0) -> int:
        """Before a forward over ``width`` new slots a row: makes room and returns S, the slots in view.

        ``held`` slots past each row's length, written by the forwards before, stay in view without being kept.
        """
        self._start = self.end + held
        self._reserve(self._start + width)
        fresh = torch.arange(held, held + width, device=self.lengths.device)
        self._slots = None if self.level and not self._fixed else self.lengths[:, None] + fresh
        return self._capacity if self._fixed else self._start + width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, heads, n, dim] at each row's own offset; returns the S slots in view, [B, heads, S, dim]."""
        if (layer_idx, 0) not in self._views:
            self._allocate(layer_idx, key_states, value_states)
        return self._write((layer_idx, 0), key_states), self._write((layer_idx, 1), value_states)

    def advance(self, count: list[int]) -> None:
        """Keeps the first ``count`` [B] of the freshly written slots of each row."""
        self.kept = [n + more for n, more in zip(self.kept, count, strict=True)]
        self.lengths = sent(self.kept, self.lengths.device)
        self.end, self.level = max(self.kept), len(set(self.kept)) == 1

    def commit(self, path: Accepted) -> None:
        """Moves the accepted path's slots into place and drops the rest: one gather and one copy a block and row.

        ``path`` stands on the CPU: nothing is read back from the device.
        """
        k = max(1, int(path.count.max()))  # columns behind it are padding, and their places may not exist
        moving = path.nodes[:, 1:k].to(
            self.lengths.device, non_blocking=True
        )  # [B, k - 1]; the root already stands where it belongs
        if moving.shape[1]:
            place = self.lengths[:, None] + torch.arange(1, k, device=moving.device)
            source = torch.where(moving >= 0, self.lengths[:, None] + moving, place)  # padding moves onto itself
            for block in self._blocks.values():
                here, there = source.to(block.device), place.to(block.device)
                for row in range(block.shape[1]):
                    block[:, row].index_copy_(2, there[row], block[:, row].index_select(2, here[row]))
        self.advance(path.count.tolist())

    def load(self, known: Cache) -> None:
        """Copies in what a stock cache holds of every row; begins empty. Raises ValueError for a partial cache."""
        length = known.get_seq_length()
        layers: list[Any] = [(getattr(x, "keys", None), getattr(x, "values", None)) for x in known.layers]
        if any(k is None or v is None or k.shape[-2] < length for k, v in layers):
            raise ValueError(
                f"the cache that was passed ({type(known).__name__}) no longer holds all of its {length} tokens in "
                "every layer, as a window drops them; pass the whole prompt without it"
            )
        self.begin(length)
        for index, (keys, values) in enumerate(layers):
            self.update(keys[..., :length, :], values[..., :length, :], index)
        self.advance([length] * len(self.kept))

    def stock(self, config: Any) -> DynamicCache:
        """What plain ``generate`` would have returned: a DynamicCache of the kept tokens. Rows must be equally long."""
        assert self.level
        cache = DynamicCache(config=config)
        for layer in sorted({layer for layer, _ in self._views}):  # layers that share another's keys hold none
            keys, values = (self._views[layer, side][:, :, : self.end].clone() for side in (0, 1))
            cache.update(keys, values, layer)
        return cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before the forward under way, as stock code counts them: the longest row."""
        return self._start if self._start > self.end else self.end

    def _write(self, which: tuple[int, int], fresh: Tensor) -> Tensor:
        view, width = self._views[which], fresh.shape[2]
        if self._slots is None:
            view[:, :, self._start : self._start + width] = fresh
        else:
            slots = self._slots.to(view.device)[:, None, :, None]
            view.scatter_(2, slots.expand(-1, fresh.shape[1], -1, fresh.shape[3]), fresh)
        if self._fixed:
            return view
        return view[:, :, : self._start + width]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """A place for a layer seen for the first time. Zeros: what is masked must stay finite."""
        for side, like in enumerate((keys, values)):
            batch, heads, _, dim = like.shape
            key = (like.device, like.dtype, heads, dim)
            if key not in self._blocks:
                tensors = self._layers * (2 if keys.shape == values.shape else 1)
                self._blocks[key] = like.new_zeros(tensors, batch, heads, self._capacity, dim)
                self._members[key] = []
            self._members[key].append((layer, side))
            self._views[layer, side] = self._blocks[key][len(self._members[key]) - 1]

    def _reserve(self, slots: int) -> None:
        """Doubles the capacity until ``slots`` fit; what is stored is copied over."""
        if slots <= self._capacity:
            return
        old, self._capacity = self._capacity, _rounded(max(slots, 2 * self._capacity))
        for key, block in self._blocks.items():
            grown = block.new_zeros(*block.shape[:3], self._capacity, block.shape[4])
            grown[..., :old, :] = block
            self._blocks[key] = grown
            self._views.update({which: grown[i] for i, which in enumerate(self._members[key])})


def _rounded(slots: int) -> int:
    return max(1, -(-slots // GROWTH)) * GROWTH
