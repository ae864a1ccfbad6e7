"""One process, DDP and FSDP2: parameters that torch's own optimizer steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from headstart.heads import Batch, DraftHeads, Losses, Tie
from headstart.train.checkpoint import Moments, check_moments
from headstart.train.joint import Joint, groups


class Torch:
    """Parameters that torch's own optimizer steps: on every rank, or (FSDP2) as DTensors, a share on each.

    FSDP2 is one ``fully_shard`` over all heads, on every device: what a layer-wise one would save is little beside the
    target, and some families use their layers without calling them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: DraftHeads | Joint,
        shards: bool,
        times: float,
        backend: str,
        adamw: Mapping[str, Any],
    ) -> None:
        self._accelerator, self._shards = accelerator, shards
        self._plain = copy.deepcopy(model) if shards and accelerator.is_main_process else None
        # one process leaves the heads beside the target's output, which may be spread over several devices
        place = [accelerator.num_processes > 1]
        self.model: Any = _sharded(accelerator, model) if shards else accelerator.prepare(model, device_placement=place)
        self._own: Any = model if shards else accelerator.unwrap_model(self.model)
        if backend:
            self._own.compile(backend=backend)
        self._optimizer = torch.optim.AdamW(groups(self._own, times), **adamw)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged once a window."""
        if self._shards:
            self.model.set_requires_gradient_sync(last)
        if last or self._shards:
            with self._accelerator.autocast():
                yield
        else:
            with self._accelerator.no_sync(self.model), self._accelerator.autocast():
                yield

    def loss(self, batch: Batch, tie: Tie, **options: Any) -> Losses:
        """See ``Engine``."""
        losses: Losses = self.model(batch, tie, **options)
        return losses

    def backward(self, loss: Tensor) -> None:
        """Not accelerate's, which would divide by a number of micro-batches of its own."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, rate: float, clip: float) -> float:
        """The norm is the same on every rank, and so is what follows from it."""
        total = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        norm = float(_full(total))
        if math.isfinite(norm):
            set_rate(self._optimizer.param_groups, rate)
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def whole(self) -> DraftHeads | Joint:
        """What was given, trained in place; under FSDP2 a copy on the main process."""
        if not self._shards:
            return self._own  # type: ignore[no-any-return]
        full = {name: _full(tensor) for name, tensor in self._own.state_dict().items()}
        if self._plain is None:
            return self._own  # type: ignore[no-any-return]
        self._plain.load_state_dict(full)
        return self._plain

    def optimizer_state(self) -> Moments:
        """By name; see ``Engine``."""
        state = self._optimizer.state
        return {
            name: {key: _full(value).detach().cpu().clone() for key, value in state[p].items()}
            for name, p in self._trained().items()
            if p in state
        }

    def load_optimizer(self, state: Moments) -> None:
        """See ``Engine``."""
        check_moments(state, {name: p.shape for name, p in self._trained().items()})
        told = self._optimizer.state_dict()
        names = {id(p): name for name, p in self._trained().items()}
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        if state:
            told["state"] = {i: {k: _like(v, p) for k, v in state[names[id(p)]].items()} for i, p in enumerate(every)}
            self._optimizer.load_state_dict(told)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._own.named_parameters() if p.requires_grad}


def _sharded(accelerator: Accelerator, model: nn.Module) -> FSDPModule:
    """``model`` in place as DTensors over all processes, from the weights of the main one."""
    model.to(accelerator.device)
    for tensor in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(tensor.data, 0)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    return fully_shard(model, mesh=mesh)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """``value`` shared out as ``parameter`` is; a step counter stays as it is."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value


def set_rate(param_groups: Sequence[dict[str, Any]], rate: float) -> None:
    """The learning rate of a step, for each group at its own multiple."""
    for group in param_groups:
        group["lr"] = rate * group.get("times", 1.0)
