"""EAGLE-3 (Li et al., arXiv 2503.01840): features of three layers, an embedding-and-hidden layer, training-time test,
and a reduced vocabulary; with the two norms of EAGLE-3.1 (arXiv 2605.09992) as options.

Beyond the paper, off unless asked for, is a start in the target's own output space (``residual_last``): what is fused
from the features, and what a matrix makes of the next token's embedding (``embedding_path``), is added to the target's
last hidden state, so that a fresh head repeats the target and ``fit`` can solve for a better start in closed form.

Legend: B rows, k tokens, A feature streams, Ht target hidden size, H width (= Ht), D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.base import Batch, predictions
from headstart.heads.config import HeadsConfig
from headstart.heads.layers import DecoderLayer
from headstart.heads.recurrent import RecurrentHeads
from headstart.heads.solve import LeastSquares
from headstart.heads.tie import Tie


class Eagle3(RecurrentHeads):
    """Slot t: fc(features at t) -> g; attention reads [norm(e(t + 1)) ; norm(g)], the residual goes on from g."""

    options: ClassVar[tuple[str, ...]] = (
        "features",
        "layer",
        "unroll",
        "fc_norm",
        "norm_output",
        "norm_before_residual",
        "residual_last",
        "embedding_path",
    )

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.layer is not None and config.features is not None
        width, eps = config.target_hidden_size, config.layer["rms_norm_eps"]
        self.streams = len(config.features) - config.residual_last
        self.fc = nn.Linear(self.streams * width, width, bias=False)
        norms = (nn.RMSNorm(width, eps=eps) for _ in range(self.streams))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.embedding_fc = nn.Linear(width, width, bias=False) if config.embedding_path else None
        self.input_layernorm = nn.RMSNorm(width, eps=eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layer = DecoderLayer(config.layer, 2 * width)
        self.norm = nn.RMSNorm(width, eps=eps)
        size = config.draft_vocab_size
        self.lm_head = None if size is None else nn.Linear(width, size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def defaults(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """The paper's layers, and the start that pays most for little training."""
        layers = default_layers(facts["target_num_layers"])
        return {"features": layers, "unroll": 3, "fc_norm": True, "residual_last": True, "embedding_path": True}

    @classmethod
    def settle(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """Checks the layers asked for; with ``residual_last`` the last hidden state comes after them."""
        layers = list(facts["features"])
        check_layers(layers, facts["target_num_layers"])
        if facts["layer"]["hidden_size"] != facts["target_hidden_size"]:
            raise ValueError(
                f"EAGLE-3's layer is {facts['layer']['hidden_size']} wide, the target {facts['target_hidden_size']}: "
                "its residual and the target's embedding must be equally wide; leave layer.hidden_size out"
            )
        return facts | {"features": [*layers, facts["target_num_layers"]] if facts.get("residual_last") else layers}

    def start_from(self, tie: Tie) -> None:
        """A random start of the paper's parts, except what makes a fresh head repeat the target's next-token law."""
        for norm in (*(self.fc_norm or ()), self.input_layernorm, self.hidden_norm, self.norm):
            nn.init.ones_(norm.weight)
        self.layer.reset()
        self.fc.reset_parameters()
        if self.config.residual_last:
            nn.init.zeros_(self.fc.weight)
        if self.embedding_fc is not None:
            nn.init.zeros_(self.embedding_fc.weight)
        if self.lm_head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(self.output_rows(tie))

    @torch.no_grad()
    def fit(self, batches: Iterable[Batch], tie: Tie) -> bool:
        """fc and the embedding path become the least-squares map from features and next embedding to the step the
        target's last hidden state takes; the final norm gives its outcome the usual size of such states.

        Needs ``residual_last``: without it the residual does not live in the target's output space.
        """
        if not self.config.residual_last:
            return False
        width = self.config.target_hidden_size
        solver, sizes = LeastSquares(), []
        for batch in batches:
            features, last = batch.features.to(self.dtype).flatten(0, 1), batch.last.to(self.dtype).flatten(0, 1)
            label = predictions(batch.supervised, batch.document, 0).flatten().nonzero().squeeze(1)
            x = self._streams(features[label - 2])
            if self.embedding_fc is not None:
                x = torch.cat([x, self.embed(batch.tokens.flatten()[label - 1], tie)], -1)
            solver.add(x, last[label - 1] - features[label - 2, -width:])
            sizes.append(last[label - 1].pow(2).mean(-1).sqrt())
        weight = solver.solve().T
        self.fc.weight.copy_(weight[:, : self.streams * width])
        if self.embedding_fc is not None:
            self.embedding_fc.weight.copy_(weight[:, self.streams * width :])
        self.norm.weight.fill_(float(torch.cat(sizes).mean()))
        return True

    def begin(self, features: Tensor) -> Tensor:
        """[B, k, A * Ht (+ Ht)] -> g [B, k, H]."""
        g: Tensor = self.fc(self._streams(features))
        return g + features[..., self.streams * g.shape[-1] :] if self.config.residual_last else g

    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """[B, k, 2 H] for attention, embedding first, and the residual."""
        if self.embedding_fc is not None:
            hidden = hidden + self.embedding_fc(embedded)
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else hidden

    def leave(self, out: Tensor) -> Tensor:
        """EAGLE-3.1 hands on the output after its norm."""
        normed: Tensor = self.norm(out)
        return normed if self.config.norm_output else out

    def logits(self, hidden: Tensor, tokens: Tensor, depth: int, tie: Tie) -> Tensor:
        """[..., H] -> [..., D]; the node's own token went in with the layer."""
        if not self.config.norm_output:
            hidden = self.norm(hidden)
        return tie.unembed(hidden) if self.lm_head is None else tie.shape(self.lm_head(hidden))

    def _streams(self, features: Tensor) -> Tensor:
        """[..., A * Ht (+ Ht)] -> what fc reads [..., A * Ht]."""
        width = self.config.target_hidden_size
        parts: tuple[Tensor, ...] = torch.split(features, width, -1)[: self.streams]
        if self.fc_norm is not None:
            parts = tuple(norm(part) for norm, part in zip(self.fc_norm, parts, strict=True))
        return torch.cat(parts, -1)


def default_layers(layers: int) -> list[int]:
    """The paper's three, 2, n // 2 and n - 3, as hidden_states indices; of shallow targets up to three distinct ones
    over 1..n - 1 (0, the embedding, where there is one layer only)."""
    if layers >= 7:
        return [2, layers // 2, layers - 3]
    if layers == 1:
        return [0]
    count = min(3, layers - 1)
    return [1 + (i * (layers - 2)) // max(1, count - 1) for i in range(count)]


def check_layers(ids: list[int], layers: int) -> None:
    """Raises ValueError unless ``ids`` are distinct hidden_states indices of raw residual streams, 0..n - 1."""
    wrong = [i for i in ids if not isinstance(i, int) or not 0 <= i < layers]
    if not ids or wrong or len(set(ids)) != len(ids):
        raise ValueError(
            f"features {ids}: distinct layers in 0..{layers - 1} were expected (i = what enters layer i, from 0; "
            f"the default for {layers} layers is {default_layers(layers)})"
        )
