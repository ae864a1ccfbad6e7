"""Medusa-2: heads and a LoRA on the target learn together, so that the target becomes easier to guess.

loss = KL(original || adapted) + c * s(step) * sum_d decay**d * divergence_d(original, head d on the adapted features)

Both terms are sums that the loop divides by the supervised tokens of the window, so c is the published one. The
original is the same target with its adapter switched off: no second copy of the weights. The output layer is never
adapted: the heads share it, and where it is tied the embedding would move with it.

Legend: B rows, T tokens, K depths, R predicted positions, Ht target hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headstart.heads import Batch, DraftHeads, Losses, Tie, load_heads
from headstart.heads.adapter import digest, lora_tensors
from headstart.heads.base import CHUNK_ELEMENTS
from headstart.heads.batch import predictions
from headstart.heads.losses import forward_kl
from headstart.train.batches import Tokens, collate
from headstart.train.features import Features, Online, holds_several, kept_apart, online
from headstart.train.masking import Masked

RISES: dict[str, Callable[[float], float]] = {
    "sine": lambda share: math.sin(math.pi / 2 * share),
    "linear": lambda share: share,
    "constant": lambda share: 1.0,
}
"""s of the share of the run that a step completes: above zero at the first step, 1 at the last one."""


class Joint(nn.Module):
    """A target with an adapter, and heads that read it: one module, as one loss trains both."""

    def __init__(self, target: Any, heads: DraftHeads) -> None:
        """``target`` from ``adapt``; ``heads`` made for it."""
        super().__init__()
        self.target, self.heads = target, heads

    def train(self, mode: bool = True) -> Joint:
        """The target itself never trains; only the dropout of its adapter follows ``mode``."""
        super().train(mode)
        self.target.train(False)
        for name, module in self.target.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def adapter_parameters(self) -> list[nn.Parameter]:
        """What is trained of the target."""
        return [p for p in self.target.parameters() if p.requires_grad]

    def count(self, supervised: Tensor, document: Tensor, depths: int | None = None) -> Tensor:
        """Supervised tokens [1] int64 that the target predicts, from [B, T] masks: what the sums are divided by."""
        return predictions(supervised, document, -1).sum()[None]

    @torch.no_grad()
    def original(self, tokens: Tokens) -> Online:
        """The teacher: last hidden states with the adapter off. Features are left empty, [B, T, 0]: the adapted ones
        need a gradient and are made in ``forward``."""
        model = self.target.get_base_model()
        with self.target.disable_adapter():
            found = online(model, tokens, [_depth(model)])
        return found._replace(batch=found.batch._replace(features=found.batch.last[..., :0]))

    def forward(
        self,
        batch: Batch,
        tie: Tie,
        *,
        weights: Sequence[float],
        divergence: str = "soft_ce",
        regression: float = 0.0,
    ) -> Losses:
        """Losses of ``DraftHeads.forward`` on the adapted target's features, plus KL(original || adapted).

        ``batch`` from ``original``; ``weights`` [K] hold c * s(step) * decay**d. Rows without a supervised token are
        not run: a NaN in them would reach the gradients, as 0 times NaN is NaN.
        """
        teaches = batch.supervised.any(1)
        if not bool(teaches.any()):
            return self._nothing(len(weights))
        batch = Batch(*(x[teaches] for x in batch))
        with torch.autocast(batch.last.device.type, enabled=False):  # the target speaks in its own precision
            states = self._adapted(batch)
            kl, count = self._divergence(states[_depth(self.target)], batch, tie)
        features = torch.cat([states[i] for i in self.heads.config.features or ()], dim=-1)
        losses: Losses = self.heads(
            batch._replace(features=features), tie, weights=weights, divergence=divergence, regression=regression
        )
        return losses._replace(total=losses.total + kl, target=torch.stack([kl.detach(), count.to(kl.dtype)]))

    def _adapted(self, batch: Batch) -> dict[int, Tensor]:
        """Hidden states [B, T, Ht] with the adapter on and with gradient, by index; zero where there is padding."""
        model = self.target.get_base_model()
        real = batch.document >= 0
        wants = sorted({*(self.heads.config.features or ()), _depth(model)})
        out = model(
            input_ids=batch.tokens,
            **kept_apart(model, batch.document, holds_several(batch.document)),
            output_hidden_states=wants,
            use_cache=False,
            return_dict=True,
            **({"logits_to_keep": 1} if model._supports_logits_to_keep() else {}),
        )
        return {i: torch.where(real[:, :, None], out.hidden_states[i].to(batch.last.device), 0.0) for i in wants}

    def _divergence(self, last: Tensor, batch: Batch, tie: Tie) -> tuple[Tensor, Tensor]:
        """KL(original || adapted) summed over the supervised tokens, and their count; adapted ``last`` [B, T, Ht]."""
        rows = predictions(batch.supervised, batch.document, -1).flatten().nonzero().squeeze(1)  # [R]
        adapted, original = last.flatten(0, 1)[rows - 1], batch.last.flatten(0, 1)[rows - 1]
        chunks = torch.split(torch.arange(len(rows), device=rows.device), max(1, CHUNK_ELEMENTS // len(tie.weight)))
        if len(chunks) == 1:
            return _kl(adapted, original, tie), torch.tensor(len(rows), device=last.device)
        sums = [checkpoint(_kl, adapted[c], original[c], tie, use_reentrant=False) for c in chunks]
        return torch.stack(sums).sum(), torch.tensor(len(rows), device=last.device)

    def _nothing(self, depths: int) -> Losses:
        """Zeros that every trained parameter took part in, as the other ranks expect."""
        total = torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum() * 0.0
        none = total.detach().new_zeros(depths)
        return Losses(total, none, none, none, none.long(), total.detach().new_zeros(2))


def _kl(adapted: Tensor, original: Tensor, tie: Tie) -> Tensor:
    """[R, Ht] and [R, Ht] -> [] summed KL of the laws over the whole vocabulary."""
    with torch.no_grad():
        law = torch.softmax(tie.unembed(original).float(), dim=-1)
    return forward_kl(law, tie.unembed(adapted).float()).sum()


def _depth(target: Any) -> int:
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


# making -------------------------------------------------------------------------------------------------------------


def start_heads(folder: str) -> DraftHeads:
    """The trained heads a joint run begins with, float32. Raises ValueError where the folder holds none."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"joint.heads={folder!r} holds no heads; joint training goes on from trained ones: train them first with a "
            "recipe without the section joint, and name its out/heads here"
        )
    heads = load_heads(folder)
    nn.Module.to(heads, dtype=torch.float32)
    heads.config.adapter = None  # the one they were trained with, if any, is not on this target
    return heads


