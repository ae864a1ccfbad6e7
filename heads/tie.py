"""Tie: the target's embedding and output, lent to the heads in every call and never stored in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Tie:
    """What a target does before its first layer and after its last one.

    Shapes: V target vocabulary, H target hidden size. Both weights stay the target's own storage.
    """

    embedding: nn.Module  # [...] ids -> [..., H]; an embedding scale inside the module is kept
    output: nn.Module  # [..., H] -> [..., V]
    embedding_scale: float = 1.0  # multiplied in by the model after its embedding module (Gemma, Granite)
    logit_scale: float = 1.0  # multiplied into the logits (Cohere), or 1 / logits_scaling (Granite)
    softcap: float | None = None  # cap * tanh(logits / cap) (Gemma2)
    picked: tuple[Tensor, Tensor | None] | None = None  # rows [D, H] and bias [D] that ``pick`` has gathered

    @classmethod
    def of(cls, target: Any) -> Tie:
        """The tie of a causal LM. Raises ValueError where it has no input embedding or output layer."""
        embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
        if embedding is None or output is None:
            raise ValueError(
                f"{type(target).__name__} shows no input embedding or no output layer; "
                "a causal LM with get_input_embeddings() and get_output_embeddings() is needed"
            )
        text = target.config.get_text_config(decoder=True)
        scale = float(getattr(text, "logit_scale", None) or 1.0)
        if getattr(text, "logits_scaling", None):
            scale /= float(text.logits_scaling)
        softcap = getattr(text, "final_logit_softcapping", None)
        embedding_scale = float(getattr(text, "embedding_multiplier", None) or 1.0)
        return cls(embedding, output, embedding_scale, scale, float(softcap) if softcap else None)

    @property
    def weight(self) -> Tensor:
        """The output matrix [V, H]."""
        weight: Tensor = self.output.weight  # type: ignore[assignment]
        return weight

    def pick(self, rows: Tensor) -> Tie:
        """This tie for one call of decoding: the output rows for token ids ``rows`` [D] are gathered once."""
        return replace(self, picked=self._rows(rows))

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        bias: Tensor | None = getattr(self.output, "bias", None)
        return self.weight[rows], None if bias is None else bias[rows]

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., H] as the first layer sees them."""
        embedded: Tensor = self.embedding(tokens)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def unembed(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Hidden [..., H] after the final norm -> logits [..., V], or [..., D] for the token ids ``rows`` [D] only."""
        if rows is None:
            logits: Tensor = self.output(hidden.to(self.weight.dtype))
        else:
            logits = F.linear(hidden.to(self.weight.dtype), *(self.picked or self._rows(rows)))
        return self.shape(logits)

    def shape(self, logits: Tensor) -> Tensor:
        """What the target does to the product with its output matrix: scale, then soft-cap. [..., D] -> [..., D]."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def fingerprint(tie: Tie) -> str:
    """Digest of three rows of the target's output matrix: tells another model of the same shape, not a fine-tuned one
    that kept its output. The same in float32 and bfloat16; float16, to which small numbers are rounded, is another."""
    weight = tie.weight
    picked = weight[[0, weight.shape[0] // 2, weight.shape[0] - 1]].detach().cpu()
    rows = picked.bfloat16().float().contiguous()
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]


def weight_notes(wanted: str, trained_on: str, tie: Tie, name: str) -> list[str]:
    """What a user should know where heads were trained on the target ``trained_on`` with weights of digest ``wanted``
    ("" = nobody noted them), and this one, ``name``, has others."""
    found = fingerprint(tie) if wanted else ""
    if wanted == found:
        return []
    half = "" if tie.weight.dtype != torch.float16 else " (or the same ones cast to float16, which cannot be told)"
    return [
        f"the heads were trained on {trained_on or 'another target'} ({wanted}), with other weights than this target, "
        f"{name or 'which has no name'} ({found}){half}: the text stays exact, but fewer guesses will be accepted"
    ]


def name_notes(trained_on: str, name: str) -> list[str]:
    """What a user should know where heads were trained on the Hub's ``trained_on`` and the target is its ``name``: a
    fine-tuned model may keep the rows that the fingerprint looks at."""
    if trained_on == name or not ("/" in trained_on and "/" in name):
        return []
    return [
        f"the heads were trained on {trained_on} and this target is {name}: the text stays exact, but unless the one "
        "is a copy of the other, fewer guesses will be accepted"
    ]


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Digest of a tokenizer's ``get_vocab()``, {token: id}; chat templates and merges do not count."""
    told = json.dumps(sorted((token_id, token) for token, token_id in vocabulary.items()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def tokenizer_notes(wanted: str, tokenizer: Any) -> list[str]:
    """What a user should know where heads were trained with the tokens of digest ``wanted`` ("" = nobody noted them)
    and ``tokenizer`` has others."""
    found = vocabulary_fingerprint(tokenizer.get_vocab()) if wanted else ""
    if wanted == found:
        return []
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return [
        f"the heads were trained with other tokens ({wanted}) than those of this tokenizer, {name} ({found}): ids stay "
        "exactly the target's, but unless both belong to this target the text is wrong, or few guesses are accepted"
    ]
