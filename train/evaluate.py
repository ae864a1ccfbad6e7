"""Evaluation by what counts: held-out prompts decoded with the real tree decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import DraftHeads
from headstart.infer.figures import loops_at_end
from headstart.infer.report import Report
from headstart.infer.speculator import Speculator


class Evaluation(NamedTuple):
    """What a decoding run over held-out prompts showed."""

    tokens_per_pass: float
    accepted_by_depth: list[float]  # cumulative share per depth
    looping: float  # share of answers that end in a loop; loops flatter every drafter
    tokens: int


def evaluate(
    target: Any, heads: DraftHeads, prompts: Sequence[Tensor], *, max_new_tokens: int, nodes: int
) -> Evaluation:
    """Decodes each prompt [P] greedily with a tree of ``nodes`` nodes.

    Draws no random number, and leaves the heads in the mode (train or eval) they were in.
    """
    if not prompts:
        raise ValueError("no held-out prompts to evaluate on: name some in data.heldout")
    was_training = heads.training
    heads.train(False)
    try:
        fast = Speculator(target, heads, nodes=nodes)
        total, loops = Report(), 0
        for prompt in prompts:
            ids = prompt[None].to(target.get_input_embeddings().weight.device)
            answer = fast.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
            )
            total.tokens += fast.report.tokens
            total.passes += fast.report.passes
            total.rounds += fast.report.rounds
            loops += loops_at_end(answer[0, ids.shape[1] :].tolist())
    finally:
        heads.train(was_training)
    return Evaluation(total.tokens_per_pass, total.accepted_by_depth, loops / len(prompts), total.tokens)