def adapt(target: Any, *, rank: int, alpha: float, dropout: float, modules: Sequence[str] | None, seed: int) -> Any:
    """``target`` inside a PeftModel with a fresh LoRA, which changes nothing yet; the target is changed in place.

    ``modules`` are the last parts of module names, None = every linear layer but the output. Raises ValueError where
    one of them names the output layer or the embedding, or nothing.
    """
    from peft import LoraConfig, get_peft_model

    check_modules(target, modules or ())
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it by the rank: any number will do
        lora_dropout=dropout,
        target_modules="all-linear" if modules is None else list(modules),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(target, config)
    return adapted


def check_modules(target: nn.Module, modules: Iterable[str]) -> None:
    """Raises ValueError naming what a LoRA cannot be put on, with what it can."""
    tie = Tie.of(target)
    ends = {name: m in (tie.embedding, tie.output) for name, m in target.named_modules() if name}
    linear = {n.split(".")[-1] for n, m in target.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    can = sorted(linear - {name.split(".")[-1] for name, end in ends.items() if end})
    for module in modules:
        hit = [end for name, end in ends.items() if name == module or name.endswith(f".{module}")]
        if any(hit) or module in ("lm_head", "embed_tokens"):
            raise ValueError(
                f"joint.modules names {module!r}: the output layer and the embedding are shared with the heads (and "
                f"often with each other) and stay as they are; choose among {can}"
            )
        if not hit:
            raise ValueError(f"joint.modules names {module!r}, which {type(target).__name__} lacks; it has {can}")


def join(target: Any, heads: DraftHeads, **lora: Any) -> Joint:
    """Both of them as one module on the target's device; ``lora`` as in ``adapt``. Raises ValueError where the heads
    are those of another target."""
    notes = heads.check_target(target)
    if notes:
        raise ValueError(f"joint.heads: {'; '.join(notes)}. Name heads that were trained on this one")
    nn.Module.to(heads, device=Tie.of(target).weight.device)
    adapted = adapt(target, **lora)
    adapted.peft_config["default"].base_model_name_or_path = heads.config.target_name  # no path of a machine
    return Joint(adapted, heads)


# what the loop asks of heads alone or of both ------------------------------------------------------------------------


def heads_of(model: DraftHeads | Joint) -> DraftHeads:
    """The heads in what is trained."""
    return model.heads if isinstance(model, Joint) else model


def source(model: DraftHeads | Joint, target: Any, remember: bool) -> Callable[[Tokens], Online]:
    """Where batches get their features and their teacher from."""
    if isinstance(model, Joint):
        return model.original
    return Features(target, model.config.features or (), remember=remember)


def groups(model: DraftHeads | Joint, times: float) -> Any:
    """Parameters for the optimizer; those of the adapter learn at ``times`` the heads' rate."""
    if isinstance(model, Joint):
        return [{"params": list(model.heads.parameters())}, {"params": model.adapter_parameters(), "times": times}]
    return model.parameters()


def save(model: DraftHeads | Joint, folder: Path) -> None:
    """``folder/heads``, and ``folder/adapter`` as PEFT keeps it where the target was adapted."""
    heads = heads_of(model)
    if isinstance(model, Joint):
        # peft would look a Hub id's vocabulary up to decide on the embedding, which is not adapted
        model.target.save_pretrained(folder / "adapter", save_embedding_layers=False)
        (folder / "adapter" / "README.md").unlink(missing_ok=True)  # a form that nobody filled in
        heads.config.adapter = digest(*lora_tensors(model.target).values())
    heads.save_pretrained(folder / "heads")
    if isinstance(model, Joint):
        heads.config.adapter = None  # was true of the folder alone: the adapter in memory learns on


def restore(model: DraftHeads | Joint, folder: Path) -> None:
    """Loads in place what ``save`` wrote. Raises ValueError where it belongs to another target."""
    heads = heads_of(model)
    saved = type(heads).from_pretrained(str(folder / "heads"))
    if saved.config.target_fingerprint != heads.config.target_fingerprint:
        raise ValueError(f"{folder} was trained on a target with other weights: give another out=FOLDER")
    heads.load_state_dict(saved.state_dict())
    if isinstance(model, Joint):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model.target, load_peft_weights(str(folder / "adapter"), device="cpu"))


