"""Near tie or bug: the verdict on two texts that differ."""

from __future__ import annotations

import pytest
import torch

from headstart.infer.parity import Difference, first_difference
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
