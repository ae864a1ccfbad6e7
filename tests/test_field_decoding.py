"""Field cases on drafting and sampling: what went wrong for others, as small inputs with the right outcome."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.infer.draft_model import DraftModel, check_tokenizers
from headstart.infer.draft_ngram import PromptLookup
from headstart.infer.speculator import Speculator
from tests.byte_tokenizer import byte_tokenizer
from tests.drafters import SOURCES, adversary, oracle, smaller
from tests.test_lossless import counted, padded_batch, prompt
from tests.test_rejection import DRAWING
from tests.toys import VOCAB, gpt2, llama

DRAWN: dict[str, Any] = {"do_sample": True, "max_new_tokens": 24, "top_k": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


@pytest.mark.parametrize("length", [20, 60, 63, 64, 65, 90])
@pytest.mark.parametrize("width", [1, 3])
def test_a_draft_model_with_fewer_positions(model: Any, length: int, width: int) -> None:
    """FC-082: exact; drafting stops where the draft model's positions end, with one notice."""
    fast = Speculator(model, DraftModel(llama(seed=1, max_position_embeddings=64).double(), width=width, branch=3))
    assert [note for note in fast.notes if "64 positions" in note] == fast.notes
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    for ids in (prompt(1, length), prompt(2, length)):
        mask = {"attention_mask": torch.ones_like(ids)}
        assert fast.generate(ids, **mask, **options).tolist() == model.generate(ids, **mask, **options).tolist()


def test_a_draft_model_with_a_table_of_positions() -> None:
    """FC-082: learned positions past the table would be an index error."""
    target = gpt2().double()
    small = gpt2()
    small.config.n_positions = 32
    short = type(small)(small.config).eval().double()
    fast, ids = Speculator(target, DraftModel(short)), prompt(1, 30)
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)
    assert fast.generate(ids, max_new_tokens=20, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 5), (3, 8)])
def test_a_prompt_that_repeats_itself(model: Any, shortest: int, longest: int) -> None:
    """FC-083: many continuations of the same marker, none of them trusted."""
    ids = torch.tensor([[7, 8, 9, 7, 8, 10, 7, 8, 11, 7, 8, 9, 7, 8] * 3])
    fast = Speculator(model, PromptLookup(shortest=shortest, longest=longest))
    expected = model.generate(ids, max_new_tokens=48, do_sample=False)
    assert fast.generate(ids, max_new_tokens=48, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize("source", list(DRAWING))
@pytest.mark.parametrize("warp", [{"top_k": 3}, {"top_p": 0.5, "top_k": 0}, {"temperature": 0.3, "top_k": 4}])
def test_no_token_outside_the_warped_support(model: Any, source: str, warp: dict[str, Any]) -> None:
    """FC-089: warpers reach the verifying side of every draw, drawn guesses and residuals included."""
    fast = Speculator(model, DRAWING[source](model), nodes=8, rule="rejection")
    ids = prompt(1, 5).expand(12, -1)
    mask, options = torch.ones_like(ids), DRAWN | {"max_new_tokens": 6} | warp
    torch.manual_seed(0)
    out = fast.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **options)
    asked = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    for row in out:
        for at in range(5, 11):
            scores = model.generate(row[None, :at], **(DRAWN | warp | asked)).scores[0][0]
            assert scores[row[at]] > -torch.inf


