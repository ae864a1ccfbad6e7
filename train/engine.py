"""What the launcher's engines do differently, behind one face: one process, DDP, FSDP2, DeepSpeed ZeRO-1/2/3.

To the loop an engine is a loss, a backward, a step, and whole tensors by parameter name. Heads are small beside their
target, so the main process can hold them whole: checkpoints and evaluation are made of plain tensors that load under
any engine and any number of processes.

Gradients are averaged over ranks and summed over the micro-batches of a window by all of them.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from headstart.heads import Batch, DraftHeads, Losses, Tie
from headstart.train.checkpoint import Moments
from headstart.train.engine_deepspeed import ZeRO
from headstart.train.engine_torch import Torch
from headstart.train.joint import Joint

PATIENCE = timedelta(hours=4)  # ranks wait while the main process evaluates


def open_accelerator(precision: str) -> Accelerator:
    """The accelerator of a run, as launcher and environment have it; ``precision`` fp32 or bf16, of the heads' matmuls.

    Raises ValueError for launches that would silently train something else.
    """
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"  # where accelerate names no backend, and so counts one process
    patience = InitProcessGroupKwargs(timeout=PATIENCE, **({"backend": "gloo"} if on_cpu else {}))
    half = precision == "bf16" and not asked("ACCELERATE_USE_DEEPSPEED")
    accelerator = Accelerator(mixed_precision="bf16" if half else "no", kwargs_handlers=[patience])
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # accelerate lets transformers know of ZeRO-3 whatever zero3_init_flag says, and from_pretrained would then
        # split what it loads: the target, and heads of a checkpoint
        unset_hf_deepspeed_config()
    if precision == "bf16" and accelerator.distributed_type == DistributedType.DEEPSPEED:
        # autocast as everywhere else, and no parameter is averaged in bf16; weights and moments stay float32
        config = accelerator.deepspeed_plugin.deepspeed_config
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    refuse_lonely_ranks(accelerator.num_processes)
    refuse_split_targets(accelerator)
    return accelerator


def asked(name: str) -> bool:
    """Whether the launcher set a switch of accelerate's."""
    return os.environ.get(name, "false").lower() in ("true", "1")


def refuse_lonely_ranks(processes: int) -> None:
    """Raises ValueError where the launcher started ranks that do not know of each other."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != processes:
        raise ValueError(
            f"the launcher started {world} processes, accelerate sees {processes}: each would train alone. On CPU use "
            "headstart train RECIPE --num-processes N, or\n"
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m headstart.train ..."
        )


def refuse_split_targets(accelerator: Accelerator) -> None:
    """Raises ValueError where DeepSpeed would take the target apart while it is loaded."""
    plugin = accelerator.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    if plugin is not None and plugin.zero3_init_flag:
        raise ValueError(
            "the launcher's zero3_init_flag would split the frozen target over the processes as it is loaded, and only "
            "the heads are put together again: set zero3_init_flag: false in the section deepspeed_config"
        )


class Engine(Protocol):
    """What the loop asks of an engine. Every method but ``backward`` is called by all ranks together."""

    model: Any  # of which the loop sets the mode alone

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """A context for forward and backward of one micro-batch, the ``last`` of its window or not."""

    def loss(self, batch: Batch, tie: Tie, **options: Any) -> Losses:
        """``DraftHeads.forward``: the one door to what is trained, as no wrapper sees another method of it."""

    def backward(self, loss: Tensor) -> None:
        """Adds a micro-batch's gradients [] to the window's."""

    def step(self, rate: float, clip: float) -> float:
        """Clips to the norm ``clip`` and steps at ``rate``. Returns the norm there was before clipping; where it is not
        finite, nothing is changed on any rank."""

    def whole(self) -> DraftHeads | Joint:
        """What is trained, as it is now; other ranks than the main one may get their own part of it only."""

    def optimizer_state(self) -> Moments:
        """Empty before the first step."""

    def load_optimizer(self, state: Moments) -> None:
        """Takes over what ``optimizer_state`` gave, under this engine or another. Raises ValueError where it is not
        that of these parameters; nothing is loaded in part."""


def open_engine(
    accelerator: Accelerator,
    model: DraftHeads | Joint,
    *,
    accumulation: int,
    clip: float,
    times: float,
    backend: str = "",
    **adamw: Any,
) -> Engine:
    """The engine that the launcher asked for, around ``model`` and an AdamW of ``adamw``'s options.

    ``times`` is the rate of a target's adapter over that of the heads, ``backend`` of torch.compile, "" = eager. Raises
    ValueError naming what an engine cannot do.
    """
    kind = accelerator.distributed_type
    shards = kind == DistributedType.FSDP or (asked("ACCELERATE_USE_FSDP") and kind == DistributedType.MULTI_CPU)
    splits = shards or kind == DistributedType.DEEPSPEED
    if splits and isinstance(model, Joint):
        raise ValueError(
            f"joint training (Medusa-2) adapts the target itself, which {'FSDP' if shards else 'DeepSpeed'} would "
            "split over the processes: launch it with DDP (accelerate launch --multi_gpu, or headstart train "
            "--num-processes)"
        )
    if kind in (DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(f"training under {kind} is not available: use one process, DDP, FSDP2 or DeepSpeed")
    if accelerator.gradient_accumulation_steps not in (1, accumulation):
        raise ValueError(
            f"accelerate accumulates {accelerator.gradient_accumulation_steps} batches (its environment or config says "
            f"so), the recipe {accumulation}: remove it there"
        )
    if kind == DistributedType.DEEPSPEED and not isinstance(model, Joint):
        return ZeRO(accelerator, model, accumulation, clip, backend, adamw)
    if shards:
        refuse_fsdp_options()
    return Torch(accelerator, model, shards, times, backend, adamw)


def refuse_fsdp_options() -> None:
    """Raises ValueError for options of the launcher that ``fully_shard`` over the whole of the heads does not have."""
    if os.environ.get("FSDP_VERSION", "2") != "2":
        raise ValueError("FSDP1 is not available: set fsdp_version: 2 in the section fsdp_config")
    if asked("FSDP_OFFLOAD_PARAMS"):
        raise ValueError("heads are not kept on the CPU between steps: set fsdp_offload_params: false")
    if asked("FSDP_ACTIVATION_CHECKPOINTING"):
        raise ValueError("the recipe decides on activation checkpointing: set optim.recompute=true there")
