"""Who decodes in a benchmark: names are checked before models load, then made into contestants."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from headstart.infer.bench import Contestant

BASELINES = ("plain", "prompt-lookup", "assisted", "prepacked")  # without guesses of ours; plain always runs
TREE = re.compile(r"([1-9]\d*)x(\d+)")  # a fixed plan of its own: nodes, root included, x guesses on a path
HEADS, DRAFT = "heads", "draft-model"  # in a merge: the last --heads, and --draft-model
Names = list[str] | None


def check_names(
    heads: Names, drafter: Names, baseline: Names, draft_model: str | None, rule: str, plans: list[str]
) -> None:
    """Raises BadParameter for names that stand for nothing, naming the known ones."""
    from headstart.infer.accept import RULES
    from headstart.infer.costs import PLANS
    from headstart.infer.drafters import DRAFTERS

    if not (heads or drafter or baseline or draft_model):
        raise typer.BadParameter("nothing to compare: give --heads, --drafter, --draft-model or --baseline")
    if rule not in RULES:
        raise typer.BadParameter(f"unknown rule {rule!r}; known are {', '.join(RULES)}", param_hint="--rule")
    for plan in plans:
        if plan not in PLANS and not TREE.fullmatch(plan):
            said = f"unknown plan {plan!r}; known are {', '.join(PLANS)}, and nodes x depth as in 8x2"
            raise typer.BadParameter(said, param_hint="--plan")
    for name in baseline or []:
        if name not in BASELINES:
            said = f"unknown baseline {name!r}; known are {', '.join(BASELINES)}"
            raise typer.BadParameter(said, param_hint="--baseline")
    if "assisted" in (baseline or []) and not draft_model:
        raise typer.BadParameter("assisted generation needs a draft model: give --draft-model", param_hint="--baseline")
    given = [*DRAFTERS, *([HEADS] if heads else []), *([DRAFT] if draft_model else [])]
    for part in (part for name in drafter or [] for part in name.split("+")):
        if part in (HEADS, DRAFT) and part not in given:
            raise typer.BadParameter(f"{part!r} in a merge needs --{part}", param_hint="--drafter")
        if part not in given:
            said = f"unknown drafter {part!r}; known are {', '.join(given)}, or several joined by +"
            raise typer.BadParameter(said, param_hint="--drafter")


def load_models(target: str, draft_model: str | None, dtype: str, device: str | None) -> tuple[Any, Any, Any]:
    """Target, its tokenizer, and the draft model as a source of guesses, None without one."""
    import torch
    from transformers.utils import logging as transformers_logging

    from headstart.infer.draft_model import DraftModel
    from headstart.infer.embedded import load_target

    transformers_logging.disable_progress_bar()
    load = partial(
        load_target,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    model, tokenizer = load(target)
    if draft_model is None:
        return model, tokenizer, None
    small, its_tokenizer = load(draft_model)
    return model, tokenizer, DraftModel(small, tokenizer=its_tokenizer, target_tokenizer=tokenizer)


def speculators(
    speculate: Any, model: Any, heads: list[Any], draft: Any, drafter: Names, plans: list[str], chain: bool
) -> "list[Contestant]":
    """Each of ``heads``, (folder, heads) pairs, the draft model, and the named drafters and merges, under every plan;
    names differ. ``chain``: one guess a depth from heads on their own."""
    import torch

    from headstart.heads import Tie
    from headstart.infer.bench import Contestant
    from headstart.infer.draft_heads import HeadsSource

    sources: list[tuple[str, Any]] = []
    for folder, loaded in heads:
        torch.nn.Module.to(loaded, device=Tie.of(model).weight.device, dtype=model.dtype)
        family = loaded.config.family
        place = Path(folder).parent if Path(folder).name == HEADS else Path(folder)  # out/mine/heads is called mine
        source = HeadsSource(loaded, width=1, branch=1, siblings=0) if chain else loaded
        sources.append((f"{family} {place.name}" if len(heads) > 1 else family, source))
    if draft is not None:
        sources.append((DRAFT, draft))
    known = ({HEADS: heads[-1][1]} if heads else {}) | {DRAFT: draft}
    for name in drafter or []:
        parts = [known.get(part, part) for part in name.split("+")]
        sources.append((name, parts if len(parts) > 1 else parts[0]))
    made: list[Contestant] = []
    for source_name, source, plan in ((name, source, plan) for name, source in sources for plan in plans):
        name = source_name if plans == [plan] else f"{source_name}, {plan}"
        again = sum(contestant.name.split(" #")[0] == name for contestant in made)
        tree = TREE.fullmatch(plan)
        spent = {"nodes": int(tree[1]), "depth": int(tree[2])} if tree else {"plan": plan}
        made.append(Contestant.ours(f"{name} #{again + 1}" if again else name, speculate(source, **spent)))
    return made
