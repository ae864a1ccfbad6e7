"""Weights of linear layers kept a second time as the CPU multiplies by them fastest.

oneDNN brings a bfloat16 weight into blocks of its own in every call of ``linear``; a pass over a few rows spends as
long on that as on multiplying. Kept in blocks, a weight is only read: a pass over some nodes of a tree then takes about
what a plain step took before. Layers get the other product while a call runs and lose it afterwards. What comes out is
the same product; where its sums are taken in another order, texts are the same up to near ties.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

ROWS = 16  # of the products that the blocks are made for; others go too


class Prepacked:
    """A context in which linear layers multiply by packed weights. Threads may be in it together."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Packs what can be packed in ``modules``. Raises ValueError where that is nothing."""
        layers = {id(layer): layer for module in modules for layer in module.modules() if _fits(layer)}
        if not layers:
            raise ValueError(
                "there is nothing to prepack: it is for plain linear layers with bfloat16 weights on a CPU whose "
                "oneDNN multiplies those; leave prepack out, or load the target with dtype=torch.bfloat16"
            )
        with _lock:
            self._products = {layer: _product(layer) for layer in layers.values()}

    @property
    def bytes(self) -> int:
        """Memory that the packed weights take."""
        return sum(layer.weight.numel() * layer.weight.element_size() for layer in self._products)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, made in this context."""

        def inside(*args: Any, **options: Any) -> Any:
            with self:
                return call(*args, **options)

        return inside

    def __enter__(self) -> None:
        with _lock:
            for layer, product in self._products.items():
                if product.users == 0:
                    product.refresh(layer)
                    layer.__dict__["forward"] = product
                product.users += 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            for layer, product in self._products.items():
                product.users -= 1
                if product.users == 0:
                    layer.__dict__.pop("forward", None)


class _Product:
    """What stands for the forward of one layer."""

    def __init__(self, layer: nn.Linear) -> None:
        self.users = 0  # contexts that are open now
        self._of: tuple[int, int] | None = None
        self.refresh(layer)

    def refresh(self, layer: nn.Linear) -> None:
        """Packs again where the weight has changed since."""
        weight = layer.weight.detach()
        now = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if now != self._of:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            self._of = now
        self._bias = None if layer.bias is None else layer.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


_lock = threading.Lock()
_shared: WeakValueDictionary[int, _Product] = WeakValueDictionary()  # by id of the layer: one for all contexts
# an id is not reused as long as its product lives: whoever holds that holds the layer too


def _product(layer: nn.Linear) -> _Product:
    known = _shared.get(id(layer))
    if known is None:
        known = _shared[id(layer)] = _Product(layer)
    return known


def modules_of(source: Any) -> list[nn.Module]:
    """The models behind a source of guesses."""
    fields = dataclasses.fields(source) if dataclasses.is_dataclass(source) else ()
    values = [getattr(source, field.name) for field in fields]
    parts = [part for value in values if isinstance(value, tuple) for part in value]
    own = [value for value in values if isinstance(value, nn.Module)]
    return own + [module for part in parts if hasattr(part, "drafter") for module in modules_of(part)]


def _fits(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """A stock layer whose weight can be packed, without anybody's own forward."""
    if type(layer) is not nn.Linear or not isinstance(vars(layer).get("forward"), (_Product, NoneType)):
        return False
    weight = layer.weight
    supported: Callable[[], bool] = torch.ops.mkldnn._is_mkldnn_bf16_supported
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.is_contiguous() and supported()
