"""``accelerate launch -m headstart.train recipes/medusa1-smollm2.yaml [key=value ...]``"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstart.heads import DraftHeads
from headstart.heads.adapter import digest
from headstart.heads.tie import vocabulary_fingerprint
from headstart.infer.embedded import load_target
from headstart.train.batches import Stream, packed
from headstart.train.boards import check_boards
from headstart.train.cache import FeatureCache
from headstart.train.evaluate import evaluate, validate
from headstart.train.features import Features, check_packing
from headstart.train.hub import add_card
from headstart.train.joint import Joint, before_and_after, heads_of, perplexity, save, start_heads
from headstart.train.masking import Masked
from headstart.train.prepare import data_digest, make_heads, make_joint, put_aside, read_data
from headstart.train.provenance import data_facts, describe, made_by
from headstart.train.recipe import Recipe
from headstart.train.recipe_file import load_recipe
from headstart.train.tracking import Tracker

if TYPE_CHECKING:
    from headstart.train.schedule import Plan

QUALITY_ROWS = 32  # rows on which the perplexity of a target that learns is measured

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one recipe; the heads end up in ``out/heads``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m headstart.train RECIPE.yaml [section.key=value ...]")
        return 0 if args else 2
    recipe = load_recipe(args[0], args[1:])
    run(recipe, again=to_go_on(args if recipe.resume else [*args, "resume=true"]))
    return 0


def to_go_on(args: Sequence[str]) -> str:
    """The command with which a run goes on, from the arguments it was started with."""
    world, arguments = int(os.environ.get("WORLD_SIZE", "1")), shlex.join(args)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"accelerate launch (as before) -m headstart.train {arguments}"
    return f"headstart train {f'--num-processes {world} ' if world > 1 else ''}{arguments}"


def run(recipe: Recipe, again: str = "the same command") -> Path:
    """From a recipe to a heads folder, which is returned; where a signal ended it, to a checkpoint and a word on what
    to do ``again``."""
    from transformers.utils import logging as transformers_logging

    from headstart.train.checkpoint import check_folder
    from headstart.train.engine import open_accelerator
    from headstart.train.stop import Stopped

    check_boards(recipe)
    check_folder(Path(recipe.out), recipe.digest(), recipe.resume)
    transformers_logging.disable_progress_bar()  # of small files; ours stays
    accelerator = open_accelerator(recipe.optim.precision)
    torch.manual_seed(recipe.seed + accelerator.process_index)  # dropout; whatever is made of it has the recipe's own
    start = start_heads(recipe.joint.heads) if recipe.joint else None  # may be missing, which loading need not wait for
    out = Path(recipe.out)
    out.mkdir(parents=True, exist_ok=True)

    if recipe.device_map and accelerator.num_processes > 1:
        raise ValueError(
            f"device_map={recipe.device_map} spreads the target over all devices, and {accelerator.num_processes} "
            "processes would each do so: use one process, or device_map=null"
        )
    target, tokenizer = load_target(recipe.target, dtype=DTYPES[recipe.dtype], device_map=recipe.device_map)
    target.requires_grad_(False).eval()
    if getattr(target, "hf_device_map", None) is None:  # spread out, or quantised, it is where it belongs
        target.to(accelerator.device)
    with Tracker(recipe, out, tokenizer, main=accelerator.is_main_process) as tracker:
        rows, prompts = read_data(recipe, target, tokenizer, tracker)
        tracker.facts(provenance={"made_by": made_by(), "data": data_facts(recipe, rows)})
        if start is None:
            model: DraftHeads | Joint = make_heads(recipe, target, rows, tracker)
        else:
            model = make_joint(recipe, target, start, tracker)
            target = model.target
        heads_of(model).config.target_tokenizer = vocabulary_fingerprint(tokenizer.get_vocab())
        try:
            trained = train_heads(recipe, accelerator, target, model, rows, prompts, tracker)
        except Stopped as stopped:
            tracker.say(f"{stopped}. Go on with:\n  {again}")
        else:
            finish(recipe, trained, rows, tracker, main=accelerator.is_main_process)
            if accelerator.is_main_process:
                counts = {"prompts": len(prompts), "processes": accelerator.num_processes}
                describe(out / "heads", recipe, target, tokenizer, rows, device=accelerator.device, **counts)
                add_card(out / "heads")
                tracker.heads(out)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return out / "heads"


def finish(
    recipe: Recipe, trained: DraftHeads | Joint, rows: Sequence[Masked], tracker: Tracker, *, main: bool
) -> None:
    """What a run leaves behind, written by the ``main`` process."""
    from headstart.train.checkpoint import best, complete

    if not main:
        return
    out = Path(recipe.out)
    save(trained, out)
    tracker.say(f"heads are in {out / 'heads'}")
    top = best(out)
    if top is not None and top[0] != complete(out)[-1]:
        told = f"{top[1]:.3f} tokens per pass{'' if recipe.data.heldout else ', by chains on held-out answers'}"
        tracker.say(f"those of {top[0].name} did better ({told}): {top[0] / 'heads'}")
    if isinstance(trained, Joint):
        tell_change(recipe, trained, rows, tracker)


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
    from headstart.train.checkpoint import window
    from headstart.train.loop import train

    optim, world = recipe.optim, accelerator.num_processes
    rows, aside = put_aside(rows, recipe.data.validate_rows)
    stream = make_stream(recipe, target, rows, tracker)
    # a run that goes on with another number of processes keeps its batches a step, and with them its curve
    batches = window(Path(recipe.out)) or optim.accumulation * world
    plan = plan_of(recipe, stream.steps(optim.epochs, batches), heads_of(heads).trained_depths)
    plan = replace(plan, window=batches, accumulation=-(-batches // world))
    tracker.begin(plan.steps)

    def measure(trained: DraftHeads) -> dict[str, float]:
        options, began = recipe.evaluate, monotonic()
        values: dict[str, float] = {}
        if prompts:
            found = evaluate(target, trained, prompts, max_new_tokens=options.max_new_tokens, nodes=options.nodes)
            values |= found.numbers()
            tracker.wrote(found.drafts)
        if isinstance(heads, Joint):
            values["target_perplexity"] = perplexity(target, aside or rows[:QUALITY_ROWS])
        values |= validate(target, trained, aside).numbers() if aside else {}
        return values | {"evaluation_seconds": monotonic() - began}

    with cached_features(recipe, target, heads_of(heads), stream, plan.steps * batches, tracker) as cached:
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


def make_stream(recipe: Recipe, target: Any, rows: Sequence[Masked], tracker: Tracker) -> Stream:
    """The rows in the order of the run, packed where the recipe says so."""
    data, optim = recipe.data, recipe.optim
    if not data.packing:
        return Stream(rows, optim.batch_size, recipe.seed)
    for note in check_packing(target, data.max_length):
        tracker.say(note)
    stream = Stream(rows, optim.batch_size, recipe.seed, data.max_length)
    share = sum(len(row.ids) for row in rows) / (len(stream.lines) * data.max_length)
    tracker.say(
        f"packing: {len(rows)} rows in {len(stream.lines)} lines of at most {data.max_length} tokens, {share:.1%} full"
    )
    return stream


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
        first = stream.epoch(0)[:micro_batches]
        tracker.say(cache.expect(stream.rows[i].ids for lines in first for line in lines for i in line))
        features = Features(target, wants, cache=cache)
        if ahead := features.foresee(packed(stream.rows, lines) for lines in first):
            tracker.say(ahead)
        yield features


def plan_of(recipe: Recipe, steps: int, depths: int) -> Plan:
    """The numbers of the loop; ``steps`` as many as the data has, ``depths`` that the heads are trained on."""
    from headstart.train.schedule import Plan

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
        recompute=optim.recompute,
        backend="inductor" if optim.compile else "",
        **learns,
    )


if __name__ == "__main__":
    sys.exit(main())
