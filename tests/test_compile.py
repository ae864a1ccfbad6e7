"""torch.compile of the verify pass: the same ids, and one graph whatever the tree, the step or the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.infer.speculator import Speculator
from tests.drafters import SOURCES
from tests.test_lossless import padded_batch, prompt
from tests.toys import TARGETS, llama

NEW = 32


def graphs(run: Any) -> int:
    """Graphs compiled while ``run`` runs."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run()
    assert not counters["graph_break"], dict(counters["graph_break"])
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("source", ["medusa", "prompt-lookup"])
def test_one_graph_and_the_same_ids(target: str, source: str) -> None:
    model = TARGETS[target]().double()
    fast = Speculator(model, SOURCES[source](model), nodes=12, compile="eager")

    def calls() -> None:
        for length, new in ((9, NEW), (3, 20), (14, 5)):
            options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
            ids = prompt(1, length)
            assert fast.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()

    assert graphs(calls) == 1


def test_ragged_rows_and_samples() -> None:
    model = llama().double()
    fast = Speculator(model, SOURCES["medusa"](model), nodes=12, compile="eager")
    expected = model.generate(**padded_batch(), max_new_tokens=NEW, do_sample=False)
    assert fast.generate(**padded_batch(), max_new_tokens=NEW, do_sample=False).tolist() == expected.tolist()
    torch.manual_seed(1)
    sampled = model.generate(prompt(), max_new_tokens=NEW, do_sample=True, temperature=1.5)
    torch.manual_seed(1)
    assert fast.generate(prompt(), max_new_tokens=NEW, do_sample=True, temperature=1.5).tolist() == sampled.tolist()


def test_the_default_backend_gives_the_same_ids() -> None:
    """Really compiled to machine code, so on the smallest target."""
    model = llama(num_hidden_layers=1).double()
    fast = Speculator(model, SOURCES["medusa"](model), nodes=8, compile=True)
    expected = model.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    assert fast.generate(prompt(), max_new_tokens=NEW, do_sample=False).tolist() == expected.tolist()


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'inducktor'; known are .*inductor"):
        Speculator(llama(), "prompt-lookup", compile="inducktor")
