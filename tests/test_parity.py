"""Near tie or bug: the verdict on two texts that differ."""

from __future__ import annotations

import pytest
import torch

from headstart.infer.parity import Difference, Ledger, first_difference, ledger
from tests.toys import llama


def test_equal_texts_have_no_difference() -> None:
    model = llama()
    text = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)[0]
    assert first_difference(model, text[:3], text, text) is None


def test_a_wrong_token_is_called_a_bug_and_a_tie_a_tie() -> None:
    model = llama()
    text = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)[0]
    wrong = text.clone()
    wrong[8] = (wrong[8] + 1) % 320
    found = first_difference(model, text[:3], text, wrong)
    assert found is not None and found.position == 5 and not found.near_tie and "a bug" in str(found)
    assert (found.plain, found.fast) == (int(text[8]), int(wrong[8])) and found.margin > 0
    assert Difference(0, 1, 2, margin=0.1, noise=0.06).near_tie
    assert "near tie at token 0" in str(Difference(0, 1, 2, margin=0.1, noise=0.06))


def test_a_text_that_goes_on_after_the_other_is_a_bug() -> None:
    text = torch.tensor([5, 6, 7, 8])
    with pytest.raises(ValueError, match="a bug"):
        first_difference(llama(), text[:2], text, text[:3])


def test_the_ledger_of_a_precise_target_has_no_flips() -> None:
    model = llama().double()
    text = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=29, do_sample=False)[0]
    found = ledger(model, text, 3, width=5)
    assert (found.positions, found.flips, found.bugs) == (text.shape[0] - 3, 0, False)
    assert found.noise < 1e-5 and found.variation < 1e-5


def test_the_ledger_tells_a_target_whose_passes_are_wrong() -> None:
    """A model that adds something to every logit of a pass of several rows, as a wrong mask would."""
    model = llama().double()
    whole = model.forward

    def crooked(*args: object, **kwargs: object) -> object:
        out = whole(*args, **kwargs)
        out.logits = out.logits.roll(1, -1) if out.logits.shape[1] > 1 else out.logits
        return out

    model.forward = crooked
    assert ledger(model, torch.arange(3, 30), 4).flips > 20
    assert Ledger(10, 1, noise=0.1, margin=0.3, variation=0.1).bugs
    assert "a bug" in str(Ledger(10, 1, noise=0.1, margin=0.3, variation=0.1))
