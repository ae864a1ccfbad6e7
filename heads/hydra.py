"""Hydra and Hydra++ (Ankner et al., arXiv 2402.05109): Medusa heads that also read the tokens guessed before them.

Hydra++ is four blocks a head with dropout, a decoder layer over the whole prefix before the heads
(``prefix_attention``), and the target's law as the only teacher, which is how all heads are trained here.

Legend: B rows, T tokens, k tokens of a step, w frontier, d depth, H target hidden size, D draft vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.attention import additive, attend
from headstart.heads.base import DraftHeads
from headstart.heads.batch import Batch, positions, predictions
from headstart.heads.config import HeadsConfig, check_one_feature
from headstart.heads.layers import DecoderLayer, ResBlock
from headstart.heads.solve import LeastSquares
from headstart.heads.tie import Tie


class HydraState:
    """The root's feature [B, 1, H] and the path tokens' embeddings of the last level [B, w, d * H]."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.feature: Tensor | None = None
        self.root: Tensor | None = None  # [B, 1, H] embedding of the root
        self.path: Tensor | None = None


class Entry(nn.Module):
    """y = R x + SiLU(W x + b) over feature and embeddings [..., X] -> [..., H]; fresh, it hands on the feature."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.residual = nn.Linear(inputs, width)
        self.linear = nn.Linear(inputs, width)

    def reset(self) -> None:
        """R takes the feature and nothing else, W nothing."""
        width = self.residual.out_features
        with torch.no_grad():
            self.residual.weight.zero_()
            self.residual.weight[:, :width].copy_(torch.eye(width))
            for tensor in (self.residual.bias, self.linear.weight, self.linear.bias):
                tensor.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., X] -> [..., H]."""
        y: Tensor = self.residual(x) + F.silu(self.linear(x))
        return y


