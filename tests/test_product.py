"""Every processor with every source, rule, batch and way of sampling: pairwise, and in full for the oracle.

A case is equal to ``generate`` token for token, whatever was guessed, and its forwards are counted by a hook. Where
draws of several rows, or of drawn guesses, are not those of ``generate``, the law is made a point by top_k=1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from headstart.infer.speculator import Speculator
from tests.drafters import SOURCES
from tests.test_lossless import check_counts, counted, padded_batch, prompt
from tests.test_rejection import DRAWING
from tests.toys import VOCAB, llama

NEW = 12
ODD = list(range(5, VOCAB, 2))


class Nudge(LogitsProcessor):
    """One of the caller's own: looks at the text and at the scores."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (input_ids[:, -1:] * 7 + input_ids.shape[1]) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(favoured, 3.0, dtype=scores.dtype))


class Counting(LogitsProcessor):
    """Keeps a state from call to call: right only if it is asked once per emitted token, in order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.roll(self.calls % 5, dims=1)


PROCESSORS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "temperature": lambda: {"temperature": 0.7},
    "top_p": lambda: {"top_p": 0.8},
    "min_p": lambda: {"min_p": 0.05},
    "top_h": lambda: {"top_h": 0.6},
    "typical_p": lambda: {"typical_p": 0.7},
    "epsilon_cutoff": lambda: {"epsilon_cutoff": 0.01},
    "eta_cutoff": lambda: {"eta_cutoff": 0.01},
    "renormalize": lambda: {"renormalize_logits": True, "temperature": 1.2},
    "repetition_penalty": lambda: {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram": lambda: {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": lambda: {"encoder_no_repeat_ngram_size": 2},
    "bad_words": lambda: {"bad_words_ids": [[7], [9, 11]]},
    "sequence_bias": lambda: {"sequence_bias": [[[20], 5.0], [[20, 21], 9.0]]},
    "min_new_tokens": lambda: {"min_new_tokens": 6},
    "min_length": lambda: {"min_length": 16},
    "forced_eos": lambda: {"forced_eos_token_id": 2},
    "decay": lambda: {"exponential_decay_length_penalty": (4, 1.4)},
    "suppress": lambda: {"suppress_tokens": ODD[:40]},
    "begin_suppress": lambda: {"begin_suppress_tokens": ODD[:90]},
    "invalid": lambda: {"remove_invalid_values": True},
    "prefix_fn": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [row + 3, *ODD[ids.shape[0] % 7 :: 3]]},
    "watermark": lambda: {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash", "context_width": 2}},
    "custom": lambda: {"logits_processor": LogitsProcessorList([Nudge()])},
    "eos_list": lambda: {"eos_token_id": [2, *ODD[:60]]},
    "stateful": lambda: {"logits_processor": LogitsProcessorList([Counting()])},
    "synthid": lambda: {"watermarking_config": synthid()},
    "guidance": lambda: {"guidance_scale": 1.5},
}
IN_ORDER = {"stateful", "synthid", "guidance"}  # one row and the rule "match" only


def synthid() -> Any:
    from transformers import SynthIDTextWatermarkingConfig

    return SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)


class Case(NamedTuple):
    source: str
    rule: str
    batch: str  # "one", "level" or "padded"
    sampling: str  # "greedy", "seed" (as generate draws), or "point" (top_k=1)
    processor: str

    def possible(self) -> bool:
        if self.sampling == "seed" and (self.batch != "one" or self.rule != "match"):
            return False
        return self.processor not in IN_ORDER or (
            self.batch == "one" and (self.rule == "match" or self.sampling == "greedy")
        )


ALL_SOURCES: dict[str, Callable[[Any], Any]] = SOURCES | {f"drawing-{k}": v for k, v in DRAWING.items()}
FACTORS: tuple[Sequence[str], ...] = (
    list(ALL_SOURCES),
    ["match", "rejection"],
    ["one", "level", "padded"],
    ["greedy", "seed", "point"],
    list(PROCESSORS),
)


def pairwise() -> list[Case]:
    """Cases that hold every possible pair of values of two factors; greedy, so not the fewest."""
    possible = [case for case in map(Case._make, itertools.product(*FACTORS)) if case.possible()]
    order = torch.randperm(len(possible), generator=torch.Generator().manual_seed(0)).tolist()
    missing = {pair for case in possible for pair in _pairs(case)}
    chosen = []
    for least in (8, 5, 3, 2, 1):  # rich cases first
        for i in order:
            fresh = _pairs(possible[i]) & missing
            if len(fresh) >= least:
                chosen.append(possible[i])
                missing -= fresh
    assert not missing
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(itertools.combinations(enumerate(case), 2))


FULL = [c for c in map(Case._make, itertools.product(["oracle"], *FACTORS[1:])) if c.possible()]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


@pytest.fixture(scope="module")
def made(model: Any) -> dict[tuple[str, str], Speculator]:
    """One Speculator a source and rule: a call leaves nothing behind in it."""
    return {}


@pytest.mark.parametrize("case", sorted({*pairwise(), *FULL}), ids="-".join)
def test_ids_equal_generate(model: Any, made: dict[tuple[str, str], Speculator], case: Case) -> None:
    key = (case.source, case.rule)
    if key not in made:
        made[key] = Speculator(model, ALL_SOURCES[case.source](model), nodes=12, rule=case.rule)
    fast = made[key]
    sampled: dict[str, Any] = {"greedy": {"do_sample": False}, "seed": {"do_sample": True, "top_k": 30}}.get(
        case.sampling, {"do_sample": True, "top_k": 1}
    )
    inputs = {
        "one": {"input_ids": prompt()},
        "level": {"input_ids": prompt(3, 7), "attention_mask": torch.ones(3, 7, dtype=torch.int64)},
        "padded": padded_batch(),
    }[case.batch]
    options = {"max_new_tokens": NEW} | sampled
    torch.manual_seed(1)
    expected = model.generate(**inputs, **(options | PROCESSORS[case.processor]()))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with counted(model) as widths:
        found = fast.generate(**inputs, **(options | PROCESSORS[case.processor]()))
    assert found.tolist() == expected.tolist()
    if case.sampling == "seed":
        assert torch.equal(torch.get_rng_state(), state)
    if case.batch == "one" and case.processor != "guidance":  # guidance runs the target beside the tree
        check_counts(fast, widths, expected.shape[1] - inputs["input_ids"].shape[1])
