"""What passes and drafting take on this machine, measured.

Every figure is the median of repeats that take turns, so that a machine that slows down slows all of them down; times
are then made to rise with nodes, context and depth, as they must.

Legend: B rows, P prompt.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headstart.infer.accept import Accepted
from headstart.infer.grow import Budget
from headstart.infer.learned import Learned
from headstart.infer.plan import SIZES, Costs, Curve, Draft, Plan, interpolated, isotonic
from headstart.infer.planner import Adaptive, Planning
from headstart.infer.report import OUTSIDE, wait
from headstart.infer.target import Seen, home
from headstart.infer.tree import DraftTree, pruned

CONTEXTS = (128, 1024)  # tokens cached
REPEATS = 5
STEPS = 16  # of a call that the overhead is read from
FREE = Costs((1,), (Curve(1, 0, (1.0,)),), (Draft(1, (0.0,)),), 0.0)  # under which a planner spends all there is


@torch.no_grad()
def measure(
    fast: Any,
    *,
    contexts: Sequence[int] = CONTEXTS,
    rows: Sequence[int] = (1,),
    repeats: int = REPEATS,
    clock: Callable[[], float] = perf_counter,
) -> Costs:
    """Costs of a Speculator's target and source, for trees of up to its ``nodes`` and its ``depth``.

    ``contexts`` tokens cached, of which those are taken that the target has positions for. Draws no random number.
    """
    text = fast.model.config.get_text_config(decoder=True)
    most = (getattr(text, "max_position_embeddings", None) or 1 << 60) - fast.depth - (repeats + 1) * fast.depth - 2
    fit = sorted({max(1, min(context, most)) for context in contexts})
    sizes = (*(size for size in SIZES if size < fast.nodes), fast.nodes)
    with fast.layout:
        seconds = {(b, c): _verify(fast, b, c, sizes, repeats, clock) for b in rows for c in fit}
        first = {b: dict(zip(sizes, seconds[b, fit[0]], strict=True)) for b in rows}
        drafts = tuple(Draft(b, tuple(_draft(fast, b, fit[0], first[b], repeats, clock))) for b in rows)
    for b in rows:  # a longer text takes no less
        for before, after in itertools.pairwise(fit):
            seconds[b, after] = [max(pair) for pair in zip(seconds[b, before], seconds[b, after], strict=True)]
    curves = tuple(Curve(b, c, tuple(found)) for (b, c), found in seconds.items())
    return Costs(sizes, curves, drafts, _overhead(fast, fit[0], repeats))


def _verify(fast: Any, rows: int, context: int, sizes: Sequence[int], repeats: int, clock: Any) -> list[float]:
    """Seconds of a pass, one for each of the ``sizes``."""
    ids = _text(fast.model, rows, context + 1)
    target = fast.bound(fast.source.wants, context + 1)
    for _ in target.prefill(ids, torch.full((rows,), context + 1, device=ids.device)):
        pass
    trees = []
    for size in sizes:  # guesses side by side: a pass takes as long for any tree
        parents = torch.tensor([-1] + [0] * (size - 1), device=ids.device).expand(rows, -1)
        tokens = ids[:, -1:].expand(-1, size).contiguous()
        trees.append(DraftTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool)))

    def once(tree: DraftTree) -> float:
        began = clock()
        target.verify(tree)
        wait(ids.device)
        return float(clock() - began)

    return isotonic(_medians(once, trees, repeats))


def _draft(fast: Any, rows: int, context: int, passes: dict[int, float], repeats: int, clock: Any) -> list[float]:
    """Seconds of drafting to depths 0, 1 ...: growing a tree, with a planner asked before every level, and taking in
    what the pass before it gave. ``passes``, by nodes, were measured a while ago: where those that run here take
    longer, so does drafting, and it is brought to their pace."""
    length = context + 1
    ids = _text(fast.model, rows, length)
    lengths = torch.full((rows,), length, device=ids.device)
    room = length + (repeats + 1) * fast.depth
    drafter = fast.source.drafter(fast.model, ids.new_zeros(0))
    target = fast.bound(drafter.wants, room)
    drafter.start(ids, lengths, room)
    for seen in target.prefill(ids, lengths):
        drafter.observe(seen)
    planner = Adaptive(FREE, Learned.nothing(fast.depth), rows)
    root, taking_in = ids[:, -1], 0.0
    pace: list[float] = []  # of passes here over those measured before

    def once(depth: int) -> float:
        nonlocal root, taking_in
        budget = Budget(fast.nodes, depth, torch.full((rows,), depth, device=ids.device))
        budget = planner.open(budget, context, rows)
        wait(ids.device)
        began = clock()
        tree = drafter.grow(root, budget)
        wait(ids.device)
        spent = taking_in + clock() - began
        tree = pruned(tree, budget.room, target.vocab_size)
        began = clock()
        verified = target.verify(tree)
        wait(ids.device)
        pace.append((clock() - began) / interpolated(list(passes), list(passes.values()), tree.tokens.shape[1]))
        root = verified.logits[:, 0].argmax(-1)
        first = torch.zeros(rows, 1, dtype=torch.int64)
        accepted = Accepted(first, root[:, None].cpu(), torch.ones(rows, dtype=torch.int64))
        target.commit(accepted)
        features = None if verified.features is None else verified.features[:, :1]
        wait(ids.device)
        began = clock()
        drafter.observe(Seen(accepted.tokens, accepted.count, features, tree, verified))
        wait(ids.device)
        taking_in = clock() - began
        return float(spent)

    found = isotonic(_medians(once, range(1, fast.depth + 1), repeats))
    return [0.0, *(seconds / statistics.median(pace[fast.depth :]) for seconds in found)]


def _overhead(fast: Any, context: int, repeats: int) -> float:
    """Seconds a step spends outside of both models, in calls as users make them, with a planner at work."""
    ids = _text(fast.model, 1, min(context, 32))
    options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}

    def once(_: None) -> float:
        fast.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return float(sum(fast.report.seconds[part] for part in OUTSIDE) / fast.report.steps)

    own, fast.planning = fast.planning, Planning(Plan({}, FREE), fast.depth)
    try:
        return _medians(once, [None], repeats)[0]
    finally:
        fast.planning = own


def _medians(once: Callable[[Any], float], cases: Sequence[Any], repeats: int) -> list[float]:
    """Median seconds of each case: all cases in turn, beginning with another one each time; the first turn is for
    warming up."""
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(repeats + 1):
        for i in range(len(cases)):
            at = (i + turn) % len(cases)
            spent = once(cases[at])
            if turn:
                times[at].append(spent)
    return [statistics.median(found) for found in times]


def _text(model: Any, rows: int, length: int) -> Tensor:
    """Some tokens [rows, length], always the same."""
    size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (rows, length), generator=generator).to(home(model))
