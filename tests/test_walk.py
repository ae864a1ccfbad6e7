"""Accepting on the device: the same ids and the same generator afterwards, with one read of the device a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.infer.accept import match, walk
from headstart.infer.speculator import Speculator
from headstart.infer.tree import filled, siblings_before
from tests.drafters import SOURCES, oracle
from tests.test_accept import Script, tree
from tests.test_lossless import padded_batch, prompt
from tests.test_product import PROCESSORS
from tests.toys import llama

NEW = 24
SCORES_ONLY = ["none", "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "renormalize", "invalid"]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


CASES = [
    *((source, "none") for source in SOURCES),
    *(("oracle", name) for name in [*SCORES_ONLY[1:], "suppress", "eos_list"]),
]


@pytest.mark.parametrize(("source", "processor"), CASES)
def test_sampled_ids_and_the_generator_afterwards_equal_generate(model: Any, source: str, processor: str) -> None:
    fast = Speculator(model, SOURCES[source](model), nodes=12, walk=True)
    for seed in range(2):
        options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0} | PROCESSORS[processor]()
        torch.manual_seed(seed)
        expected, state = model.generate(prompt(), **options), torch.get_rng_state()
        torch.manual_seed(seed)
        assert fast.generate(prompt(), **options).tolist() == expected.tolist()
        assert torch.equal(torch.get_rng_state(), state)
        assert fast.report.syncs == fast.report.steps


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.parametrize("batch", ["one", "padded"])
def test_greedy_ids_equal_generate(model: Any, source: str, batch: str) -> None:
    inputs = {"input_ids": prompt()} if batch == "one" else padded_batch()
    fast = Speculator(model, SOURCES[source](model), nodes=12, walk=True)
    for new in (1, 2, 5, NEW):
        expected = model.generate(**inputs, max_new_tokens=new, do_sample=False)
        assert fast.generate(**inputs, max_new_tokens=new, do_sample=False).tolist() == expected.tolist()
        assert fast.report.syncs == fast.report.steps


@pytest.mark.parametrize("source", ["prompt-lookup", "medusa", "lookahead"])
def test_a_path_that_would_leave_the_cache(source: str) -> None:
    """Steps that were not taken have no place: the first block of the cache ends at 256 tokens."""
    model = llama(max_position_embeddings=512).double()
    fast = Speculator(model, SOURCES[source](model), nodes=3, walk=True)
    for length in (247, 250, 253, 255):
        ids, options = prompt(1, length), {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        assert fast.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()


def test_rows_of_a_batch_draw_from_their_own_laws(model: Any) -> None:
    fast, batch = Speculator(model, SOURCES["medusa"](model), walk=True), padded_batch()
    expected = model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    assert fast.generate(**batch, max_new_tokens=NEW, do_sample=True, top_k=1).tolist() == expected.tolist()


def test_a_stream_gets_every_token(model: Any) -> None:
    from tests.test_speculator import Sink

    fast, sink = Speculator(model, oracle(model), nodes=32, walk=True), Sink()
    out = fast.generate(prompt(), max_new_tokens=NEW, do_sample=False, streamer=sink)
    assert torch.tensor(sink.put_[1:]).flatten().tolist() == out[0, 9:].tolist() and sink.ended == 1


@pytest.mark.parametrize("processor", ["repetition_penalty", "custom", "no_repeat_ngram"])
def test_processors_that_read_the_text_go_token_by_token(model: Any, processor: str) -> None:
    fast = Speculator(model, SOURCES["medusa"](model), walk=True)
    options = {"max_new_tokens": NEW, "do_sample": False} | PROCESSORS[processor]()
    assert fast.generate(prompt(), **options).tolist() == model.generate(prompt(), **options).tolist()
    assert fast.report.syncs == fast.report.steps + fast.report.tokens  # one for the tree, one for every token


def test_every_streamed_token_is_counted(model: Any) -> None:
    from tests.test_speculator import Sink

    fast = Speculator(model, SOURCES["medusa"](model), walk=True)
    fast.generate(prompt(), max_new_tokens=NEW, do_sample=False, streamer=Sink())
    assert fast.report.syncs == fast.report.steps + fast.report.tokens


class Walking(Script):
    """The scripted visit of ``match``, asked as ``walk`` asks."""

    def law_at(self, node: Any) -> Any:
        return self.law(node)

    def draw_at(self, scores: Any) -> Any:
        return self.draw(scores, torch.ones(len(scores)).bool())

    def open_rows(self) -> tuple[Any, Any, Any]:
        return self.running(), torch.full((len(self.draws),), 99), torch.tensor(sorted(self.stops), dtype=torch.int64)


def test_it_accepts_what_match_accepts() -> None:
    draws: list[dict[int, int]] = [{0: 6, 2: 9, 5: 1}, {0: 3}, {}, {0: 6, 2: 9, 5: 5, 6: 42}]
    for stops in (set[int](), {9}, {6}, {3, 42}):
        expected = match(tree(4), Script(draws, stops, finished={2}))
        found = walk(tree(4), Walking(draws, stops, finished={2}), 3)
        k = expected.nodes.shape[1]
        assert found.nodes[:, :k].tolist() == expected.nodes.tolist() and bool((found.nodes[:, k:] < 0).all())
        assert found.tokens[:, :k].tolist() == expected.tokens.tolist()
        assert found.count.tolist() == expected.count.tolist()


def test_ranks_count_the_siblings_before() -> None:
    """root -> 5, 6, 7;  6 -> 8, 9;  9 -> 5."""
    assert siblings_before(tree(), torch.tensor([[0, 2, 5, 6, -1, 3]])).tolist() == [[0, 1, 1, 0, 0, 2]]
    wide = filled(tree(), 10)
    assert wide.tokens.shape == (1, 10) and wide.valid.sum() == 7 and filled(tree(), 3).tokens.shape == (1, 7)


# What it counts, waits of the host for a device, does not happen on a CPU: there is nothing to run there.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_an_accelerator_waits_once_a_step() -> None:
    """Counted by the driver's own debug mode, over the whole loop."""
    import warnings

    model = llama().cuda()  # a test of the device: nothing else names one
    fast = Speculator(model, SOURCES["medusa"](model), nodes=12)
    fast.generate(prompt().cuda(), max_new_tokens=4, do_sample=False)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fast.generate(prompt().cuda(), max_new_tokens=NEW, do_sample=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) <= 3 * fast.report.steps + 20  # the read, and small copies to the device that torch counts too
