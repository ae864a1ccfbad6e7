"""What a run trains on and what it trains: rows and prompts out of files, fresh heads or heads with an adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads import DraftHeads, family
from headstart.heads.vocab import choose, count_tokens, coverage
from headstart.infer.probe import check_model
from headstart.train.conversations import load_conversations
from headstart.train.joint import Joint, join
from headstart.train.masking import Masked, MaskError, encode, prompt_ids
from headstart.train.recipe import Recipe
from headstart.train.tracking import Tracker


def read_data(recipe: Recipe, target: Any, tokenizer: Any, tracker: Tracker) -> tuple[list[Masked], list[Tensor]]:
    """Training rows with their masks, and held-out prompts as ids [P] each.

    Raises ValueError where nothing is left of the rows, or of prompts that were asked for.
    """
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    prompts = read_prompts(recipe, limit, tokenizer, tracker) if recipe.data.heldout else []
    conversations, report = load_conversations(recipe.data.train)
    tracker.say(f"training conversations: {report}")
    rows, report = encode(
        conversations,
        tokenizer,
        max_length=recipe.data.max_length,
        position_limit=limit,
        train_on=recipe.data.train_on,
    )
    supervised = sum(sum(row.supervised) for row in rows)
    tracker.say(f"training rows: {report}; {sum(len(r.ids) for r in rows)} tokens, {supervised} of them supervised")
    return rows, prompts


def read_prompts(recipe: Recipe, limit: int | None, tokenizer: Any, tracker: Tracker) -> list[Tensor]:
    """Held-out prompts as ids [P] each, up to their first user turn; those that the template refuses, or that leave no
    room for an answer below ``limit``, are skipped and named. Raises ValueError where none is left."""
    held, report = load_conversations(recipe.data.heldout, trainable=False)
    prompts, new = list[Tensor](), recipe.evaluate.max_new_tokens
    for told in held:
        first = [m["role"] for m in told.messages].index("user") + 1  # a system turn may stand before it
        try:
            ids = prompt_ids(told.messages[:first], tokenizer, template_kwargs=told.template_kwargs, tools=told.tools)
        except MaskError as error:
            report.skip(str(error), told.id)
            continue
        if limit is not None and len(ids) + new > limit:
            report.skip(f"no room for {new} tokens: the target has {limit} positions", told.id)
        else:
            prompts.append(torch.tensor(ids))
    report.kept = len(prompts)
    tracker.say(f"held-out prompts: {report}")
    if not prompts:
        raise ValueError(f"data.heldout has no prompt to evaluate on; name others, or set it to []:\n{report}")
    return prompts


def put_aside(rows: Sequence[Masked], count: int) -> tuple[Sequence[Masked], Sequence[Masked]]:
    """Rows to train on, and the last ``count`` to validate on. Raises ValueError where none would be left."""
    if count >= len(rows):
        raise ValueError(f"data.validate_rows={count} leaves nothing of {len(rows)} rows to train on: put fewer aside")
    return (rows[: len(rows) - count], rows[len(rows) - count :]) if count else (rows, [])


def data_digest(rows: Sequence[Masked]) -> str:
    """Names the training set: two runs with the same one may continue each other."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.ids, [int(s) for s in row.supervised]]).encode())
    return digest.hexdigest()[:16]


def make_heads(recipe: Recipe, target: Any, rows: Sequence[Masked], tracker: Tracker) -> DraftHeads:
    """Fresh heads of the recipe's family, with a draft vocabulary counted on the training answers. Raises ValueError
    for a target that cannot teach them: one whose logits are not its output layer's, or that takes no tree."""
    chosen = None
    if recipe.heads.draft_vocab_size is not None:
        counts = count_tokens(rows, target.config.get_text_config(decoder=True).vocab_size)
        ends = target.generation_config.eos_token_id
        always = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        chosen = choose(counts, recipe.heads.draft_vocab_size, always)
        share = coverage(counts, chosen)
        tracker.say(f"draft vocabulary: {chosen.numel()} of {counts.numel()} tokens, {share:.1%} of the answers")
    heads = family(recipe.heads.family).from_target(
        target, draft_ids=chosen, seed=recipe.seed, **recipe.heads.options()
    )
    check_model(target, tuple(heads.config.features or ()))  # decoding refuses it too, after the training
    heads.config.target_name = Path(recipe.target).name if Path(recipe.target).exists() else recipe.target
    parameters = sum(p.numel() for p in heads.parameters())
    reads = f"they read hidden states {heads.config.features}"
    tracker.say(f"{recipe.heads.family} heads: {parameters / 1e6:.2f} M trainable parameters, target frozen; {reads}")
    return heads


def make_joint(recipe: Recipe, target: Any, start: DraftHeads, tracker: Tracker) -> Joint:
    """The heads of an earlier run and ``target`` with a fresh LoRA, in one module."""
    part = recipe.joint
    assert part is not None
    joint = join(
        target,
        start,
        rank=part.rank,
        alpha=part.alpha,
        dropout=part.dropout,
        modules=part.modules,
        seed=recipe.seed,
    )
    counts = [sum(p.numel() for p in ps) / 1e6 for ps in (start.parameters(), joint.adapter_parameters())]
    tracker.say(
        f"{start.config.family} heads of {part.heads}: {counts[0]:.2f} M trainable parameters, and a LoRA of rank "
        f"{part.rank} on the target: {counts[1]:.2f} M"
    )
    return joint
