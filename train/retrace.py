"""One known text, computed as training computes it and as decoding computes it: what `headstart doctor` compares.

Slot t holds the target's features at position t; at depth d it guesses token t + 2 + d, and the target at t + 1 + d is
its teacher. Training computes the guess from the whole row at once (``unroll``), decoding step by step, from a cache
(``refresh``, ``level``). What a slot may read is the same in both: features up to t, tokens up to t + 1 + d.

Legend: T tokens, S slots, K depths, F features, D draft vocabulary, P prompt, n tokens of a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import Batch, DraftHeads, Tie
from headstart.infer.accept import Accepted
from headstart.infer.draft_heads import HeadsDrafter, HeadsSource
from headstart.infer.target import Seen, Target, home
from headstart.infer.tree import DraftTree
from headstart.train.batches import collate
from headstart.train.features import online
from headstart.train.masking import Masked, prompt_ids, render

CHUNK = 64  # positions whose logits over the whole vocabulary are held at once

Messages = Sequence[Mapping[str, str]]


class Text(NamedTuple):
    """A conversation's last answer, as training and as decoding are given it."""

    row: Masked  # cut after the tokens asked for; nothing before the last answer is supervised
    start: int  # where that answer begins
    prompt: Tensor  # [P] what ``generate`` is given for it
    plain: Tensor  # [P + new] what the target makes of it, greedily
    begins: bool  # the row begins with the prompt, token for token


class Taught(NamedTuple):
    """Training's side, at the slots that lead to a label at any depth."""

    batch: Batch  # one row, features in the heads' dtype
    slots: Tensor  # [S] ascending
    laws: Tensor  # [K, S, D] float32 logits
    guesses: Tensor  # [K, S] target ids
    best: Tensor  # [T] what the target says after each token
    labels: Tensor  # [K, S] bool: token t + 2 + d is there and supervised, found without the loss's own masks

    @property
    def right(self) -> Tensor:
        """[K, S] bool: the first guess is what the target says there."""
        return self.guesses == self.best[self.teacher]

    @property
    def teacher(self) -> Tensor:
        """[K, S] the position t + 1 + d whose output teaches, at most the last one."""
        ahead = self.slots + 1 + torch.arange(len(self.laws), device=self.slots.device)[:, None]
        return ahead.clamp(max=len(self.best) - 1)


class Led(HeadsDrafter):
    """The drafter, led along known tokens instead of along its own guesses."""

    def laws(self, path: Tensor) -> Tensor:
        """[n, D] float32 logits at the root ``path[0]`` and at the known tokens [n - 1] below it.

        Beside each of those stands a wrong one with a line of its own, as in a tree: it must make no difference.
        """
        assert self._root is not None
        hidden, nodes, width, found = self._root, path[:1, None], 1, []
        for depth in range(len(path)):
            if depth:
                parent = torch.tensor([[0, width - 1]], device=path.device)
                width = 1 if self.heads.path_free else 2
                wrong = (path[depth] + 1) % self.tie.weight.shape[0]
                nodes = torch.stack([wrong, path[depth]])[None, -width:]
                hidden = self.heads.level(nodes, parent[:, -width:], depth, self._state, self.tie)
            found.append(self.heads.logits(hidden, nodes, depth, self.tie)[0, -1].float())
        return torch.stack(found)


def read(target: Any, tokenizer: Any, conversation: Messages, tokens: int) -> Text:
    """Renders a conversation as training does; one that does not end in an answer is answered by the target, greedily.

    ``tokens`` of the answer are kept. Raises ValueError for what template, mask or the target's length does not take.
    """
    turns = [dict(turn) for turn in conversation]
    if not turns:
        raise ValueError("an empty conversation was given; at least one user turn is needed")
    answered = turns[-1]["role"] == "assistant"
    ids = prompt_ids(turns[:-1] if answered else turns, tokenizer)
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and len(ids) + tokens > limit:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and {tokens} of an answer were asked for, the target knows {limit} "
            "positions: give a shorter conversation or fewer tokens"
        )
    prompt = torch.tensor(ids, device=home(target))
    plain = greedy(target.generate, prompt, tokens)
    if not answered:
        answer = tokenizer.decode(plain[len(ids) :], skip_special_tokens=True)
        if not answer.strip():
            raise ValueError("the target answers this conversation with nothing: give another one, or its answer too")
        turns.append({"role": "assistant", "content": answer})
    row = render(turns, tokenizer)
    begins = row.ids[: len(ids)] == ids
    first = [t for t, here in enumerate(row.supervised) if here and not (t and row.supervised[t - 1])]
    start = len(ids) if begins else first[-1]
    supervised = [here and t >= start - 1 for t, here in enumerate(row.supervised)]  # one before: it must not be
    cut = Masked(row.ids[: start + tokens], supervised[: start + tokens])
    if not any(cut.supervised[start:]):
        raise ValueError(f"nothing is supervised in the first {tokens} tokens of the last answer: give more tokens")
    return Text(cut, start, prompt, plain, begins)