# what became of the target --------------------------------------------------------------------------------------------


@torch.no_grad()
def perplexity(target: Any, rows: Sequence[Masked], *, batch_size: int = 8) -> float:
    """exp of the mean negative log-likelihood that ``target`` gives the supervised tokens of ``rows``."""
    tie, last = Tie.of(target), _depth(target)
    lost, count = 0.0, 0
    for first in range(0, len(rows), batch_size):
        batch = online(target, collate(rows, range(len(rows))[first : first + batch_size]), [last]).batch
        at = predictions(batch.supervised, batch.document, -1).flatten().nonzero().squeeze(1)
        for part in torch.split(at, max(1, CHUNK_ELEMENTS // len(tie.weight))):
            logits = tie.unembed(batch.last.flatten(0, 1)[part - 1]).float()
            lost += float(F.cross_entropy(logits, batch.tokens.flatten()[part], reduction="sum"))
        count += len(at)
    return math.exp(lost / count) if count else math.nan


def before_and_after(joint: Joint, rows: Sequence[Masked]) -> tuple[float, float]:
    """The target's perplexity with the adapter off and on."""
    joint.eval()
    with joint.target.disable_adapter():
        before = perplexity(joint.target.get_base_model(), rows)
    return before, perplexity(joint.target.get_base_model(), rows)
