"""The rules "rejection" and "typical" through the whole pipeline: where all rules agree, and the law by many draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.infer.draft_heads import HeadsSource
from headstart.infer.draft_model import DraftModel
from headstart.infer.speculator import Speculator
from tests.drafters import SOURCES, smaller, untrained
from tests.test_lossless import NEW, padded_batch, prompt
from tests.toys import llama

DRAWING: dict[str, Any] = {
    "medusa": lambda model: HeadsSource(untrained("medusa")(model)),
    "medusa-draft-vocabulary": lambda model: HeadsSource(untrained("medusa", draft_ids=torch.arange(0, 12))(model)),
    "medusa-chain": lambda model: HeadsSource(untrained("medusa")(model), width=1, siblings=0),
    "hydra": lambda model: HeadsSource(untrained("hydra")(model)),
    "eagle-chain": lambda model: HeadsSource(untrained("eagle")(model), width=1, siblings=0),
    "eagle3": lambda model: HeadsSource(untrained("eagle3")(model)),
    "eagle3-draft-vocabulary": lambda model: HeadsSource(untrained("eagle3", draft_ids=torch.arange(0, 12))(model)),
    "draft-model-chain": lambda model: DraftModel(smaller(model)),
    "draft-model-tree": lambda model: DraftModel(smaller(model), width=3, siblings=2, depth=4),
}
"""Sources that draw guesses when the rule can test them."""


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


@pytest.fixture(scope="module")
def small() -> Any:
    """Sixteen tokens: few enough for a law to be counted."""
    return llama(vocab_size=16, initializer_range=0.08, eos_token_id=None).double()


@pytest.mark.parametrize("rule", ["rejection", "typical"])
@pytest.mark.parametrize("source", [*SOURCES, *(f"drawing-{name}" for name in DRAWING)])
def test_greedy_decoding_is_the_same_under_every_rule(model: Any, source: str, rule: str) -> None:
    made = DRAWING[source.removeprefix("drawing-")] if source.startswith("drawing-") else SOURCES[source]
    fast = Speculator(model, made(model), nodes=16, rule=rule)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    assert fast.generate(prompt(), **options).tolist() == model.generate(prompt(), **options).tolist()
    assert fast.report.lossless and fast.report.rule == "match"


@pytest.mark.parametrize("source", list(DRAWING))
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}], ids=["", "history"])
def test_a_law_that_is_a_point_gives_the_greedy_text(model: Any, source: str, options: dict[str, Any]) -> None:
    """With top_k=1; processors see each node's own path, emitted or only guessed, in every row of a padded batch."""
    fast, batch = Speculator(model, DRAWING[source](model), nodes=16, rule="rejection"), padded_batch()
    expected = model.generate(**batch, max_new_tokens=NEW, do_sample=False, **options)
    assert fast.generate(**batch, max_new_tokens=NEW, do_sample=True, top_k=1, **options).tolist() == expected.tolist()
    assert fast.report.rule == "rejection" and fast.report.lossless


@pytest.mark.parametrize("source", list(DRAWING))
def test_one_seed_gives_one_text(model: Any, source: str) -> None:
    fast = Speculator(model, DRAWING[source](model), nodes=8, rule="rejection")
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(fast.generate(prompt(), max_new_tokens=NEW, do_sample=True, top_k=0).tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("source", list(DRAWING))
def test_many_draws_have_the_targets_law(small: Any, source: str) -> None:
    """2,000 texts of three tokens: the first two against p(a) p(b | a) after all warpers, chi-square over 256 pairs."""
    rows, options = 2000, {"temperature": 1.3, "top_k": 12, "top_p": 0.95}
    ids = torch.tensor([[3, 7, 5]])
    expected = pair_law(small, ids, **options) * rows
    fast = Speculator(small, DRAWING[source](small), nodes=6, rule="rejection")
    torch.manual_seed(5)
    out = fast.generate(ids, max_new_tokens=3, do_sample=True, num_return_sequences=rows, pad_token_id=0, **options)
    found = torch.zeros(16, 16, dtype=torch.float64)
    found.index_put_((out[:, 3], out[:, 4]), torch.ones(rows, dtype=torch.float64), accumulate=True)
    assert found[expected == 0].sum() == 0
    likely = expected >= 5
    rest = torch.stack([found[~likely].sum(), expected[~likely].sum()])
    pairs = torch.cat([torch.stack([found[likely], expected[likely]], 1), rest[None]])
    chi = float(((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1].clamp(min=1e-9)).sum())
    freedom = len(pairs) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, (chi, freedom)
    assert fast.report.mean_accepted > 0  # guesses were tested, and kept


def pair_law(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """[V, V] law of two sampled tokens after ids, as plain ``generate`` reports its own scores."""
    plain = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    first = torch.softmax(model.generate(ids, max_new_tokens=1, **plain, **options).scores[0][0].double(), -1)
    law = torch.zeros(16, 16, dtype=torch.float64)
    for a in first.nonzero()[:, 0].tolist():
        longer = torch.cat([ids, torch.tensor([[a]])], 1)
        law[a] = first[a] * torch.softmax(
            model.generate(longer, max_new_tokens=1, **plain, **options).scores[0][0].double(), -1
        )
    return law


def test_drawing_accepts_more_than_matching_where_the_law_is_flat(small: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    kept = {}
    for rule in ("match", "rejection"):
        fast = Speculator(small, DraftModel(smaller(small), depth=3), nodes=4, rule=rule)
        torch.manual_seed(0)
        fast.generate(torch.tensor([[3, 7, 5]]), num_return_sequences=40, **options)
        kept[rule] = fast.report.tokens_per_pass
    assert kept["rejection"] > kept["match"]


def test_typical_acceptance_says_that_it_is_lossy(model: Any) -> None:
    fast = Speculator(model, SOURCES["medusa"](model), rule="typical")
    out = fast.generate(padded_batch()["input_ids"][:1], max_new_tokens=NEW, do_sample=True)
    assert not fast.report.lossless and "LOSSY" in str(fast.report) and out.shape[1] == 12 + NEW


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_processors_with_a_state_are_refused(model: Any, rule: str) -> None:
    fast = Speculator(model, SOURCES["medusa"](model), rule=rule)
    with pytest.raises(ValueError, match=r"UnbatchedClassifierFreeGuidance.*rule 'match'"):
        fast.generate(prompt(), max_new_tokens=4, do_sample=True, guidance_scale=1.5)


def test_scores_of_tokens_that_were_never_drawn_are_refused(model: Any) -> None:
    fast = Speculator(model, DRAWING["medusa-chain"](model), rule="rejection")
    with pytest.raises(ValueError, match=r"output_scores.*rule=.match."):
        fast.generate(prompt(), max_new_tokens=4, do_sample=True, return_dict_in_generate=True, output_scores=True)
