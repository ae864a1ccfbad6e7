"""``accelerate launch -m headstart.train recipes/medusa1-smollm2.yaml [key=value ...]``"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstart.heads import DraftHeads, family
from headstart.heads.adapter import digest
from headstart.heads.vocab import choose, count_tokens, coverage
from headstart.infer.embedded import load_target
from headstart.train.batches import Stream, epoch_order
from headstart.train.cache import FeatureCache
from headstart.train.conversations import load_conversations
from headstart.train.evaluate import evaluate, validate
from headstart.train.features import Features
from headstart.train.joint import Joint, before_and_after, heads_of, join, perplexity, save, start_heads
from headstart.train.masking import Masked, encode, prompt_ids
from headstart.train.recipe import Recipe, load_recipe
from headstart.train.tracking import Tracker

if TYPE_CHECKING:
    from headstart.train.loop import Plan

QUALITY_ROWS = 32  # rows on which the perplexity of a target that learns is measured

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one recipe; the heads end up in ``out/heads``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m headstart.train RECIPE.yaml [section.key=value ...]")
        return 0 if args else 2
    run(load_recipe(args[0], args[1:]))
    return 0


def run(recipe: Recipe) -> Path:
    """From a recipe to a heads folder. Returns the folder."""
    from accelerate import Accelerator
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # of small files; ours stays
    accelerator = Accelerator(
        gradient_accumulation_steps=recipe.optim.accumulation,
        mixed_precision="bf16" if recipe.optim.precision == "bf16" else "no",
    )
    refuse_lonely_ranks(accelerator.num_processes)
    torch.manual_seed(recipe.seed)
    start = start_heads(recipe.joint.heads) if recipe.joint else None  # may be missing, which loading need not wait for
    out = Path(recipe.out)
    out.mkdir(parents=True, exist_ok=True)

    target, tokenizer = load_target(recipe.target, dtype=DTYPES[recipe.dtype])
    target.requires_grad_(False).eval()
    if accelerator.device.type != "cpu":
        target.to(accelerator.device)
    with Tracker(recipe, out, main=accelerator.is_main_process) as tracker:
        rows, prompts = read_data(recipe, target, tokenizer, tracker)
        if start is None:
            trained = train_heads(
                recipe, accelerator, target, make_heads(recipe, target, rows, tracker), rows, prompts, tracker
            )
        else:
            joint = make_joint(recipe, target, start, tracker)
            trained = train_heads(recipe, accelerator, joint.target, joint, rows, prompts, tracker)
        if accelerator.is_main_process:
            save(trained, out)
            tracker.say(f"heads are in {out / 'heads'}")
            if isinstance(trained, Joint):
                tell_change(recipe, trained, rows, tracker)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return out / "heads"


def read_data(recipe: Recipe, target: Any, tokenizer: Any, tracker: Tracker) -> tuple[list[Masked], list[Tensor]]:
    """Training rows with their masks, and held-out prompts as ids [P] each."""
    conversations, report = load_conversations(recipe.data.train)
    tracker.say(f"training conversations: {report}")
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    rows, report = encode(
        conversations,
        tokenizer,
        max_length=recipe.data.max_length,
        position_limit=limit,
        train_on=recipe.data.train_on,
    )
    supervised = sum(sum(row.supervised) for row in rows)
    tracker.say(f"training rows: {report}; {sum(len(r.ids) for r in rows)} tokens, {supervised} of them supervised")
    prompts: list[Tensor] = []
    if recipe.data.heldout:
        held, report = load_conversations(recipe.data.heldout, trainable=False)
        tracker.say(f"held-out prompts: {report}")
        first = [[m["role"] for m in c.messages].index("user") + 1 for c in held]  # a system turn may stand before it
        prompts = [torch.tensor(prompt_ids(c.messages[:n], tokenizer)) for c, n in zip(held, first, strict=True)]
    return rows, prompts


def make_heads(recipe: Recipe, target: Any, rows: Sequence[Masked], tracker: Tracker) -> DraftHeads:
    """Fresh heads of the recipe's family, with a draft vocabulary counted on the training answers."""
    options = recipe.heads.model_dump(exclude={"family", "draft_vocab_size"}, exclude_none=True)
    chosen = None
    if recipe.heads.draft_vocab_size is not None:
        counts = count_tokens(rows, target.config.get_text_config(decoder=True).vocab_size)
        ends = target.generation_config.eos_token_id
        always = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        chosen = choose(counts, recipe.heads.draft_vocab_size, always)
        share = coverage(counts, chosen)
        tracker.say(f"draft vocabulary: {chosen.numel()} of {counts.numel()} tokens, {share:.1%} of the answers")
    heads = family(recipe.heads.family).from_target(target, draft_ids=chosen, seed=recipe.seed, **options)
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


