"""Hydra and Hydra++ against heads written by hand, and what is theirs alone."""

from __future__ import annotations

import pytest
import torch

from headstart.heads import Hydra, Tie
from headstart.heads.batch import predictions
from tests.families import KINDS, disturbed, documents
from tests.reference import hydra_hidden
from tests.toys import llama


@pytest.mark.parametrize("name", ["hydra", "hydra-plain"])
@torch.no_grad()
def test_every_head_equals_the_reference(name: str) -> None:
    """Feature, then the embeddings of the path in order; the prefix in sight is that of the own document."""
    target = llama().double()
    heads, tie = disturbed(KINDS[name].make(target, num_draft_layers=2)).double(), Tie.of(target)
    data = documents(heads)
    for depth, (_, hidden) in enumerate(heads.unroll(data, tie, 4)):
        labels = predictions(data.supervised, data.document, depth).nonzero().tolist()
        assert labels
        for row, label in labels:
            expected = hydra_hidden(heads, data, tie, row, label - 2 - depth, depth)
            torch.testing.assert_close(hidden[row, label - 2 - depth], expected, atol=1e-5, rtol=1e-5)


def test_dropout_is_of_training_only() -> None:
    target = llama()
    heads, tie = disturbed(KINDS["hydra"].make(target, dropout=0.5)), Tie.of(target)
    data, weights = documents(heads), [1.0] * 4
    heads.train()
    torch.manual_seed(0)
    assert heads(data, tie, weights=weights).total != heads(data, tie, weights=weights).total
    heads.eval()
    assert heads(data, tie, weights=weights).total == heads(data, tie, weights=weights).total


def test_a_layer_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="layer is 32 wide, the target 64"):
        KINDS["hydra"].make(llama(), layer={"hidden_size": 32})


def test_plain_hydra_asks_nothing_of_the_targets_attention() -> None:
    """A rotary scaling that depends on the length cannot be mirrored, and plain heads have no use for it."""
    target = llama()
    target.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert Hydra.from_target(target, prefix_attention=False).config.layer is None
    with pytest.raises(ValueError, match="depends on the length"):
        Hydra.from_target(target)
