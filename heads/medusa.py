"""Medusa-1 (Cai et al., arXiv 2401.10774): K heads on the target's last hidden state, each guessing one token further.

Every head has its own residual blocks, which start as the identity. The output is the target's own (the paper's
"version 2" layout), or, with a draft vocabulary, a matrix per head that starts from the target's rows for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.base import DraftHeads
from headstart.heads.batch import Batch, predictions
from headstart.heads.config import HeadsConfig, check_one_feature
from headstart.heads.layers import ResBlock, stack
from headstart.heads.solve import LeastSquares
from headstart.heads.tie import Tie


@dataclass
class MedusaState:
    """The last feature of each row [B, 1, F]; all a Medusa head needs to know of the past."""

    feature: Tensor | None = None


class Medusa(DraftHeads):
    """B rows, M slots, F = H target hidden size, D draft vocabulary, K heads."""

    path_free: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("features", "num_draft_layers")

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        check_one_feature(config)
        width, heads = config.target_hidden_size, config.num_draft_heads
        self.blocks = nn.ModuleList(stack(width, config.num_draft_layers) for _ in range(heads))
        size = config.draft_vocab_size
        self.outputs = None if size is None else nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(heads))
        self.post_init()  # type: ignore[no-untyped-call]

    def start_from(self, tie: Tie) -> None:
        """Identity blocks and the target's own rows: a fresh head repeats the target's next-token law."""
        for block in self.blocks.modules():
            if isinstance(block, ResBlock):
                block.reset()
        if self.outputs is not None:
            rows = self.output_rows(tie)
            with torch.no_grad():
                for output in self.outputs:
                    output.get_parameter("weight").copy_(rows)

    @torch.no_grad()
    def fit(self, batches: Iterable[Batch], tie: Tie) -> bool:
        """Each head's output becomes the target's rows after a least-squares map from the feature at a slot to the
        target's last hidden state 1 + d positions on: what a linear head can know, without a step of descent.

        Works with a draft vocabulary only: the target's own output cannot take the map in.
        """
        if self.outputs is None:
            return False
        solvers = [LeastSquares() for _ in self.outputs]
        for batch in batches:
            features, last = batch.features.flatten(0, 1), batch.last.flatten(0, 1)
            for d, solver in enumerate(solvers):
                label = predictions(batch.supervised, batch.document, d).flatten().nonzero().squeeze(1)
                solver.add(features[label - 2 - d], last[label - 1])
        rows = self.output_rows(tie).double()
        for output, solver in zip(self.outputs, solvers, strict=True):
            output.get_parameter("weight").copy_(rows @ solver.solve().T)
        return True

    def unroll(self, batch: Batch, tie: Tie, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One depth a head, all of them over every slot: [B, T] and [B, T, H]."""
        slots = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        for block in self.blocks[:depths]:
            yield slots, self.recomputed(block, batch.features)

    def open(self, rows: int, room: int, cache: Any) -> MedusaState:
        """Nothing but the last feature is kept."""
        return MedusaState()

    def refresh(self, features: Tensor, tokens: Tensor, count: Tensor, state: MedusaState, tie: Tie) -> Tensor:
        """Keeps the feature that led to the root; a row with count 0 keeps its old one. -> [B, 1, H]."""
        at = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[-1])
        fresh = features.gather(1, at)
        old = state.feature
        state.feature = fresh if old is None else torch.where((count > 0)[:, None, None], fresh, old)
        hidden: Tensor = self.blocks[0](state.feature)
        return hidden

    def level(self, tokens: Tensor, parent: Tensor, depth: int, state: MedusaState, tie: Tie) -> Tensor:
        """Head ``depth`` looks at the root's feature, whatever the path: [B, w, H]."""
        assert state.feature is not None
        hidden: Tensor = self.blocks[depth](state.feature)
        return hidden.expand(-1, tokens.shape[1], -1)

    def logits(self, hidden: Tensor, tokens: Tensor, depth: int, tie: Tie) -> Tensor:
        """[..., H] -> [..., D]; the node's own token is not looked at."""
        if self.outputs is None:
            return tie.unembed(hidden)
        return tie.shape(self.outputs[depth](hidden))
