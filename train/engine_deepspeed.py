"""DeepSpeed's ZeRO, driven so that it does what the loop does elsewhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.heads import Batch, DraftHeads, Losses, Tie
from headstart.train.checkpoint import Moments, check_moments
from headstart.train.engine_torch import set_rate


class Whole(nn.Module):
    """Heads whose parameters stage 3 collects all at once and gives up all at once. One by one, as layers are called,
    ranks that call them more or less often (no label in a batch, more chunks) would wait for each other forever.

    DeepSpeed takes the gradient of such a module's input for the end of its backward; features have none.
    """

    def __init__(self, heads: DraftHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, anchor: Tensor, batch: Batch, tie: Tie, **options: Any) -> Any:
        """The heads' losses; ``anchor`` is a zero [] that has a gradient, added where everything begins."""
        return self.heads(batch._replace(features=batch.features + anchor), tie, **options)


class ZeRO:
    """DeepSpeed's engine, which splits optimizer state (stage 1), gradients (2) and parameters (3) over the ranks.

    It counts micro-batches, clips and schedules on its own as well: what its config says of that must be what the
    recipe says, or nothing. Its parameters stay float32.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        heads: DraftHeads,
        accumulation: int,
        clip: float,
        backend: str,
        adamw: Mapping[str, Any],
    ) -> None:
        from deepspeed.utils import set_z3_leaf_modules

        self._accumulation = accumulation
        config = accelerator.deepspeed_plugin.deepspeed_config
        asked = copy.deepcopy(config)
        settle(config, accumulation, clip)
        accelerator.gradient_accumulation_steps = accumulation
        self._plain = copy.deepcopy(heads) if accelerator.is_main_process else None
        self._own, whole = heads, Whole(heads)
        if accelerator.deepspeed_plugin.zero_stage == 3:
            set_z3_leaf_modules(whole, [Whole])
        self.model, _ = accelerator.prepare(whole, torch.optim.AdamW(heads.parameters(), **adamw))
        config.clear()
        config.update(asked)  # another run in this process brings numbers of its own
        if backend:
            heads.compile(backend=backend)
        self._optimizer: Any = self.model.optimizer
        self._optimizer.check_grad_overflow = True  # as with fp16: a step with NaN in it is left out by all ranks

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged, and the next ``step`` is one, where it is the last."""
        self.model.set_gradient_accumulation_boundary(is_boundary=last)
        yield

    def loss(self, batch: Batch, tie: Tie, **options: Any) -> Losses:
        """See ``Engine``."""
        anchor = torch.zeros((), device=batch.features.device, requires_grad=True)
        losses: Losses = self.model(anchor, batch, tie, **options)
        return losses

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed divides by the micro-batches of a window, which is taken back."""
        self.model.backward(loss * self._accumulation)

    def step(self, rate: float, clip: float) -> float:
        """It has been told of ``clip`` before."""
        set_rate(self._optimizer.param_groups, rate)
        self.model.step()
        return math.inf if self._optimizer.overflow else float(self.model.get_global_grad_norm())

    def whole(self) -> DraftHeads:
        """A copy on the main process."""
        from deepspeed.utils import safe_get_full_fp32_param

        full = {name: safe_get_full_fp32_param(p) for name, p in self._own.named_parameters()}
        if self._plain is None:
            return self._own
        self._plain.load_state_dict(full | dict(self._own.named_buffers()))
        return self._plain

    def optimizer_state(self) -> Moments:
        """By name; see ``Engine``."""
        from deepspeed.utils import safe_get_full_optimizer_state

        known = self._known()
        if not known:
            return {}
        return {
            name: {"step": torch.tensor(float(known[0]["step"]))}
            | {key: safe_get_full_optimizer_state(p, key).cpu() for key in ("exp_avg", "exp_avg_sq")}
            for name, p in self._own.named_parameters()
        }

    def load_optimizer(self, state: Moments) -> None:
        """See ``Engine``."""
        from deepspeed.utils import safe_set_full_optimizer_state

        check_moments(state, {n: getattr(p, "ds_shape", p.shape) for n, p in self._own.named_parameters()})
        steps = {float(known["step"]) for known in state.values()}
        if len(steps) > 1:
            raise ValueError(
                f"parameters of this run took {sorted(steps)} steps each, and DeepSpeed counts one number for all: go "
                "on with one process, DDP or FSDP2"
            )
        if not state:
            return
        self._make_moments()
        for name, p in self._own.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(p, state[name][key].to(self.model.device), key)
        taken = steps.pop()
        for known in self._known():
            known["step"] = torch.full_like(known["step"], taken) if isinstance(known["step"], Tensor) else int(taken)

    def _known(self) -> list[dict[str, Any]]:
        """The state of the optimizer inside, one a flat partition of this rank; empty before the first step."""
        return [known for known in self._optimizer.optimizer.state.values() if known]

    def _make_moments(self) -> None:
        """AdamW has no moments before its first step, and DeepSpeed no place to put them: a step without gradient, at
        rate 0, makes both and changes no weight."""
        inner = self._optimizer
        parts = (
            inner.fp32_partitioned_groups_flat
            if hasattr(inner, "fp32_partitioned_groups_flat")
            else (inner.single_partition_of_fp32_groups)
        )
        set_rate(inner.param_groups, 0.0)
        for i, flat in enumerate(parts):
            flat.grad = torch.zeros_like(flat)
            inner._optimizer_step(i)
            flat.grad = None


def settle(config: dict[str, Any], accumulation: int, clip: float) -> None:
    """Writes the recipe's numbers into a DeepSpeed config. Raises ValueError for what it has otherwise."""
    wrong = [f"{part}: remove it, the recipe's is used" for part in ("optimizer", "scheduler") if part in config]
    for part in ("fp16", "bf16"):
        if config.get(part, {}).get("enabled") is True:
            wrong.append(f"{part}.enabled: set false, heads stay float32; optim.precision=bf16 runs matmuls in bf16")
    stage = config["zero_optimization"].get("stage", 0)
    if stage not in (1, 2, 3):
        wrong.append(f"zero_optimization.stage {stage}: 1, 2 or 3 was expected; without ZeRO use DDP")
    told = {"gradient_accumulation_steps": accumulation, "gradient_clipping": clip}
    for key, value in told.items():
        unsaid = ("auto", 1) if key == "gradient_accumulation_steps" else ("auto",)  # accelerate fills in a 1
        if config.get(key, "auto") not in (*unsaid, value):
            wrong.append(f"{key} {config[key]}: set auto, the recipe says {value}")
    if wrong:
        raise ValueError("the DeepSpeed config asks for other than the recipe:\n  " + "\n  ".join(wrong))
    # the micro batch size is of no effect on training: the loop normalises by tokens
    config.update(told | {"train_micro_batch_size_per_gpu": 1, "train_batch_size": "auto"})
