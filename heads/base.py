"""DraftHeads: the faces every family has, and the one loss that trains them all.

Legend: B rows, T tokens, M slots, K depths, R loss rows, F features, H head width, V target vocabulary, D draft
vocabulary. Slot t holds the target's features at position t; at depth d it predicts token t + 2 + d, because the
target's own output at t already says token t + 1. The teacher of that prediction is the target at position t + 1 + d.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headstart.heads.adapter import adapter_notes
from headstart.heads.batch import Batch, Losses, predictions, slot_table
from headstart.heads.config import HeadsConfig, check_layer, layer_facts, target_facts
from headstart.heads.layers import born_nan
from headstart.heads.losses import DIVERGENCES, acceptance
from headstart.heads.tie import Tie, fingerprint, name_notes, weight_notes
from headstart.heads.vocab import check_draft_ids

CHUNK_ELEMENTS = 1 << 24  # logits held at once by the loss; above it, chunks of rows are recomputed in backward


class DraftHeads(PreTrainedModel, ABC):
    """A family of heads. No tensor of the target is inside: it comes in every call as ``tie``."""

    config_class = HeadsConfig
    config: HeadsConfig
    base_model_prefix = ""
    main_input_name = "batch"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    gradient_checkpointing = False  # set by transformers' activation_checkpointing_enable

    path_free: ClassVar[bool] = False
    """True where the law at a depth does not depend on the path: one row then stands for a whole level."""
    options: ClassVar[tuple[str, ...]] = ()
    """HeadsConfig fields that may be given to ``from_target``, beside ``num_draft_heads``."""
    attention_layers: ClassVar[int] = 0
    """Layers of the family's own whose keys and values ``open`` is given a cache for."""

    tied_output: ClassVar[bool] = False
    """True where ``logits`` go through the target's own output also with a draft vocabulary."""

    draft_ids: Tensor | None  # [D] int64 ascending target ids the heads can say, None = all

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        config.check_format()
        if self.attends(config.to_dict()):
            check_layer(config.layer)
        size = config.draft_vocab_size
        self.register_buffer("draft_ids", None if size is None else torch.zeros(size, dtype=torch.int64))

    # what a family writes: abstract, because there is no sensible default; a family that lacks one cannot be made

    @abstractmethod
    def unroll(self, batch: Batch, tie: Tie, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For d below ``depths``: slots [B, M] int64 and hidden [B, M, H] predicting token slot + 2 + d, teacher
        forced."""

    @abstractmethod
    def open(self, rows: int, room: int, cache: Any) -> Any:
        """Draft-side state for ``rows`` sequences of at most ``room`` tokens.

        ``cache`` keeps keys and values of ``attention_layers`` layers (None where that is 0): ``begin(width, held)``
        before a forward, ``update(keys, values, layer)`` in it, ``lengths`` [B] kept. After each ``refresh`` the caller
        advances it by ``count``, which it knows without asking the device; of what ``level`` writes nothing is kept.
        """

    @abstractmethod
    def refresh(self, features: Tensor, tokens: Tensor, count: Tensor, state: Any, tie: Tie) -> Tensor:
        """Committed path in: features [B, k, F], the tokens [B, k] they led to, count [B] -> root hidden [B, 1, H]."""

    @abstractmethod
    def level(self, tokens: Tensor, parent: Tensor, depth: int, state: Any, tie: Tie) -> Tensor:
        """Nodes [B, w] of ``depth`` >= 1, their index [B, w] into the level above -> hidden [B, w, H]."""

    @abstractmethod
    def logits(self, hidden: Tensor, tokens: Tensor, depth: int, tie: Tie) -> Tensor:
        """[..., H] and the node's own token [...] -> logits [..., D] of the law one deeper."""

    def start_from(self, tie: Tie) -> None:
        """Weights that begin as the target's; called once for fresh heads, after ``draft_ids`` is set."""

    def extra(self, batch: Batch, depth: int, slots: Tensor, hidden: Tensor) -> Tensor:
        """[] sum over the supervised slots [B, M] of a depth of what a family learns beside the law (EAGLE-1: the
        feature itself), from hidden [B, M, H]; ``regression`` of ``forward`` times that is added to the loss. Raises
        ValueError for families that have nothing of the kind."""
        raise ValueError(f"{self.config.family} heads regress nothing: set loss.regression to 0")

    @property
    def trained_depths(self) -> int:
        """Depths that ``unroll`` has; a recurrent family may draft deeper than it is trained."""
        return self.config.num_draft_heads

    def recomputed(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``, a part of ``unroll``: with activation checkpointing, only ``args`` are kept and it runs again
        in backward. What ``args`` hold may not be changed later."""
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(run, *args)
        return run(*args)

    def embed(self, tokens: Tensor, tie: Tie) -> Tensor:
        """[...] -> [..., Ht]: the target's frozen embedding where the heads are and in their precision."""
        return tie.embed(tokens).detach().to(self.device, self.dtype)

    def output_rows(self, tie: Tie) -> Tensor:
        """The target's output rows for what the heads can say, [D, Ht] float32."""
        rows = tie.weight.detach()
        return (rows if self.draft_ids is None else rows[self.draft_ids.to(rows.device)]).float()

    def fit(self, batches: Iterable[Batch], tie: Tie) -> bool:
        """A better start solved in closed form from some batches, before the first step; False where there is none."""
        return False

    # making ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_target(cls, target: Any, *, draft_ids: Tensor | None = None, seed: int = 0, **options: Any) -> DraftHeads:
        """Fresh float32 heads for ``target``, on its output's device.

        ``draft_ids`` [D] ascending target ids limits what the heads can say; ``options`` are HeadsConfig fields.
        """
        facts = target_facts(target.config) | {"family": cls.family_name()}
        known = {"num_draft_heads", *cls.options}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown options {unknown} of {facts['family']} heads; known are {sorted(known)}")
        tie = Tie.of(target)
        if draft_ids is not None:
            check_draft_ids(draft_ids, facts["target_vocab_size"])
            facts["draft_vocab_size"] = draft_ids.numel()
        facts |= cls.defaults(facts) | options
        if cls.attends(facts):
            facts["layer"] = layer_facts(target.config, options.get("layer"))
        config = HeadsConfig(**cls.settle(facts))
        config.target_fingerprint = fingerprint(tie)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = cls(config)
            if draft_ids is not None:
                heads.draft_ids = draft_ids.clone()
            nn.Module.to(heads, dtype=torch.float32)
            heads.start_from(tie)
        nn.Module.to(heads, device=tie.weight.device)
        return heads

    @classmethod
    def family_name(cls) -> str:
        """The key of this class in FAMILIES."""
        return cls.__name__.lower()

    @classmethod
    def defaults(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """HeadsConfig fields that follow from the target's facts."""
        return {"features": [facts["target_num_layers"]]}

    @classmethod
    def attends(cls, facts: dict[str, Any]) -> bool:
        """Whether heads of these HeadsConfig fields have an attention layer that takes its shape from the target."""
        return cls.attention_layers > 0

    @classmethod
    def settle(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """The HeadsConfig fields asked for, checked. Raises ValueError for what the family cannot be made of."""
        return facts

    @classmethod
    def from_pretrained(cls, source: str, *args: Any, **kwargs: Any) -> DraftHeads:  # type: ignore[override]
        """Heads from a folder or the Hub, safetensors only. Raises ValueError where they are damaged, or one that lists
        every missing, unknown or misshapen tensor."""
        asked = kwargs.pop("output_loading_info", False)
        # mismatched sizes pass transformers' own check so that all of them can be named at once, below
        kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True, "use_safetensors": True}
        try:
            loaded: Any = super().from_pretrained(source, *args, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"the weights in {source} are damaged or cut short, get them again: {error}") from error
        heads, info = loaded
        if wrong := _complaints(info):
            described = f"the {heads.config.family} heads its config describes"
            raise ValueError("\n  ".join([f"the tensors in {source} are not those of {described}:", *wrong]))
        if heads.draft_ids is not None:
            check_draft_ids(heads.draft_ids, heads.config.target_vocab_size)
        return loaded if asked else heads  # type: ignore[no-any-return]

    def push_to_hub(self, repo_id: str, *, private: bool | None = True, **kwargs: Any) -> str:  # type: ignore[override]
        """Config and weights alone, a new repository being private; `headstart push` brings the whole folder."""
        return str(super().push_to_hub(repo_id, private=private, **kwargs))  # type: ignore[arg-type]

    def _init_weights(self, module: nn.Module) -> None:
        """Called by transformers for tensors a checkpoint lacks: NaN, so that none passes for trained."""
        if getattr(module, "_is_hf_initialized", False):
            return
        born_nan(module)

    def check_target(self, target: Any) -> list[str]:
        """Raises ValueError where ``target`` cannot carry these heads; returns warnings where it merely differs."""
        mine, facts = self.config, target_facts(target.config)
        mine.check_sizes(facts)
        name = facts["target_name"]
        others = weight_notes(mine.target_fingerprint, mine.target_name, Tie.of(target), name)
        return adapter_notes(mine.adapter, target) + (others or name_notes(mine.target_name, name))

    # the loss -------------------------------------------------------------------------------------------------------

    def count(self, supervised: Tensor, document: Tensor, depths: int | None = None) -> Tensor:
        """Supervised predictions per depth [K] int64, from [B, T] masks alone: known before any forward."""
        depths = self.trained_depths if depths is None else depths
        return torch.stack([predictions(supervised, document, d).sum() for d in range(depths)])

    def forward(
        self,
        batch: Batch,
        tie: Tie,
        *,
        weights: Sequence[float],
        divergence: str = "soft_ce",
        regression: float = 0.0,
    ) -> Losses:
        """The training loss: unroll, supervised slots, chunks of rows, divergences.

        ``weights`` [K] one a depth: a recurrent family unrolls as many; ``divergence`` a key of DIVERGENCES;
        ``regression`` the weight of ``extra``.
        """
        if not 0 < len(weights) <= self.trained_depths:
            raise ValueError(f"{len(weights)} depth weights for heads that are trained on {self.trained_depths} depths")
        if not torch.is_autocast_enabled(batch.features.device.type):
            batch = batch._replace(features=batch.features.to(self.dtype))
        depths = list(self.unroll(batch, tie, len(weights)))
        tables = [slot_table(slots, batch.tokens.shape[1]) for slots, _ in depths]
        masks = [predictions(batch.supervised, batch.document, d) for d in range(len(depths))]
        rows = torch.stack(masks).any(0).flatten().nonzero().squeeze(1)  # [R] flat positions s that someone predicts
        per_depth = [
            (table, hidden, mask.flatten()) for (_, hidden), table, mask in zip(depths, tables, masks, strict=True)
        ]
        size = self.config.draft_vocab_size or tie.weight.shape[0]
        chunks = torch.split(rows, max(1, CHUNK_ELEMENTS // size)) if rows.numel() else (rows,)
        sums = []
        for chunk in chunks:
            args = (chunk, batch, per_depth, tie, divergence)
            whole = len(chunks) == 1
            sums.append(self._rows(*args) if whole else checkpoint(self._rows, *args, use_reentrant=False))
        loss, correct, alpha = torch.stack(sums).sum(0)  # each [K]
        weight = torch.tensor(list(weights), dtype=loss.dtype, device=loss.device)
        count = torch.stack([m.sum() for m in masks])
        total = (loss * weight).sum()
        if regression:
            more = [self.extra(batch, d, slots, hidden) for d, (slots, hidden) in enumerate(depths)]
            total = total + regression * (torch.stack(more) * weight).sum()
        return Losses(total, loss.detach(), correct.detach(), alpha.detach(), count)

    def _rows(self, rows: Tensor, batch: Batch, per_depth: list[Any], tie: Tie, divergence: str) -> Tensor:
        """Sums [3, K] of loss, correct guesses and acceptance over the predicted flat positions ``rows`` [R]."""
        p, best = self.teacher(batch.last.flatten(0, 1)[rows - 1], tie)
        tokens, length = batch.tokens.flatten(), batch.tokens.shape[1]
        sums = []
        for d, (table, hidden, mask) in enumerate(per_depth):
            at = mask[rows].nonzero().squeeze(1)
            s = rows[at]
            slot = table[s - 2 - d] + (s // length) * hidden.shape[1]
            logits = self.logits(hidden.flatten(0, 1)[slot], tokens[s - 1], d, tie).float()
            guess = logits.detach().argmax(-1) if at.numel() else at
            right = (guess if self.draft_ids is None else self.draft_ids[guess]) == best[at]
            with torch.no_grad():
                alpha = acceptance(p[at], logits).sum()
            sums.append(torch.stack([DIVERGENCES[divergence](p[at], logits).sum(), right.sum().float(), alpha]))
        return torch.stack(sums, dim=1)

    @torch.no_grad()
    def teacher(self, last: Tensor, tie: Tie) -> tuple[Tensor, Tensor]:
        """Last hidden [R, Ht] -> the target's law on the draft vocabulary [R, D] float32, and its argmax [R]."""
        laws, best = [], []
        for part in torch.split(last, max(1, CHUNK_ELEMENTS // tie.weight.shape[0])):
            with torch.autocast(last.device.type, enabled=False):  # the teacher speaks in its own precision
                logits = tie.unembed(part).float()
            best.append(logits.argmax(-1) if part.shape[0] else logits.new_zeros(0, dtype=torch.int64))
            top = logits if self.draft_ids is None else logits[:, self.draft_ids]
            laws.append((top - logits.logsumexp(-1, keepdim=True)).exp())
        return torch.cat(laws), torch.cat(best)


def _complaints(info: dict[str, Any]) -> list[str]:
    """The tensors that loading found to be wrong, a line each."""
    misshapen = sorted(info["mismatched_keys"])
    return [
        *(f"missing: {name}" for name in sorted(info["missing_keys"])),
        *(f"unknown: {name}" for name in sorted(info["unexpected_keys"])),
        *(f"misshapen: {name} is {tuple(found)}, expected {tuple(wanted)}" for name, found, wanted in misshapen),
    ]