def greedy(generate: Any, prompt: Tensor, tokens: int) -> Tensor:
    """[P] -> [P + new] by ``generate`` of a target or a Speculator."""
    mask = torch.ones_like(prompt[None])
    out: Tensor = generate(prompt[None], attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return out[0]


def teach(target: Any, heads: DraftHeads, text: Text) -> Taught:
    """One forward of the target over the row, and the laws that the heads have on it in training."""
    tie, depths = Tie.of(target), min(heads.trained_depths, heads.config.num_draft_heads)
    batch = online(target, collate([text.row], [0]), heads.config.features or ()).batch
    batch = batch._replace(features=batch.features.to(heads.dtype))
    length, device = len(text.row.ids), batch.tokens.device
    ahead = torch.arange(length, device=device) + 2 + torch.arange(depths, device=device)[:, None]  # [K, T]
    supervised = torch.tensor(text.row.supervised, device=device)
    labels = (ahead < length) & supervised[ahead.clamp(max=length - 1)]
    slots = labels.any(0).nonzero().flatten()
    laws = laws_at(heads, batch, tie, slots, depths)
    guesses = laws.argmax(-1)
    guesses = guesses if heads.draft_ids is None else heads.draft_ids[guesses]
    best = torch.cat([tie.unembed(part).argmax(-1) for part in torch.split(batch.last[0], CHUNK)])
    return Taught(batch, slots, laws, guesses, best, labels[:, slots])


def laws_at(heads: DraftHeads, batch: Batch, tie: Tie, slots: Tensor, depths: int) -> Tensor:
    """Training's logits [K, S, D] at ``slots`` [S] of the one row; at depth d a slot's node is token t + 1 + d."""
    laws = []
    for depth, (offered, hidden) in enumerate(heads.unroll(batch, tie, depths)):
        place = (offered[0] == slots[:, None]).long().argmax(1)
        node = batch.tokens[0, (slots + 1 + depth).clamp(max=batch.tokens.shape[1] - 1)]
        laws.append(heads.logits(hidden[0, place], node, depth, tie).float())
    return torch.stack(laws)


def acceptances(target: Any, heads: DraftHeads, taught: Taught) -> Tensor:
    """[K, S] sum_v min(p_v, q_v) of the target's law at t + 1 + d and the heads' one, counted on what they can say."""
    tie, found = Tie.of(target), []
    for laws, teacher in zip(taught.laws, taught.teacher, strict=True):
        p = tie.unembed(taught.batch.last[0, teacher]).float().softmax(-1)
        p = p if heads.draft_ids is None else p[:, heads.draft_ids]
        found.append(torch.minimum(p, laws.softmax(-1)).sum(-1))
    return torch.stack(found)


def follow(target: Any, heads: DraftHeads, text: Text, depths: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Decoding's side: the prompt, then trees of which 1, 2 ... known tokens are kept in turn.

    Returns the features [T - 1, F] that the heads were shown, and for each slot at which a tree would grow the laws
    [<= K, D] float32 along the known tokens.
    """
    source, ids = HeadsSource(heads), torch.tensor([text.row.ids], device=home(target))
    length, root = ids.shape[1], max(text.start, 2) - 1
    bound, drafter = Target(target, source.wants), Led(source, Tie.of(target), ids.new_zeros(0))
    shown: list[Tensor] = []
    laws: dict[int, Tensor] = {}

    def show(seen: Seen) -> None:
        assert seen.features is not None
        shown.append(seen.features[0])
        drafter.observe(seen)

    prompt, lengths = ids[:, : root + 1], torch.tensor([root + 1], device=ids.device)
    drafter.start(prompt, lengths, length)
    for seen in bound.prefill(prompt, lengths):
        show(seen)
    for wanted in cycle(range(1, depths + 2)):
        left = length - 1 - root
        if not left:
            break
        laws[root - 1] = drafter.laws(ids[0, root : root + min(depths, left)].to(heads.device))
        keep = min(wanted, left)
        path, nodes = ids[:, root : root + keep], torch.arange(keep)[None]
        chain = DraftTree(path, nodes.to(path.device) - 1, torch.ones_like(path, dtype=torch.bool))
        features = bound.verify(chain).features
        accepted = Accepted(nodes, ids[:, root + 1 : root + 1 + keep].cpu(), torch.tensor([keep]))
        bound.commit(accepted)
        show(Seen(accepted.tokens, accepted.count, features))
        root += keep
    return torch.cat(shown), laws
