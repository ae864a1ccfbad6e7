"""Evaluation by what counts: held-out prompts decoded with the real tree decoder, and held-out answers guessed token
by token with the true tokens before.

Legend: B rows, T tokens, M slots, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import Batch, DraftHeads, Tie
from headstart.heads.batch import predictions
from headstart.heads.losses import acceptance
from headstart.infer.bench import left_padded
from headstart.infer.figures import loops_at_end
from headstart.infer.report import Report
from headstart.infer.speculator import Speculator
from headstart.train.batches import collate
from headstart.train.features import online
from headstart.train.masking import Masked

ROWS = 8  # prompts decoded at once: an accelerator is spared most of the forwards, a CPU a tenth of the time


class Draft(NamedTuple):
    """A held-out prompt and what was written after it."""

    prompt: list[int]
    tokens: list[int]
    guessed: list[bool]  # of each token: a guess that was accepted; else the target's own


class Evaluation(NamedTuple):
    """What a decoding run over held-out prompts showed."""

    tokens_per_pass: float
    accepted_by_depth: list[float]  # cumulative share per depth
    looping: float  # share of answers that end in a loop; loops flatter every drafter
    tokens: int
    drafts: list[Draft]

    def numbers(self) -> dict[str, float]:
        """For the log."""
        values = {"tokens_per_pass": self.tokens_per_pass, "looping": self.looping}
        return values | {f"accepted/{d + 1}": share for d, share in enumerate(self.accepted_by_depth)}


class Validation(NamedTuple):
    """First guesses on held-out answers, teacher forced; what the heads cannot say counts as a miss."""

    accuracy: list[float]  # [K] share that is the target's argmax, whatever became of the guesses before
    alpha: list[float]  # [K] mean acceptance, sum_v min(p_v, q_v)
    chain: list[float]  # [K] share of slots where this guess and all before it are the target's argmax, jointly
    predictions: int  # at the first depth

    @property
    def tokens_per_pass(self) -> float:
        """What a chain of first guesses would give if every slot were a root: 1 + the sum of joint shares."""
        return 1.0 + sum(self.chain)

    def numbers(self) -> dict[str, float]:
        """For the log."""
        values = {"validation/chain": self.tokens_per_pass}
        for name, shares in (("accuracy", self.accuracy), ("alpha", self.alpha)):
            values |= {f"validation/{name}/{d + 1}": share for d, share in enumerate(shares)}
        return values


@torch.no_grad()
def validate(target: Any, heads: DraftHeads, rows: Sequence[Masked], *, batch_size: int = 8) -> Validation:
    """Guesses on the supervised tokens of ``rows``, as deep as the heads draft."""
    tie, depths = Tie.of(target), heads.config.num_draft_heads
    sums = torch.zeros(4, depths, dtype=torch.float64)
    was_training = heads.training
    heads.train(False)
    for first in range(0, len(rows), batch_size):
        tokens = collate(rows, list(range(first, min(first + batch_size, len(rows)))))
        batch = online(target, tokens, heads.config.features or ()).batch
        sums += _guessed(heads, batch._replace(features=batch.features.to(heads.dtype)), tie, depths).cpu()
    heads.train(was_training)
    right, alpha, joint = (sums[:3] / sums[3].clamp(min=1)).tolist()
    return Validation(right, alpha, joint, int(sums[3, 0]))


def _guessed(heads: DraftHeads, batch: Batch, tie: Tie, depths: int) -> Tensor:
    """Sums [4, K] of right first guesses, acceptance, guesses right up to here, and predictions."""
    sums, length = [], batch.tokens.shape[1]
    before = torch.ones_like(batch.supervised)  # [B, T] all guesses of this slot so far were right
    for d, (slots, hidden) in enumerate(heads.unroll(batch, tie, depths)):
        label = (slots + 2 + d).clamp(max=length - 1)
        there = predictions(batch.supervised, batch.document, d).gather(1, label) & (slots + 2 + d < length)
        row, place = there.nonzero(as_tuple=True)
        at = label[row, place]
        logits = heads.logits(hidden[row, place], batch.tokens[row, at - 1], d, tie).float()
        p, best = heads.teacher(batch.last[row, at - 1], tie)
        guess = logits.argmax(-1)
        right = (guess if heads.draft_ids is None else heads.draft_ids[guess]) == best
        joint = right & before[row, slots[row, place]]
        before[row, slots[row, place]] = joint
        parts = (right.sum(), acceptance(p, logits).sum(), joint.sum(), torch.tensor(len(row)))
        sums.append(torch.stack([x.double().cpu() for x in parts]))
    return torch.stack(sums, 1)


def evaluate(
    target: Any,
    heads: DraftHeads,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    nodes: int,
    batch_size: int = ROWS,
) -> Evaluation:
    """Decodes the prompts [P] greedily with trees of ``nodes`` nodes, ``batch_size`` prompts a forward.

    Draws no random number, and leaves the heads in the mode (train or eval) they were in.
    """
    if not prompts:
        raise ValueError("no held-out prompts to evaluate on: name some in data.heldout")
    was_training = heads.training
    heads.train(False)
    total, drafts = Report(), list[Draft]()
    try:
        fast = Speculator(target, heads, nodes=nodes)
        for first in range(0, len(prompts), batch_size):
            part = prompts[first : first + batch_size]
            ids, mask = left_padded(part, 0)
            device = target.get_input_embeddings().weight.device
            answers = fast.generate(
                ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens, do_sample=False
            )
            total.tokens += fast.report.tokens
            total.passes += fast.report.passes
            total.rounds += fast.report.rounds
            written = zip(part, *_written(answers[:, ids.shape[1] :], fast.report), strict=True)
            drafts += [Draft(prompt.tolist(), tokens, guessed) for prompt, tokens, guessed in written]
    finally:
        heads.train(was_training)
    looping = sum(loops_at_end(draft.tokens) for draft in drafts) / len(drafts)
    return Evaluation(total.tokens_per_pass, total.accepted_by_depth, looping, total.tokens, drafts)


def _written(answers: Tensor, report: Report) -> tuple[list[list[int]], list[list[bool]]]:
    """Of each row of answers [B, T], right padded: its tokens, and which of them were guesses that were accepted."""
    guessed: list[list[bool]] = [[] for _ in answers]
    for row, (accepted, _) in zip(report.row_of, report.rounds, strict=True):
        guessed[row] += [True] * accepted + [False]  # the last token of a pass is the target's own
    tokens = [row[: len(own)] for row, own in zip(answers.tolist(), guessed, strict=True)]
    return tokens, [own[: len(row)] for row, own in zip(tokens, guessed, strict=True)]
