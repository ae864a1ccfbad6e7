"""Every kind of heads that the suites of the families run with; a new family or variant joins by one line in KINDS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headstart.heads import FAMILIES, Batch, DraftHeads
from headstart.heads.recurrent import RecurrentHeads
from headstart.infer.cache import TreeCache
from headstart.train.batches import Tokens, collate
from headstart.train.features import online
from headstart.train.masking import Masked
from tests.toys import VOCAB

DRAFT = torch.arange(2, VOCAB, 3)


@dataclass(frozen=True)
class Kind:
    """A family with options."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    attends: bool = True
    """Whether a slot looks at the slots before it."""

    @property
    def cls(self) -> type[DraftHeads]:
        return FAMILIES[self.family]

    @property
    def recurrent(self) -> bool:
        return issubclass(self.cls, RecurrentHeads)

    def make(self, target: Any, depths: int = 4, **changes: Any) -> DraftHeads:
        """Fresh heads that draft ``depths`` deep and are trained for all of them."""
        options = {"num_draft_heads": depths} | ({"unroll": depths} if self.recurrent else {}) | self.options
        return self.cls.from_target(target, **(options | changes))


PAPER: dict[str, Any] = {"fc_norm": False, "residual_last": False, "step_path": False}

KINDS: dict[str, Kind] = {
    "medusa": Kind("medusa", attends=False),
    "hydra": Kind("hydra"),
    "hydra-plain": Kind("hydra", {"prefix_attention": False, "num_draft_layers": 2}, attends=False),
    "eagle": Kind("eagle"),
    "eagle3": Kind("eagle3"),
    "eagle3-paper": Kind("eagle3", PAPER),
    "eagle3-normed": Kind("eagle3", PAPER | {"norm_before_residual": True}),
    "eagle3.1": Kind("eagle3", PAPER | {"fc_norm": True, "norm_output": True}),
}


def disturbed(heads: DraftHeads, by: float = 0.1) -> DraftHeads:
    """Heads away from their start, so that a wrong block or output shows."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(by * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return heads


def feature_width(heads: DraftHeads) -> int:
    assert heads.config.features is not None
    return heads.config.target_hidden_size * len(heads.config.features)


def documents(heads: DraftHeads) -> Batch:
    """Two rows of 14 tokens. Row 0: answer at 5..8. Row 1: two documents, then padding."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (2, 14), generator=g)
    supervised = torch.zeros(2, 14, dtype=torch.bool)
    supervised[0, 5:9] = True
    supervised[1, 3:11] = True
    document = torch.zeros(2, 14, dtype=torch.int64)
    document[1, 6:] = 1
    document[1, 11:] = -1
    features = torch.randn(2, 14, feature_width(heads), generator=g).to(heads.dtype)
    return Batch(tokens, supervised, document, features, features[..., -heads.config.target_hidden_size :])


def texts(heads: DraftHeads, rows: int = 3, length: int = 16) -> Batch:
    """Rows of one document each, without padding, every token a label: what decoding sees."""
    g = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, VOCAB, (rows, length), generator=g)
    features = torch.randn(rows, length, feature_width(heads), generator=g).to(heads.dtype)
    every, one = torch.ones(rows, length, dtype=torch.bool), torch.zeros(rows, length, dtype=torch.int64)
    return Batch(tokens, every, one, features, features[..., -heads.config.target_hidden_size :])


def near(one: Tensor, other: Tensor) -> None:
    """Equal but for rounding, measured against the largest entry: sums in another order."""
    torch.testing.assert_close(one, other, rtol=0, atol=5e-6 * max(1.0, float(one.abs().max())))


class Drafting:
    """Heads as a drafter drives them: the cache advanced after each refresh by what was committed."""

    def __init__(self, heads: DraftHeads, tie: Any, rows: int) -> None:
        self.heads, self.tie = heads, tie
        layers = heads.attention_layers
        self.cache = TreeCache(rows, layers, 64, heads.device) if layers else None
        self.state = heads.open(rows, 64, self.cache)
        self.at = [0] * rows  # slots fed

    def commit(self, data: Batch, count: list[int]) -> Tensor:
        """The next ``count`` [B] slots of each row of ``data``, what stands past a count being noise. -> [B, 1, H]."""
        k = max(count)
        features = torch.randn(len(count), k, data.features.shape[2], dtype=data.features.dtype)
        tokens = torch.randint(3, VOCAB, (len(count), k))
        for row, (begin, n) in enumerate(zip(self.at, count, strict=True)):
            features[row, :n] = data.features[row, begin : begin + n]
            tokens[row, :n] = data.tokens[row, begin + 1 : begin + 1 + n]
        root = self.heads.refresh(features, tokens, torch.tensor(count), self.state, self.tie)
        if self.cache is not None:
            self.cache.advance(count)
        self.at = [begin + n for begin, n in zip(self.at, count, strict=True)]
        return root

    def level(self, tokens: Tensor, parent: Tensor, depth: int) -> Tensor:
        """[B, w] twice -> [B, w, H]."""
        return self.heads.level(tokens, parent, depth, self.state, self.tie)

    def throw_away(self, depths: int, width: int = 3) -> None:
        """A tree of guesses that nothing is kept of."""
        rows = len(self.at)
        for depth in range(1, depths):
            parent = torch.randint(1 if depth == 1 else width, (rows, width))
            self.level(torch.randint(3, VOCAB, (rows, width)), parent, depth)


def taught(heads: DraftHeads, tie: Any, data: Batch, slot: list[int], depth: int) -> Tensor:
    """[B, D] teacher-forced logits of a depth at one slot of each row."""
    slots, hidden = list(heads.unroll(data, tie, depth + 1))[depth]
    rows = torch.arange(len(slot))
    at = (slots == torch.tensor(slot)[:, None]).int().argmax(1)
    assert slots[rows, at].tolist() == slot
    return heads.logits(hidden[rows, at], data.tokens[rows, torch.tensor(slot) + 1 + depth], depth, tie)


def answers(target: Any, rows: int = 8, prompt: int = 6, new: int = 16) -> Tokens:
    """Chats of the target's own greedy answers."""
    ids = torch.randint(3, VOCAB, (rows, prompt), generator=torch.Generator().manual_seed(8))
    out = target.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    masked = [Masked(row, [i >= prompt for i in range(len(row))]) for row in out.tolist()]
    return collate(masked, range(rows))


def learn(heads: DraftHeads, tie: Any, batches: list[Batch], steps: int, lr: float) -> list[float]:
    """A plain loop; returns each depth's accuracy in the last step."""
    heads.train()
    optimizer = torch.optim.AdamW(heads.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        losses = heads(batches[step % len(batches)], tie, weights=[1.0] * heads.trained_depths)
        optimizer.zero_grad()
        (losses.total / losses.count.sum()).backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    heads.train(False)
    accuracy: list[float] = (losses.correct / losses.count).tolist()
    return accuracy


def lesson(heads: DraftHeads, target: Any, tokens: Tokens) -> Batch:
    """The batch with the features that the heads read."""
    assert heads.config.features is not None
    return online(target, tokens, heads.config.features).batch
