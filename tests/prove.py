"""Many tokens, no difference: random prompts, options and seeds through every source, float64, until enough were seen.

    python -m tests.prove --tokens 1000000

Batches decode greedily, single rows also sample with one seed on both sides. Every text is compared with what plain
``generate`` writes; the first difference is printed with all that is needed to see it again. Too long for every change:
tests/test_product.py is the short form.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
import transformers

from headstart.infer.speculator import Speculator
from tests.drafters import SOURCES
from tests.test_product import PROCESSORS
from tests.test_rejection import DRAWING
from tests.toys import TARGETS, VOCAB

SLOW = {"oracle", "adversary"}  # they ask the target for the truth, token by token
ROWS, NEW = 24, 96


def main() -> int:
    """Runs until ``--tokens`` were compared; the exit status says whether all were equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()  # options that do nothing, limits that cannot be met: on purpose
    warnings.simplefilter("ignore")
    models = {name: make().double() for name, make in TARGETS.items()}
    makers = {k: v for k, v in SOURCES.items() if k not in SLOW} | {f"drawing-{k}": v for k, v in DRAWING.items()}
    made: dict[tuple[str, str], Speculator] = {}
    tokens, passes, differences, began = Counter[str](), 0, 0, time.monotonic()
    for number, (target, source) in zip(itertools.count(), itertools.cycle(itertools.product(models, makers))):
        if sum(tokens.values()) >= given.tokens:
            break
        dice = random.Random(given.seed * 1_000_003 + number)
        key = (target, source)
        if key not in made:
            made[key] = Speculator(models[target], makers[source](models[target]), nodes=dice.choice([7, 12, 16, 33]))
        seen, equal = compare(models[target], made[key], dice, number)
        tokens[source] += seen
        passes += made[key].report.passes
        if not equal:
            differences += 1
            print(f"DIFFERENT: case {number}, {target}, {source}, --seed {given.seed}", flush=True)
        if number % 50 == 0:
            print(f"{sum(tokens.values())} tokens, {differences} differences", flush=True)
    total, minutes = sum(tokens.values()), (time.monotonic() - began) / 60
    print(f"{total} tokens in {passes} passes, {minutes:.0f} min, {differences} differences; {dict(tokens)}")
    return 1 if differences else 0


def compare(model: Any, fast: Speculator, dice: random.Random, number: int) -> tuple[int, bool]:
    """One call both ways: tokens compared, and whether ids and the generator's state are equal."""
    single = number % 3 == 0
    rows, longest = (1, dice.randint(1, 40)) if single else (ROWS, dice.randint(4, 40))
    generator = torch.Generator().manual_seed(number)
    ids, mask = torch.randint(3, VOCAB, (rows, longest), generator=generator), torch.ones(rows, longest).long()
    for row in range(rows):
        pad = 0 if single else dice.randint(0, longest - 1)
        ids[row, :pad], mask[row, :pad] = 0, 0
    names = dice.sample([n for n in PROCESSORS if n not in ("guidance", "synthid", "stateful")], 2)
    options = {"max_new_tokens": dice.randint(1, NEW), "do_sample": single and dice.random() < 0.8}
    options |= {key: value for name in names for key, value in PROCESSORS[name]().items()}
    out, states = [], []
    for method in (model.generate, fast.generate):
        torch.manual_seed(number)
        out.append(method(input_ids=ids, attention_mask=mask, **options))
        states.append(torch.get_rng_state())
    seen = int((out[0][:, longest:] != 0).sum())  # the pad token fills rows that have ended
    return seen, torch.equal(*out) and torch.equal(*states)


if __name__ == "__main__":
    sys.exit(main())
