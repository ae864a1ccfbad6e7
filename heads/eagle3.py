"""EAGLE-3 (Li et al., arXiv 2503.01840): features of three layers, an embedding-and-hidden layer, training-time test,
and a reduced vocabulary; with the two norms of EAGLE-3.1 (arXiv 2605.09992) as options.

Beyond the paper is a start in the target's own output space (``residual_last``): what is fused from the features is
added to the target's last hidden state, so that a fresh head repeats the target; and a matrix beside the attention,
over what attention reads, that carries the state from token to token (``step_path``), so that ``fit`` can solve for a
better start.

Legend: B rows, k tokens, A feature streams, Ht target hidden size, H width (= Ht), D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.batch import Batch, predictions
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
        "step_path",
    )

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.layer is not None and config.features is not None
        width, eps = config.target_hidden_size, config.layer["rms_norm_eps"]
        self.streams = len(config.features) - config.residual_last
        self.fc = nn.Linear(self.streams * width, width, bias=False)
        norms = (nn.RMSNorm(width, eps=eps) for _ in range(self.streams))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.input_layernorm = nn.RMSNorm(width, eps=eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.path = nn.Linear(2 * width, width, bias=False) if config.step_path else None
        self.layer = DecoderLayer(config.layer, 2 * width)
        self.norm = nn.RMSNorm(width, eps=eps)
        size = config.draft_vocab_size
        self.lm_head = None if size is None else nn.Linear(width, size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def defaults(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """The paper's layers, and the start that pays most for little training."""
        layers = default_layers(facts["target_num_layers"])
        return {"features": layers, "unroll": 3, "fc_norm": True, "residual_last": True, "step_path": True}

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
        if self.path is not None:
            nn.init.zeros_(self.path.weight)
        if self.lm_head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(self.output_rows(tie))

    @torch.no_grad()
    def fit(self, batches: Iterable[Batch], tie: Tie) -> bool:
        """The step path and fc become least-squares maps to the step that the target's last hidden state takes, and the
        final norm gives the outcome the usual size of such states.

        The path is solved over the true states at first and then also over the states that the solution itself reaches
        in later steps; fc, each time, over what the path leaves in step 0. Needs ``residual_last`` and ``step_path``:
        without them there is nothing in the residual that a linear map could be put into.
        """
        if not self.config.residual_last or self.path is None:
            return False
        kept, width, power = list(batches), self.config.target_hidden_size, None
        for steps in range(1, 1 + max(2, self.config.unroll)):
            path, fc, sizes = LeastSquares(), LeastSquares(power), []
            for batch in kept:
                for hidden, x, truth, _ in self._linear_steps(batch, tie, steps):
                    path.add(x, truth - hidden)
            self.path.weight.copy_(path.solve().T)
            for batch in kept:
                _, x, truth, features = next(self._linear_steps(batch, tie, 1))
                fc.add(self._streams(features), truth - features[:, -width:] - self.path(x))
                sizes.append(truth.pow(2).mean(-1).sqrt())
            self.fc.weight.copy_(fc.solve().T)
            power = fc.power  # what fc reads stays
            self.norm.weight.fill_(float(torch.cat(sizes).mean()))
        return True

    def _linear_steps(self, batch: Batch, tie: Tie, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Step by step over the labelled slots, without attention and MLP: the state [R, H] before the step, what its
        path reads [R, 2 H], the target's last hidden state [R, H] to reach, and the slot's features [R, F]."""
        assert self.path is not None
        embedded = self.embed(batch.tokens, tie).flatten(0, 1)
        features, last = (x.to(self.dtype).flatten(0, 1) for x in (batch.features, batch.last))
        slot = predictions(batch.supervised, batch.document, 0).flatten().nonzero().squeeze(1) - 2
        hidden = self.begin(features[slot])
        for step in range(steps):
            x = self._read(hidden, embedded[slot + 1 + step])
            yield hidden, x, last[slot + 1 + step], features[slot]
            further = predictions(batch.supervised, batch.document, step + 1).flatten()
            label = slot + 3 + step
            here = (label < further.numel()) & further[label.clamp(max=further.numel() - 1)]
            slot, hidden = slot[here], (hidden + self.path(x))[here]

    def begin(self, features: Tensor) -> Tensor:
        """[B, k, A * Ht (+ Ht)] -> g [B, k, H]."""
        g: Tensor = self.fc(self._streams(features))
        return g + features[..., self.streams * g.shape[-1] :] if self.config.residual_last else g

    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """[B, k, 2 H] for attention, embedding first, and the residual."""
        x = self._read(hidden, embedded)
        residual = self.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        return x, residual if self.path is None else residual + self.path(x)

    def _read(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

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
