"""The promise: same text as ``generate``, token for token and draw for draw, for every source of guesses and target.

In float64, so that no tie is near. Each run counts the target's forwards by a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.infer.accept import RULES, match
from headstart.infer.speculator import Speculator
from tests.drafters import SOURCES, oracle, replay
from tests.toys import TARGETS, VOCAB

NEW = 32
SAMPLED = 14  # new tokens of each of the 20 seeds
TOGETHER = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
HOT = {"temperature": 1.5, "top_k": 0}


@pytest.fixture(scope="module", params=list(TARGETS))
def model(request: pytest.FixtureRequest) -> Any:
    return TARGETS[request.param]().double()


@pytest.fixture(params=list(SOURCES))
def fast(request: pytest.FixtureRequest, model: Any) -> Speculator:
    return Speculator(model, SOURCES[request.param](model), nodes=16)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Widths of the target's forwards that write to a cache: drafters that ask the model for truth use none."""
    widths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("cache") is not None:
            widths.append((args[0] if args else kwargs["input_ids"]).shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield widths
    finally:
        hook.remove()


def prompt(rows: int = 1, length: int = 9) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(length + rows))


def padded_batch() -> dict[str, Tensor]:
    """Four rows of 12, 3, 7 and 1 tokens, padded on the left."""
    ids, mask = prompt(4, 12), torch.ones(4, 12, dtype=torch.int64)
    for row, length in enumerate((12, 3, 7, 1)):
        ids[row, : 12 - length], mask[row, : 12 - length] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def check_counts(fast: Speculator, widths: list[int], new: int) -> None:
    """The report's numbers are those of the hook, and add up to the tokens that came out."""
    report = fast.report
    assert report.tokens == new
    assert report.forwards == len(widths)
    assert sum(accepted + 1 for accepted, _ in report.rounds) == new


def test_greedy_ids_equal_generate(model: Any, fast: Speculator) -> None:
    ids = prompt()
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    with counted(model) as widths:
        found = fast.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert found.tolist() == expected.tolist()
    check_counts(fast, widths, expected.shape[1] - ids.shape[1])
    assert fast.report.passes == len(widths) - fast.report.prefill_forwards


def test_greedy_rows_of_a_left_padded_batch_equal_generate(model: Any, fast: Speculator) -> None:
    batch = padded_batch()
    expected = model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    found = fast.generate(**batch, max_new_tokens=NEW, do_sample=False)
    assert found.tolist() == expected.tolist()


def test_greedy_batch_with_processors_equals_generate(model: Any, fast: Speculator) -> None:
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "do_sample": False}
    batch = padded_batch()
    expected = model.generate(**batch, max_new_tokens=NEW, **options)
    assert fast.generate(**batch, max_new_tokens=NEW, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("options", [HOT, TOGETHER], ids=["T=1.5", "together"])
def test_sampled_ids_and_the_generator_afterwards_equal_generate(
    model: Any, fast: Speculator, options: dict[str, Any]
) -> None:
    ids = prompt()
    for seed in range(20):
        torch.manual_seed(seed)
        expected = model.generate(ids, max_new_tokens=SAMPLED, do_sample=True, **options)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        with counted(model) as widths:
            found = fast.generate(ids, max_new_tokens=SAMPLED, do_sample=True, **options)
        assert found.tolist() == expected.tolist(), f"seed {seed}"
        assert torch.equal(torch.get_rng_state(), state), f"seed {seed}"
        check_counts(fast, widths, expected.shape[1] - ids.shape[1])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_oracle_gives_depth_plus_one_tokens_a_pass(model: Any, depth: int) -> None:
    """The right child stands at a random place among decoys; a verifier that follows the first child would lose it."""
    model.generation_config.eos_token_id = None
    try:
        fast = Speculator(model, oracle(model, depth=depth), nodes=64)
        for options in ({}, {"repetition_penalty": 1.0}):
            with counted(model) as widths:
                fast.generate(prompt(), max_new_tokens=6 * (depth + 1), do_sample=False, pad_token_id=0, **options)
            assert len(widths) - fast.report.prefill_forwards == 6
            assert fast.report.tokens_per_pass == depth + 1
            assert max(widths) <= 64
    finally:
        model.generation_config.eos_token_id = 2


@pytest.mark.parametrize("options", [HOT, TOGETHER], ids=["T=1.5", "together"])
def test_sampled_text_is_accepted_whole_when_it_is_guessed(model: Any, options: dict[str, Any]) -> None:
    """Under sampling too: a source that knows the draws to come gets depth + 1 tokens from every pass."""
    model.generation_config.eos_token_id = None
    try:
        for seed in range(3):
            torch.manual_seed(seed)
            expected = model.generate(prompt(), max_new_tokens=20, do_sample=True, pad_token_id=0, **options)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            fast = Speculator(model, replay(expected[0], seed=seed), nodes=64)
            with counted(model) as widths:
                found = fast.generate(prompt(), max_new_tokens=20, do_sample=True, pad_token_id=0, **options)
            assert found.tolist() == expected.tolist() and torch.equal(torch.get_rng_state(), state)
            assert len(widths) - fast.report.prefill_forwards == 4 and fast.report.tokens_per_pass == 5
    finally:
        model.generation_config.eos_token_id = 2


def test_rows_accept_different_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ragged path is really taken: in one and the same step rows advance by different numbers of tokens."""
    steps: list[list[int]] = []

    def watched(tree: Any, visit: Any) -> Any:
        accepted = match(tree, visit)
        steps.append([c for c in accepted.count.tolist() if c])
        return accepted

    monkeypatch.setitem(RULES, "match", watched)
    fast = Speculator(
        model, SOURCES["oracle"](model) if model.config.model_type == "mistral" else SOURCES["medusa"](model)
    )
    ids = prompt(8, 7)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    with counted(model) as widths:
        found = fast.generate(ids, **options)
    assert found.tolist() == model.generate(ids, **options).tolist()
    assert len(widths) == fast.report.forwards == len(steps) + fast.report.prefill_forwards
    if fast.source.name == "medusa":
        assert any(len(set(counts)) > 1 for counts in steps)


def test_sampling_in_a_batch_draws_each_row_from_its_own_law(model: Any) -> None:
    """With top_k=1 the law is a point, so the draw must be the greedy one in every row."""
    fast = Speculator(model, SOURCES["medusa"](model), nodes=16)
    batch = padded_batch()
    expected = model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    assert fast.generate(**batch, max_new_tokens=NEW, do_sample=True, top_k=1).tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_any_batch_size_and_its_counts(model: Any, rows: int) -> None:
    """A row's text and its accepted counts do not depend on its neighbours (FC-104)."""
    source: Callable[[Any], Any] = SOURCES["medusa"]
    fast = Speculator(model, source(model), nodes=16)
    ids = prompt(rows, 7)
    together = fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    batched = sorted(fast.report.rounds)
    single = []
    for row in range(rows):
        one = fast.generate(ids[row : row + 1], max_new_tokens=30, do_sample=False)[0]
        assert together[row, : one.shape[0]].tolist() == one.tolist()
        single += fast.report.rounds
    assert batched == sorted(single)
