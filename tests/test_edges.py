"""Drafters that misbehave and texts at the edges: the right text, no crash, for every source.

Field cases: drafts past the end token, past the room that is left, outside the vocabulary, repeated siblings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.infer.grow import Budget, Sampling
from headstart.infer.speculator import Speculator
from headstart.infer.tree import DraftTree, pruned, root_only, validate
from tests.drafters import SOURCES, oracle
from tests.test_lossless import padded_batch, prompt
from tests.toys import VOCAB, llama

NEW = 20
DATA = os.environ.get("HEADSTART_DATA")


def chained(root: Tensor, *columns: Tensor | int) -> DraftTree:
    """A chain of one token a column below root [B]."""
    tokens = torch.stack([root, *(torch.full_like(root, c) if isinstance(c, int) else c for c in columns)], 1)
    parents = torch.arange(-1, tokens.shape[1] - 1).expand(tokens.shape[0], -1)
    return DraftTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))


def star(root: Tensor, token: int, n: int) -> DraftTree:
    """n children of the root, all the same token."""
    tree = chained(root, *[token] * n)
    parents = torch.zeros_like(tree.parents)
    parents[:, 0] = -1
    return tree._replace(parents=parents)


def broken(root: Tensor) -> DraftTree:
    """Parents that point forwards, at themselves and at nothing, a root that is called padding."""
    tree = chained(root, 5, 6, 7, 8)
    parents = tree.parents.clone()
    parents[:, 1:] = torch.tensor([3, 2, -1, 99])
    return tree._replace(parents=parents, valid=tree.valid & (torch.arange(5) > 0))


MISBEHAVING: dict[str, Callable[[Tensor, Budget], DraftTree]] = {
    "nothing": lambda root, budget: root_only(root),
    "wrong": lambda root, budget: chained(root, 3, 3, 3),
    "duplicates": lambda root, budget: star(root, 3, 6),
    "beyond-the-vocabulary": lambda root, budget: chained(root, VOCAB, VOCAB + 7, 5),
    "negative": lambda root, budget: chained(root, -1, 5, -100),
    "past-the-end-token": lambda root, budget: chained(root, 2, 2, 5, 6),
    "too-deep": lambda root, budget: chained(root, *range(3, 40)),
    "too-many": lambda root, budget: star(root, 9, 300),
    "broken-parents": lambda root, budget: broken(root),
}


@dataclass(frozen=True)
class Misbehaving:
    """A source whose every tree is made by one function."""

    make: Callable[[Tensor, Budget], DraftTree]
    name: str = "misbehaving"
    depth: int = 40
    wants: tuple[int, ...] = ()
    chain = False

    def check(self, model: Any) -> list[str]:
        return []

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Any:
        made = self.make

        class Drafter:
            wants: tuple[int, ...] = ()

            def start(self, ids: Tensor, lengths: Tensor, room: int) -> None: ...

            def observe(self, seen: Any) -> None: ...

            def grow(self, root: Tensor, budget: Budget) -> DraftTree:
                return made(root, budget)

        return Drafter()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("fault", list(MISBEHAVING))
def test_a_drafter_that_misbehaves_changes_no_text(model: Any, fault: str, rule: str) -> None:
    fast = Speculator(model, Misbehaving(MISBEHAVING[fault]), rule=rule)
    for inputs in ({"input_ids": prompt()}, padded_batch()):
        expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert fast.generate(**inputs, max_new_tokens=NEW, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize("fault", list(MISBEHAVING))
def test_and_draws_nothing_more(model: Any, fault: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "temperature": 1.5}
    torch.manual_seed(2)
    expected, state = model.generate(prompt(), **options), torch.get_rng_state()
    torch.manual_seed(2)
    found = Speculator(model, Misbehaving(MISBEHAVING[fault])).generate(prompt(), **options)
    assert found.tolist() == expected.tolist() and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fault", list(MISBEHAVING))
def test_what_is_left_of_a_tree_is_one(fault: str) -> None:
    root = torch.tensor([4, 5])
    room = torch.tensor([3, 0])
    tree = pruned(MISBEHAVING[fault](root, Budget(16, 3, room)), room, VOCAB)
    validate(tree, VOCAB)
    assert tree.tokens[:, 0].tolist() == [4, 5] and tree.valid[:, 0].all()
    assert tree.valid[1].sum() == 1  # no room below the root


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.parametrize("new", range(1, 7))
def test_budgets_of_one_token_to_depth_plus_two(model: Any, source: str, new: int) -> None:
    fast = Speculator(model, SOURCES[source](model))
    for inputs in ({"input_ids": prompt()}, padded_batch()):
        expected = model.generate(**inputs, max_new_tokens=new, do_sample=False)
        assert fast.generate(**inputs, max_new_tokens=new, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.parametrize("short", [1, 2, 6])
def test_a_prompt_that_almost_fills_the_positions(source: str, short: int) -> None:
    """No guess at or past max_position_embeddings; a prompt one token short of it is decoded as ``generate`` does."""
    model = llama(max_position_embeddings=48).double()
    fast, ids = Speculator(model, SOURCES[source](model)), prompt(1, 48 - short)
    options: dict[str, Any] = {"max_new_tokens": short + 4, "do_sample": False, "eos_token_id": None}
    assert fast.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()


def test_a_tree_larger_than_the_first_block_of_the_cache(model: Any) -> None:
    fast, ids = Speculator(model, oracle(model, depth=8, decoys=20), nodes=400), prompt()
    assert (
        fast.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()
        == model.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()
    )


OWN = [
    "",
    " \n\t ",
    "?",
    "\U0001f642",
    "e\u0301 \u200b\ufeff",
    "a" * 600,
    "again " * 200,
    "x\x00y\x07",
    "<|im_end|> <s>",
]


@pytest.mark.embedded
def test_prompts_at_the_edges_of_what_people_write() -> None:
    """Some of our own, and every prompt of edge_prompts.jsonl where HEADSTART_DATA holds it: as ``generate``."""
    from headstart.infer.embedded import load_target
    from headstart.train.conversations import load_conversations
    from headstart.train.masking import prompt_ids

    target, tokenizer = load_target("smollm2", dtype=torch.float32)
    chats = [(repr(text[:12]), [{"role": "user", "content": text}]) for text in OWN]
    if DATA:
        rows, _ = load_conversations([Path(DATA) / "edge_prompts.jsonl"], trainable=False)
        chats += [(row.id, row.messages) for row in rows]
    fast = Speculator(target, "prompt-lookup", nodes=8)
    for name, messages in chats:
        ids = torch.tensor([prompt_ids(messages, tokenizer)])[:, :300]
        options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert fast.generate(ids, **options).tolist() == target.generate(ids, **options).tolist(), name
