"""DraftModel: a second, smaller causal LM with the same tokenizer as a source of guesses, in chains or trees.

Legend: B rows, k new tokens of a row, w frontier, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads.attention import Branches
from headstart.infer.checks import check_target
from headstart.infer.grow import Budget, Children, Sampling, best_first, offered
from headstart.infer.probe import check_model
from headstart.infer.target import Seen, Target
from headstart.infer.tree import DraftTree, root_only


@dataclass(frozen=True)
class DraftModel:
    """A causal LM that guesses for a larger one. Token i must mean the same to both: pass both tokenizers to have that
    checked, which sizes alone do not tell (padded vocabularies differ in size and agree in tokens)."""

    model: Any
    width: int = 1  # nodes expanded a level: 1 is a chain with siblings
    branch: int = 2  # children of each
    siblings: int = 0  # where one child is drawn (rule "rejection"): how many are chosen beside it
    depth: int = 5  # guesses on a path; each costs a forward of the draft model
    tokenizer: Any = None
    target_tokenizer: Any = None
    name: str = "draft-model"
    wants: tuple[int, ...] = ()

    @property
    def chain(self) -> bool:
        """Drawn guesses without siblings."""
        return self.siblings == 0

    def check(self, model: Any) -> list[str]:
        """The draft model must take trees, sit on one device with the target's embedding, and speak its tokens."""
        if min(self.width, self.branch, self.depth) < 1 or self.siblings < 0:
            raise ValueError(f"a draft model needs width, branch and depth of at least 1, siblings of 0; got {self}")
        ours, theirs = (m.get_input_embeddings().weight.device for m in (self.model, model))
        if ours != theirs:
            raise ValueError(f"the draft model is on {ours}, the target begins on {theirs}: move it there")
        check_tokenizers(self.tokenizer, self.target_tokenizer)
        notes = check_target(self.model)
        check_model(self.model, ())
        sizes, reach = ([f(m) for m in (self.model, model)] for f in (_vocab_size, _positions))
        if sizes[0] != sizes[1] and (self.tokenizer is None or self.target_tokenizer is None):
            notes.append(
                f"the draft model's vocabulary has {sizes[0]} tokens, the target's {sizes[1]}: only the first "
                f"{min(sizes)} are guessed; pass both tokenizers to DraftModel to have the tokens compared"
            )
        if reach[0] < reach[1]:
            notes.append(f"the draft model knows {reach[0]} positions, the target {reach[1]}: it guesses up to there")
        return notes

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> ModelDrafter:
        """A drafter for one call."""
        return ModelDrafter(self, _vocab_size(model), ends, sampling)


class ModelDrafter:
    """The draft model with a cache of its own: what a row emitted since the last step is run together with the new
    root, then one forward a level."""

    wants: tuple[int, ...] = ()

    def __init__(self, source: DraftModel, vocab_size: int, ends: Tensor, sampling: Sampling | None = None) -> None:
        """``vocab_size`` V of the target; ``ends`` [e] end tokens."""
        self._draft = Target(source.model)
        self._source, self._ends, self._sampling = source, ends, sampling
        self._vocab_size, self._common = vocab_size, min(vocab_size, _vocab_size(source.model))
        self._positions = _positions(source.model)
        self._fresh: list[list[int]] = []  # tokens of each row the draft model has not seen; the root is the last
        self._lengths: list[int] = []
        self._laws: Tensor | None = None  # [B, 1, V] at the root
        self._branches = Branches()  # of the tree that grows

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """The prompt [B, P] into the draft model's cache, all but the root."""
        self._lengths = (lengths - 1).tolist()
        self._fresh = [[int(row[n])] for row, n in zip(ids, self._lengths, strict=True)]
        if max(self._lengths) < self._positions:  # else it stays silent: nothing fits
            for _ in self._draft.prefill(ids.clamp(max=self._common - 1), lengths):
                pass

    def observe(self, seen: Seen) -> None:
        """Notes the tokens a step emitted."""
        if seen.tree is not None:
            for row, tokens, count in zip(self._fresh, seen.tokens.tolist(), seen.count.tolist(), strict=True):
                row += tokens[:count]

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """A tree below root [B], one forward of the draft model a level."""
        fits = self._positions - 1 - max(n + len(row) for n, row in zip(self._lengths, self._fresh, strict=True))
        budget = budget._replace(depth=min(budget.depth, self._source.depth, fits))
        if budget.depth < 1 or budget.nodes < 2:
            return root_only(root)
        self._catch_up(root.device)
        return best_first(root, self._expand, budget, self._source.width, self._ends)

    def _catch_up(self, device: torch.device) -> None:
        """Runs what is fresh, root included, as one chain a row; leaves the law at each root."""
        k = max(map(len, self._fresh))
        tokens = torch.tensor([row + [0] * (k - len(row)) for row in self._fresh], device=device)  # [B, k]
        tokens = tokens.clamp(max=self._common - 1)  # a token it does not have is shown as its last one
        count = torch.tensor([len(row) for row in self._fresh], device=device)
        index = torch.arange(k, device=device)
        parents = (index - 1).expand(len(self._fresh), -1)
        logits = self._draft.verify(DraftTree(tokens, parents, index < count[:, None])).logits
        last = (count - 1).clamp(min=0)
        self._laws = logits[torch.arange(len(last), device=logits.device), last.to(logits.device)][:, None]
        self._draft.cache.advance([len(row) for row in self._fresh])
        self._lengths = self._draft.cache.kept
        self._fresh = [[] for _ in self._fresh]
        self._branches = Branches()

    def _expand(self, tokens: Tensor, above: Tensor, depth: int) -> Children:
        """Children of the frontier [B, w]: for depth 0 from the root's law, else from one forward over the level."""
        assert self._laws is not None
        logits = self._laws if depth == 0 else self._level(tokens, above, depth)
        branch = self._source.branch if self._sampling is None else self._source.siblings + 1
        logits = logits[..., : self._common].to(self._ends.device)
        return offered(logits, branch, vocab_size=self._vocab_size, sampling=self._sampling)

    def _level(self, tokens: Tensor, above: Tensor, depth: int) -> Tensor:
        """Nodes [B, w] of ``depth`` under the nodes ``above`` [B, w] of the level before -> their logits [B, w, V].

        The root is committed, so a node of depth 1 stands right at each row's end.
        """
        seen = self._branches.add(above, depth - 1)
        depths = torch.tensor(self._branches.depth, device=tokens.device).expand(tokens.shape[0], -1)
        return self._draft.extend(tokens, seen, depths)


def check_tokenizers(draft: Any, target: Any) -> None:
    """Raises ValueError where both are given and a token they share the number of is another string to each."""
    if draft is None or target is None:
        return
    ours, theirs = ({i: t for t, i in _mapping(x).items()} for x in (draft, target))
    other = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if other:
        i = other[0]
        raise ValueError(
            f"{len(other)} token numbers mean something else to the draft model, the first is {i}: {ours[i]!r}, to the "
            f"target {theirs[i]!r}; a draft model with the target's own tokenizer is needed"
        )


def _mapping(tokenizer: Any) -> Mapping[str, int]:
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    return vocabulary


def _positions(model: Any) -> int:
    """Positions a model knows; a large number where it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 60


def _vocab_size(model: Any) -> int:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size