def tell_change(recipe: Recipe, joint: Joint, rows: Sequence[Masked], tracker: Tracker) -> None:
    """What has become of the target, and what lossless means from here on."""
    aside = recipe.data.validate_rows
    shown = rows[len(rows) - aside :] if aside else rows[:QUALITY_ROWS]
    before, after = before_and_after(joint, shown)
    tracker.say(
        f"perplexity of the target on {len(shown)} rows {'put aside' if aside else 'it was trained on'}: "
        f"{before:.3f} before, {after:.3f} after\n"
        f"lossless now means the text of the adapted target: put {Path(recipe.out) / 'adapter'} on {recipe.target} "
        "with peft (PeftModel.from_pretrained), merged or not, before these heads decode with it"
    )


def train_heads(
    recipe: Recipe,
    accelerator: Any,
    target: Any,
    heads: DraftHeads | Joint,
    rows: Sequence[Masked],
    prompts: Sequence[Tensor],
    tracker: Tracker,
) -> DraftHeads | Joint:
    """The recipe taken apart into plain arguments of the loop."""
    from headstart.train.loop import train

    optim = recipe.optim
    rows, aside = put_aside(rows, recipe.data.validate_rows)
    stream = Stream(rows, optim.batch_size, recipe.seed)
    steps = stream.steps(optim.epochs, optim.accumulation * accelerator.num_processes)
    plan = plan_of(recipe, steps, heads_of(heads).trained_depths)
    tracker.begin(plan.steps)

    def measure(trained: DraftHeads) -> dict[str, float]:
        options = recipe.evaluate
        values: dict[str, float] = {}
        if prompts:
            found = evaluate(target, trained, prompts, max_new_tokens=options.max_new_tokens, nodes=options.nodes)
            values |= found.numbers()
        if isinstance(heads, Joint):
            values["target_perplexity"] = perplexity(target, aside or rows[:QUALITY_ROWS])
        return values | (validate(target, trained, aside).numbers() if aside else {})

    seen = plan.steps * plan.accumulation * accelerator.num_processes
    with cached_features(recipe, target, heads_of(heads), stream, seen, tracker) as cached:
        return train(
            accelerator,
            target,
            heads,
            stream,
            plan,
            Path(recipe.out),
            f"{recipe.digest()}-{data_digest(rows)}"
            + (f"-{digest(heads.heads.state_dict())}" if isinstance(heads, Joint) else ""),
            evaluate=measure if prompts or aside else None,
            tell=tracker.tell,
            resume=recipe.resume,
            cached=cached,
        )


@contextmanager
def cached_features(
    recipe: Recipe, target: Any, heads: DraftHeads, stream: Stream, micro_batches: int, tracker: Tracker
) -> Iterator[Features | None]:
    """Features through the recipe's cache, if it has one; at the end the cache is complete on disk.

    Raises ValueError where the cache is of something else, or where the disk is too small for the rows of the first
    ``micro_batches``.
    """
    data, wants = recipe.data, heads.config.features or ()
    if data.cache is None:
        yield None
        return
    layers = {*wants, *(data.cache_layers or ())}
    with FeatureCache.open(Path(data.cache), target, layers, DTYPES[data.cache_dtype], tracker.say) as cache:
        first = epoch_order(stream.lengths, stream.batch_size, stream.seed, 0)[:micro_batches]
        tracker.say(cache.expect(stream.rows[i].ids for batch in first for i in batch))
        yield Features(target, wants, cache=cache)


def plan_of(recipe: Recipe, steps: int, depths: int) -> Plan:
    """The numbers of the loop; ``steps`` as many as the data has, ``depths`` that the heads are trained on."""
    from headstart.train.loop import Plan

    optim, every, part = recipe.optim, recipe.every, recipe.joint
    learns: dict[str, Any] = {} if part is None else {"scale": part.scale, "rise": part.schedule, "adapter_lr": part.lr}
    return Plan(
        steps=min(steps, optim.max_steps or steps),
        lr=optim.lr,
        warmup=optim.warmup,
        schedule=optim.schedule,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        clip=optim.clip,
        accumulation=optim.accumulation,
        divergence=recipe.loss.divergence,
        weights=tuple(recipe.loss.depth_decay**d for d in range(depths)),
        depths=tuple(recipe.loss.depths),
        regression=recipe.loss.regression,
        log_every=every.log,
        evaluate_every=every.evaluate,
        save_every=every.save,
        keep=every.keep,
        fit_batches=optim.fit_batches,
        remember=recipe.data.remember,
        **learns,
    )


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


def refuse_lonely_ranks(processes: int) -> None:
    """Raises ValueError where the launcher started ranks that do not know of each other."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != processes:
        raise ValueError(
            f"the launcher started {world} processes, accelerate sees {processes}: each would train alone. On CPU use "
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m headstart.train ..."
        )


if __name__ == "__main__":
    sys.exit(main())