class Hydra(DraftHeads):
    """Head d at slot t reads [f(t) ; e(t + 1) ; ... ; e(t + 1 + d)] and guesses token t + 2 + d."""

    options: ClassVar[tuple[str, ...]] = ("features", "layer", "num_draft_layers", "prefix_attention", "dropout")
    attention_layers: ClassVar[int] = 1

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        check_one_feature(config)
        width, heads = config.target_hidden_size, config.num_draft_heads
        self.prefix: DecoderLayer | None = None
        self.prefix_norm: nn.RMSNorm | None = None
        if config.prefix_attention:
            assert config.layer is not None
            self.prefix = DecoderLayer(config.layer, width)
            self.prefix_norm = nn.RMSNorm(width, eps=config.layer["rms_norm_eps"])
        blocks = range(config.num_draft_layers - 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(Entry((d + 2) * width, width), *(ResBlock(width) for _ in blocks)) for d in range(heads)
        )
        self.dropout = nn.Dropout(config.dropout)
        size = config.draft_vocab_size
        self.outputs = None if size is None else nn.ModuleList(nn.Linear(width, size) for _ in range(heads))
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def defaults(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """Hydra++ of one block a head: few steps do not fill four."""
        return super().defaults(facts) | {"prefix_attention": True}

    @classmethod
    def attends(cls, facts: dict[str, Any]) -> bool:
        """Plain Hydra needs nothing of the target's attention."""
        return bool(facts["prefix_attention"])

    @classmethod
    def settle(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """The layer over the prefix must be as wide as the target."""
        if not facts["prefix_attention"]:
            return facts
        if facts["layer"]["hidden_size"] != facts["target_hidden_size"]:
            raise ValueError(
                f"Hydra's layer is {facts['layer']['hidden_size']} wide, the target {facts['target_hidden_size']}: its "
                "output replaces the target's feature, so leave layer.hidden_size out"
            )
        return facts

    def start_from(self, tie: Tie) -> None:
        """A fresh head repeats the target's next-token law."""
        for block in self.blocks.modules():
            if isinstance(block, (ResBlock, Entry)):
                block.reset()
        if self.prefix is not None and self.prefix_norm is not None:
            self.prefix.reset()
            nn.init.ones_(self.prefix_norm.weight)
        with torch.no_grad():
            for output in self.outputs or ():
                output.get_parameter("weight").copy_(self.output_rows(tie))
                output.get_parameter("bias").zero_()

    @torch.no_grad()
    def fit(self, batches: Iterable[Batch], tie: Tie) -> bool:
        """Each head's R becomes the least-squares map from what it reads to the target's last hidden state."""
        solvers = [LeastSquares() for _ in self.blocks]
        for batch in batches:
            features, last = batch.features.to(self.dtype).flatten(0, 1), batch.last.flatten(0, 1)
            embedded = self.embed(batch.tokens, tie).flatten(0, 1)
            for d, solver in enumerate(solvers):
                label = predictions(batch.supervised, batch.document, d).flatten().nonzero().squeeze(1)
                path = [embedded[label - 1 - d + i] for i in range(d + 1)]
                solver.add(torch.cat([features[label - 2 - d], *path], -1), last[label - 1])
        for block, solver in zip(self.blocks, solvers, strict=True):
            block.get_submodule("0").get_parameter("residual.weight").copy_(solver.solve().T)
        return True

    def unroll(self, batch: Batch, tie: Tie, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One depth a head, over every slot: [B, T] and [B, T, H]. The last slots of a depth wrap and have no label."""
        slots = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        x, embedded = self.recomputed(self._prefixed, batch), self.embed(batch.tokens, tie)
        for d in range(depths):
            x = torch.cat([x, embedded.roll(-1 - d, 1)], -1)
            yield slots, self.recomputed(self._head, d, x, True)

    def open(self, rows: int, room: int, cache: Any) -> HydraState:
        """Keys and values of the layer over the prefix, where there is one."""
        return HydraState(cache)

    def refresh(self, features: Tensor, tokens: Tensor, count: Tensor, state: HydraState, tie: Tie) -> Tensor:
        """The layer over the committed rows; keeps the feature and the token of the root. -> [B, 1, H]."""
        rows, k = tokens.shape
        if self.prefix is not None and self.prefix_norm is not None:
            depth = torch.arange(k, device=tokens.device).expand(rows, -1)
            seen = (depth[:, :, None] >= depth[:, None]).contiguous()
            features = self.prefix.cached(self.prefix_norm(features), features, seen, depth, state.cache)
        at = (count - 1).clamp(min=0)[:, None]
        fresh = features.gather(1, at[:, :, None].expand(-1, 1, features.shape[-1]))
        root = self.embed(tokens.gather(1, at), tie)
        went_on = (count > 0)[:, None, None]
        state.feature = fresh if state.feature is None else torch.where(went_on, fresh, state.feature)
        state.root = root if state.root is None else torch.where(went_on, root, state.root)
        state.path = state.root
        return self._head(0, torch.cat([state.feature, state.root], -1))

    def level(self, tokens: Tensor, parent: Tensor, depth: int, state: HydraState, tie: Tie) -> Tensor:
        """Head ``depth`` on the path of every node: [B, w, H]."""
        assert state.feature is not None and state.root is not None and state.path is not None
        above = state.root if depth == 1 else state.path
        path = above.gather(1, parent[:, :, None].expand(-1, -1, above.shape[-1]))
        state.path = torch.cat([path, self.embed(tokens, tie)], -1)
        return self._head(depth, torch.cat([state.feature.expand(-1, tokens.shape[1], -1), state.path], -1))

    def logits(self, hidden: Tensor, tokens: Tensor, depth: int, tie: Tie) -> Tensor:
        """[..., H] -> [..., D]; the node's own token went in with the head."""
        if self.outputs is None:
            return tie.unembed(hidden)
        return tie.shape(self.outputs[depth](hidden))

    def _head(self, depth: int, x: Tensor, drop: bool = False) -> Tensor:
        for block in self.blocks[depth].children():
            x = self.dropout(block(x)) if drop else block(x)
        return x

    def _prefixed(self, batch: Batch) -> Tensor:
        """Features [B, T, H] after the layer over the prefix, causal within each document."""
        x = batch.features
        if self.prefix is None or self.prefix_norm is None:
            return x
        normed = self.prefix_norm(x)
        cos, sin = self.prefix.rotary(positions(batch.document))
        index = torch.arange(x.shape[1], device=x.device)
        same = batch.document[:, :, None] == batch.document[:, None]
        mask = additive(same & (index[:, None] >= index), normed.dtype)
        keys, values = self.prefix.keys_values(normed, cos, sin)
        return self.prefix.finish(x, attend(self.prefix.queries(normed, cos, sin), keys, values, mask))