def test_two_candidates_of_a_law_with_two_tokens() -> None:
    """FC-091: both are guessed, one of them is always accepted, and each as often as the law says."""
    small = llama(vocab_size=4, eos_token_id=None, pad_token_id=0, bos_token_id=1).double()
    with torch.no_grad():
        small.lm_head.weight.zero_()
    rows = 4000
    for rule in ("match", "rejection"):
        fast = Speculator(small, DraftModel(smaller(small), width=2, siblings=1, branch=2, depth=1), nodes=3, rule=rule)
        torch.manual_seed(1)
        out = fast.generate(
            torch.tensor([[3]]),
            num_return_sequences=rows,
            max_new_tokens=2,
            do_sample=True,
            suppress_tokens=[2, 3],
            top_k=0,
        )
        share = float((out[:, 1] == 0).double().mean())
        assert set(out[:, 1:].flatten().tolist()) <= {0, 1} and abs(share - 0.5) < 4 * 0.5 / rows**0.5


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("source", ["oracle", "medusa", "lookahead", "draft-model-tree"])
def test_seeds(model: Any, source: str, rule: str) -> None:
    """FC-092: one seed, one text, whatever ran before; another seed, another text."""
    fast = Speculator(model, SOURCES[source](model), rule=rule)
    texts = []
    for seed in (5, 5, 6, 5):
        torch.manual_seed(seed)
        texts.append(fast.generate(prompt(), **DRAWN).tolist())
        fast.generate(prompt(1, 4), **DRAWN)  # an unrelated call in between
    assert texts[0] == texts[1] == texts[3] != texts[2]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_temperatures_and_cuts_at_their_ends(model: Any, rule: str) -> None:
    """FC-094: next to zero is greedy; zero, below and NaN are refused before any forward; top_k may exceed V."""
    fast = Speculator(model, SOURCES["medusa"](model), rule=rule)
    greedy = model.generate(prompt(), max_new_tokens=24, do_sample=False).tolist()
    assert fast.generate(prompt(), **(DRAWN | {"temperature": 1e-6})).tolist() == greedy
    assert fast.generate(prompt(), **(DRAWN | {"top_p": 0.0})).tolist() == greedy
    for odd in (0.0, -1.0, float("nan")):
        with counted(model) as widths, pytest.raises(ValueError, match="temperature"):
            fast.generate(prompt(), **(DRAWN | {"temperature": odd}))
        assert widths == []
    for options in ({"top_k": VOCAB + 80}, {"top_p": 1.0}):
        torch.manual_seed(3)
        expected = model.generate(prompt(), **(DRAWN | options)).tolist()
        torch.manual_seed(3)
        found = fast.generate(prompt(), **(DRAWN | options)).tolist()
        assert found == expected or rule == "rejection"


def test_a_rule_is_lossless_unless_it_says_otherwise(model: Any) -> None:
    """FC-095: the default is exact, the lossy rule is asked for by name and marked in the report."""
    fast = Speculator(model, SOURCES["medusa"](model))
    fast.generate(prompt(), **DRAWN)
    assert fast.report.rule == "match" and fast.report.as_dict()["lossless"]
    fast = Speculator(model, SOURCES["medusa"](model), rule="typical")
    fast.generate(prompt(), **DRAWN)
    assert not fast.report.as_dict()["lossless"]
    with pytest.raises(ValueError, match="unknown rule 'fast'; known are"):
        Speculator(model, SOURCES["medusa"](model), rule="fast")


@pytest.mark.parametrize("source", list(SOURCES))
def test_batches_work_or_are_refused_by_name(model: Any, source: str) -> None:
    """FC-100, FC-103: two rows, several sequences; padding on the right and beams refused before any forward."""
    fast = Speculator(model, SOURCES[source](model))
    ids = prompt(2, 6)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    assert fast.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    right = {"attention_mask": padded_batch()["attention_mask"].flip(1), "max_new_tokens": 8}
    with counted(model) as widths:
        with pytest.raises(ValueError, match="padding_side='left'"):
            fast.generate(padded_batch()["input_ids"].flip(1), **right)
        with pytest.raises(ValueError, match="beam"):
            fast.generate(ids, num_beams=2, **options)
    assert widths == []


def test_a_foe_is_slower_and_the_counts_say_why(model: Any) -> None:
    """FC-142: nothing accepted is one token a pass; an oracle is depth + 1."""
    ids = prompt()
    for source, passes in ((adversary(model), 20), (oracle(model, depth=4), 4)):
        fast = Speculator(model, source, nodes=32)
        fast.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert fast.report.passes == passes


def test_tokenizers_are_compared_by_token_not_by_size() -> None:
    """A padded vocabulary is the same vocabulary; a token of another meaning is named."""
    ours, theirs = byte_tokenizer(), byte_tokenizer()
    theirs.add_tokens(["<padding>"])
    check_tokenizers(ours, theirs)

    class Shifted:
        def get_vocab(self) -> dict[str, int]:
            return {token: (i + 1) % 320 for token, i in byte_tokenizer().get_vocab().items()}

    with pytest.raises(ValueError, match="token numbers mean something else to the draft model"):
        check_tokenizers(Shifted(), ours)
    check_tokenizers(None, ours)


def test_a_draft_model_of_another_vocabulary_guesses_what_both_have(model: Any) -> None:
    fast = Speculator(model, llama(seed=2, vocab_size=200).double())
    assert any("only the first 200" in note for note in fast.notes)
    expected = model.generate(prompt(), max_new_tokens=20, do_sample=False)
    assert fast.generate(prompt(), max_new_tokens=20, do_sample=False).tolist() == expected.tolist()
    bigger = Speculator(model, llama(seed=2, vocab_size=400).double(), rule="rejection")
    torch.manual_seed(0)
    assert bigger.generate(prompt(), **DRAWN).max() < VOCAB
