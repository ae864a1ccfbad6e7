"""Weights of linear layers kept a second time as the CPU multiplies by them fastest.

oneDNN brings a bfloat16 weight into blocks of its own in every call of ``linear``; a pass over a few rows spends as
long on that as on multiplying. Kept in blocks, a weight is only read. Layers get the other product while a call runs
and lose it afterwards: what else runs on the same model in that time, in another thread, gets it too. It is the same
product; where its sums are taken in another order, texts are the same up to near ties.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, TypeGuard
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

ROWS = 16  # of the products that the blocks are made for; others go too
SAMPLE = 61  # numbers of a weight by which a change is seen that its version does not tell, as of ``weight.data += x``


class Prepacked:
    """A context in which linear layers multiply by packed weights. Threads may be in it together, and nested.

    A weight that has changed is packed again when the next context opens; a layer that has been moved, cast or given a
    forward of its own is left as it is.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Packs what can be packed in ``modules``. Raises ValueError where that is nothing."""
        found = {id(layer): layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)}
        layers = [layer for layer in found.values() if _fits(layer)]
        if not layers:
            raise ValueError(
                "there is nothing to prepack: it is for plain linear layers with bfloat16 weights on a CPU whose "
                "oneDNN multiplies those, without hooks in the place of their forward; leave prepack out, or load the "
                "target with dtype=torch.bfloat16 onto a CPU"
            )
        self.linear = len(found)  # layers that there are
        with _lock:
            self._products = {layer: _product(layer) for layer in layers}

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepacked, (list(self._products),)  # packed tensors can be neither copied nor stored

    def __str__(self) -> str:
        size = sum(layer.weight.numel() * layer.weight.element_size() for layer in self._products)
        return f"{len(self._products)} of {self.linear} linear layers are prepacked, {size / 1e6:.0f} MB more memory"

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, made in this context."""

        def inside(*args: Any, **options: Any) -> Any:
            with self:
                return call(*args, **options)

        return inside

    def __enter__(self) -> None:
        with _lock:
            fresh = [(layer, p) for layer, p in self._products.items() if p.users == 0 and _fits(layer)]
            for layer, product in fresh:  # may fail, and then nothing has been changed
                product.refresh(layer)
            for layer, product in fresh:
                layer.__dict__["forward"] = product
            for product in self._products.values():
                product.users += 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            for layer, product in self._products.items():
                product.users -= 1
                if product.users == 0 and layer.__dict__.get("forward") is product:
                    del layer.__dict__["forward"]


class _Product:
    """What stands for the forward of one layer."""

    def __init__(self, layer: nn.Linear) -> None:
        self.users = 0  # contexts that are open now
        self._layer = ref(layer)
        self._weight: Tensor | None = None  # what was packed: held, so that its address is nobody else's
        self._version, self._sample, self._packed = 0, torch.empty(0), torch.empty(0)
        self.refresh(layer)

    def refresh(self, layer: nn.Linear) -> None:
        """Packs again where the weight has changed since."""
        weight = layer.weight.detach()
        version = 0 if weight.is_inference() else weight._version
        sample = weight.view(-1)[:: max(1, weight.numel() // SAMPLE)]
        same = self._weight is not None and self._weight.data_ptr() == weight.data_ptr() and self._version == version
        if not same or not torch.equal(self._sample, sample):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            self._weight, self._version, self._sample = weight, version, sample.clone()
        self._bias = None if layer.bias is None else layer.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.dtype != torch.bfloat16 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            layer = self._layer()
            assert layer is not None
            return nn.Linear.forward(layer, x)
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


def supported() -> bool:
    """Whether this CPU's oneDNN multiplies bfloat16."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _fits(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """A stock layer whose weight can be packed, without anybody's own forward."""
    if type(layer) is not nn.Linear or not isinstance(vars(layer).get("forward"), (_Product, NoneType)):
        return False
    weight = layer.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return plain and weight.is_contiguous() and supported()
