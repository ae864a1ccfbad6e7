"""HeadsDrafter: any family of heads as a source of guesses.

Legend: B rows, w frontier, c children, D draft vocabulary, F features, H head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads import DraftHeads, Tie
from headstart.infer.cache import TreeCache
from headstart.infer.grow import Budget, Children, Sampling, Shape, best_first, offered, static
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree, root_only

FRESH = 256  # tokens of steps that may wait


@dataclass(frozen=True)
class HeadsSource:
    """Heads as a source of guesses: how wide their trees grow, or one fixed ``shape``."""

    heads: DraftHeads
    width: int = 8  # nodes expanded a level
    branch: int = 8  # children of each
    siblings: int = 2  # where one child is drawn (rule "rejection"): how many are chosen beside it
    shape: Shape | None = None  # of deterministic trees

    @property
    def name(self) -> str:
        """The family."""
        return self.heads.config.family

    @property
    def depth(self) -> int:
        """As many guesses as there are heads."""
        return self.heads.config.num_draft_heads

    @property
    def wants(self) -> tuple[int, ...]:
        """The features the heads read."""
        return tuple(self.heads.config.features or ())

    def check(self, model: Any) -> list[str]:
        """Sizes must agree; other weights of the same sizes are a warning."""
        home, needed = self.heads.device, Tie.of(model).weight.device
        if home != needed:
            raise ValueError(f"the heads are on {home}, the target's output layer is on {needed}: move the heads there")
        return self.heads.check_target(model)

    @property
    def chain(self) -> bool:
        """Drawn guesses without siblings."""
        return self.siblings == 0

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> HeadsDrafter:
        """A drafter for one call."""
        return HeadsDrafter(self, Tie.of(model), ends, sampling)


class HeadsDrafter:
    """Level by level: the heads' law at each frontier node, its best children, the likeliest paths kept."""

    def __init__(self, source: HeadsSource, tie: Tie, ends: Tensor, sampling: Sampling | None = None) -> None:
        """``tie`` of the target; ``ends`` [e] end tokens."""
        self.wants = source.wants
        self.heads, self.ends = source.heads, ends
        said = self.heads.draft_ids
        self.tie = tie.pick(said) if said is not None and self.heads.tied_output else tie
        self.width, self.branch, self.shape = source.width, source.branch, source.shape
        self._sampling = sampling
        if sampling is not None:
            self.branch, self.shape = source.siblings + 1, None
        elif self.shape is not None:
            self.branch = max(self.branch, 1 + max(self.shape.ranks))
        self._state: Any = None
        self._root: Tensor | None = None  # [B, 1, H]
        self._fresh: list[Seen] = []  # of steps, not in the heads' state yet
        self._cache: TreeCache | None = None

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """A fresh draft-side state for ids [B, P]."""
        layers = self.heads.attention_layers
        self._cache = TreeCache(ids.shape[0], layers, room, self.heads.device) if layers else None
        self._state = self.heads.open(ids.shape[0], room, self._cache)

    def observe(self, seen: Seen) -> None:
        """Committed features [B, k, F]: of the prompt into the heads' state, of a step kept for the next tree.

        Steps that guess nothing then cost nothing here; their tokens are taken in at once when guessing goes on.
        """
        self._fresh.append(seen._replace(tree=None, verified=None))
        if seen.tree is None or sum(part.tokens.shape[1] for part in self._fresh) >= FRESH:
            self._catch_up()

    def _catch_up(self) -> None:
        """What is fresh into the heads' state."""
        seen, self._fresh = joined(self._fresh), []
        assert seen.features is not None
        features = seen.features.to(self.heads.device, self.heads.dtype)
        tokens, count = (x.to(self.heads.device, non_blocking=True) for x in (seen.tokens, seen.count))
        self._root = self.heads.refresh(features, tokens, count, self._state, self.tie)
        if self._cache is not None:
            self._cache.advance(seen.count.tolist())  # of a step on the CPU: nothing waits

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """A tree below root [B]; only the root where nothing was seen yet (a prompt of one token)."""
        depth = min(budget.depth, self.heads.config.num_draft_heads)
        if (self._root is None and not self._fresh) or depth < 1 or budget.nodes < 2:
            return root_only(root)
        if self._fresh:
            self._catch_up()
        budget = budget._replace(depth=depth)
        if self.shape is not None:
            return static(root, self._expand, budget, self.shape, self.ends)
        return best_first(root, self._expand, budget, self.width, self.ends)

    def _expand(self, tokens: Tensor, above: Tensor, depth: int) -> Children:
        """Children of the frontier [B, w] at ``depth``, from the law [B, w or 1, D] of the heads."""
        if self.heads.path_free:
            tokens, above = tokens[:, :1], above[:, :1]
        if depth == 0:
            assert self._root is not None
            hidden = self._root
        else:
            hidden = self.heads.level(tokens, above, depth, self._state, self.tie)
        logits = self.heads.logits(hidden, tokens, depth, self.tie).to(self.ends.device)
        ids = None if self.heads.draft_ids is None else self.heads.draft_ids.to(self.ends.device)
        vocab_size = self.tie.weight.shape[0]
        return offered(logits, self.branch, ids=ids, vocab_size=vocab_size, sampling=self._sampling)


def joined(parts: Sequence[Seen]) -> Seen:
    """Several steps as one: the tokens of each row [B, k] one after the other, without gaps."""
    if len(parts) == 1:
        return parts[0]
    tokens = torch.cat([part.tokens for part in parts], 1)
    features = torch.cat([part.features for part in parts if part.features is not None], 1)
    real = torch.cat([torch.arange(part.tokens.shape[1]) < part.count[:, None] for part in parts], 1)
    count = real.sum(1)
    order = (~real).long().argsort(dim=1, stable=True)[:, : max(1, int(count.max()))]  # [B, k]
    place = order.to(features.device)[:, :, None].expand(-1, -1, features.shape[2])
    return Seen(tokens.gather(1, order), count, features.gather(1, place))
