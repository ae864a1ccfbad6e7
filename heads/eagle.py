"""EAGLE-1 and EAGLE-2 (Li et al., arXiv 2401.15077 and 2406.16858): one set of weights that guesses the target's next
feature from this one and the next token; EAGLE-2 is the tree that grows by its probabilities, which is how all heads
are decoded here.

The feature is the target's last hidden state after its final norm, so that the target's own frozen output reads the
guess. Training it for more than one step on its own output (``unroll``) is the upgrade of HASS (arXiv 2408.15766).

Legend: B rows, M slots, k tokens, H target hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.batch import Batch, predictions
from headstart.heads.config import HeadsConfig
from headstart.heads.layers import DecoderLayer
from headstart.heads.recurrent import RecurrentHeads
from headstart.heads.solve import LeastSquares
from headstart.heads.tie import Tie


class Eagle(RecurrentHeads):
    """Slot t: fc([e(t + 1) ; f(t)]) through a decoder layer without input norm -> the guess at f(t + 1)."""

    options: ClassVar[tuple[str, ...]] = ("layer", "unroll", "feature_noise")
    tied_output: ClassVar[bool] = True

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        width = config.target_hidden_size
        if config.layer["hidden_size"] != width:
            raise ValueError(
                f"EAGLE's layer is {config.layer['hidden_size']} wide, the target {width}: it guesses the target's own "
                "features, so leave layer.hidden_size out"
            )
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layer = DecoderLayer(config.layer, width)
        self.post_init()  # type: ignore[no-untyped-call]

    def start_from(self, tie: Tie) -> None:
        """Hands the feature on: a fresh head repeats the target's next-token law."""
        self.layer.reset()
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, self.fc.out_features :].copy_(torch.eye(self.fc.out_features))

    @torch.no_grad()
    def fit(self, batches: Iterable[Batch], tie: Tie) -> bool:
        """fc becomes the least-squares map from next embedding and feature to the next feature."""
        solver = LeastSquares()
        for batch in batches:
            features = batch.features.to(self.dtype).flatten(0, 1)
            label = predictions(batch.supervised, batch.document, 0).flatten().nonzero().squeeze(1)
            embedded = self.embed(batch.tokens.flatten()[label - 1], tie)
            solver.add(torch.cat([embedded, features[label - 2]], -1), features[label - 1])
        self.fc.weight.copy_(solver.solve().T)
        return True

    def begin(self, features: Tensor) -> Tensor:
        """The feature itself, [B, k, H]; in training with uniform noise, as published 512 / T times ``feature_noise``
        wide."""
        noise = self.config.feature_noise
        if not self.training or noise == 0:
            return features
        return features + (torch.rand_like(features) - 0.5) * (noise * 512 / features.shape[1])

    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Attention and residual both go on from fc([embedding ; hidden]), [B, k, H]."""
        x = self.fc(torch.cat([embedded, hidden], -1))
        return x, x

    def logits(self, hidden: Tensor, tokens: Tensor, depth: int, tie: Tie) -> Tensor:
        """[..., H] -> [..., D] through the target's own output."""
        return tie.unembed(hidden, self.draft_ids).to(hidden.dtype)

    def extra(self, batch: Batch, depth: int, slots: Tensor, hidden: Tensor) -> Tensor:
        """Smooth L1 between the guess and the feature it stands for, mean over H, summed over supervised slots."""
        label = slots + 2 + depth
        inside = label < batch.tokens.shape[1]
        label = label.clamp(max=batch.tokens.shape[1] - 1)
        mask = predictions(batch.supervised, batch.document, depth).gather(1, label) & inside
        truth = batch.features.gather(1, (label - 1)[:, :, None].expand(-1, -1, hidden.shape[-1]))
        apart = F.smooth_l1_loss(hidden.float(), truth.float(), reduction="none").mean(-1)
        return torch.where(mask, apart, 0.0).sum()
