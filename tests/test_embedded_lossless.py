"""The promise on the embedded target in float32: real prompts, greedy, ids equal."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import FAMILIES
from headstart.infer.embedded import load_target
from headstart.infer.parity import first_difference, ledger
from headstart.infer.speculator import Speculator
from headstart.train.masking import prompt_ids
from tests.drafters import replay

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("HEADSTART_DATA", ROOT.parent / "shared" / "data"))
NEW = 40


def prompts() -> list[tuple[str, str]]:
    """Three of each Spec-Bench task where that data lies beside the checkout; the project's own prompts elsewhere."""
    suite = DATA / "spec_bench.jsonl"
    files = [suite] if suite.exists() else [ROOT / "recipes" / f"{n}-prompts.jsonl" for n in ("quickstart", "heldout")]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    group = [(row["task"].split("/")[0], row) for row in rows]
    chosen = [
        list(itertools.islice((r for g, r in group if g == task), 3)) for task in dict.fromkeys(g for g, _ in group)
    ]
    return [(row["id"], row["messages"][0]["content"]) for rows in chosen for row in rows]


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    return load_target("smollm2", dtype=torch.float32)


@pytest.mark.embedded
@pytest.mark.parametrize(("name", "text"), prompts(), ids=[name for name, _ in prompts()])
def test_greedy_ids_equal_generate_in_float32(target: tuple[Any, Any], name: str, text: str) -> None:
    model, tokenizer = target
    ids = torch.tensor([prompt_ids([{"role": "user", "content": text}], tokenizer)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(ids, **options)
    heads = FAMILIES["medusa"].from_target(model, draft_ids=torch.arange(0, 49152, 12))
    for source in (heads, replay(expected[0], depth=3)):  # one is nearly always refused, one always accepted
        fast = Speculator(model, source, nodes=12)
        found = fast.generate(ids, **options)
        assert found.tolist() == expected.tolist(), str(first_difference(model, ids[0], expected[0], found[0]))
    assert fast.report.mean_accepted > 2 or fast.report.tokens < 8


@pytest.mark.embedded
@torch.no_grad()
def test_a_tree_in_bf16_differs_from_plain_steps_by_rounding_only(target: tuple[Any, Any]) -> None:
    """FC-077: where bf16 texts part, it is at a near tie, and the report says so."""
    model, tokenizer = load_target("smollm2", dtype=torch.bfloat16)
    fast = Speculator(model, FAMILIES["medusa"].from_target(model, draft_ids=torch.arange(0, 49152, 12)), nodes=12)
    for _, text in prompts()[::5]:
        ids = torch.tensor([prompt_ids([{"role": "user", "content": text}], tokenizer)])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
        found = first_difference(model, ids[0], model.generate(ids, **options)[0], fast.generate(ids, **options)[0])
        assert found is None or found.near_tie, str(found)


@pytest.mark.embedded
def test_five_hundred_positions_in_bf16_flip_at_near_ties_only() -> None:
    """Plain steps against passes of 8 rows over the target's own answers, tokens given: no flip outside the band."""
    model, tokenizer = load_target("smollm2", dtype=torch.bfloat16)
    rows = (ROOT / "recipes" / "smollm2-answers.jsonl").read_text(encoding="utf-8").splitlines()
    positions = 0
    for line in rows[::150]:
        row = json.loads(line)
        prompt = prompt_ids(row["messages"][:1], tokenizer)
        answer = tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"]
        found = ledger(model, torch.tensor([*prompt, *answer]), len(prompt))
        assert not found.bugs, f"{row['id']}: {found}"
        positions += found.positions
    assert positions >= 500
