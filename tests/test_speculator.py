"""The call as users make it: end tokens, budgets, streams, stop strings, refusals, counts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicCache

from headstart.infer import speculator
from headstart.infer.draft_heads import HeadsSource
from headstart.infer.grow import Shape
from headstart.infer.speculator import Speculator
from headstart.infer.target import Target
from tests.byte_tokenizer import byte_tokenizer
from tests.drafters import SOURCES, adversary, oracle
from tests.toys import VOCAB, c64, chain, llama


class Sink:
    """Records what a streamer would get."""

    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.put_.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1

    @property
    def tokens(self) -> list[int]:
        return [t for column in self.put_[1:] for t in column]


@pytest.fixture(params=list(SOURCES))
def source(request: pytest.FixtureRequest) -> Any:
    if request.param.endswith("draft-vocabulary"):  # its ids are those of T0
        return SOURCES["medusa-two-layers"]
    return SOURCES[request.param]


@pytest.mark.parametrize("depth", [1, 4, 10])
def test_the_end_token_stops_wherever_it_stands_in_a_block(depth: int) -> None:
    """FC-070 and FC-139: nothing after the end in ids, stream or counts."""
    for eos in range(6, 20):
        model = c64(eos=eos)
        fast, sink = Speculator(model, oracle(model, depth=depth), nodes=64), Sink()
        out = fast.generate(torch.tensor([[5]]), max_new_tokens=40, do_sample=False, pad_token_id=0, streamer=sink)
        assert out[0].tolist() == list(range(5, eos + 1))
        assert sink.tokens == list(range(6, eos + 1)) and sink.ended == 1
        assert fast.report.tokens == eos - 5 == sum(accepted + 1 for accepted, _ in fast.report.rounds)


def test_the_end_token_stops_for_every_source(source: Any) -> None:
    model = c64(eos=13)
    out = Speculator(model, source(model)).generate(
        torch.tensor([[5]]), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    assert out[0].tolist() == list(range(5, 14))


def test_several_end_tokens() -> None:
    model = c64(eos=30)
    fast = Speculator(model, oracle(model))
    out = fast.generate(torch.tensor([[5]]), max_new_tokens=40, eos_token_id=[30, 11, 50], pad_token_id=0)
    assert out[0].tolist() == list(range(5, 12))


def test_end_and_limit_in_one_block() -> None:
    """FC-073: end before, at and after the fifth token."""
    for eos, expected in ((9, [6, 7, 8, 9]), (10, [6, 7, 8, 9, 10]), (11, [6, 7, 8, 9, 10])):
        model = c64(eos=eos)
        fast = Speculator(model, oracle(model, depth=8), nodes=64)
        out = fast.generate(torch.tensor([[5]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert out[0, 1:].tolist() == expected


def test_exactly_as_many_tokens_as_asked(source: Any) -> None:
    """FC-071 and FC-086: every budget, the prompt with a repetition."""
    model = c64()
    fast = Speculator(model, source(model))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 5, 6, 7]])
    for budget in range(1, 13):
        expected = model.generate(ids, max_new_tokens=budget, do_sample=False)
        found = fast.generate(ids, max_new_tokens=budget, do_sample=False)
        assert found.tolist() == expected.tolist() and found.shape[1] == 10 + budget
        assert fast.report.tokens == budget


def test_without_an_end_token_it_runs_to_the_limit(source: Any) -> None:
    """FC-074."""
    model = llama(eos_token_id=None).double()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 7, 8]])
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    assert (
        Speculator(model, source(model)).generate(ids, max_new_tokens=30, do_sample=False).tolist() == expected.tolist()
    )


def test_each_row_of_a_batch_ends_at_its_own_end_token() -> None:
    """FC-101: then only padding; counts add up over the rows."""
    model = c64(eos=20)
    fast = Speculator(model, oracle(model))
    ids = torch.tensor([[5], [15], [18]])
    out = fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert out.tolist() == [list(range(5, 21)), [*range(15, 21), *[0] * 10], [18, 19, 20, *[0] * 13]]
    assert fast.report.tokens == 15 + 5 + 2


def test_positions_end_where_the_target_ends(source: Any) -> None:
    """No guess at or past max_position_embeddings; the last tokens are plain steps."""
    model = llama(max_position_embeddings=48).double()
    model.generation_config.eos_token_id = None
    asked: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: (
            asked.append(int(kwargs["position_ids"].max())) if "position_ids" in kwargs else None
        ),
        with_kwargs=True,
    )
    ids = torch.randint(3, VOCAB, (1, 30))
    fast = Speculator(model, source(model))
    found = fast.generate(ids, max_new_tokens=18, do_sample=False)
    hook.remove()
    assert found.tolist() == model.generate(ids, max_new_tokens=18, do_sample=False).tolist()
    assert max(asked) <= 47


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(source: Any, length: int) -> None:
    """FC-080 and FC-106: a prompt of one token, all guesses refused in the first round."""
    model = llama().double()
    ids = torch.randint(3, VOCAB, (1, length))
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert (
        Speculator(model, source(model)).generate(ids, max_new_tokens=20, do_sample=False).tolist() == expected.tolist()
    )


def test_the_cache_holds_what_was_kept_after_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """FC-106: length = prompt - 1 + tokens kept, when everything is refused and when everything is accepted."""
    kept: list[int] = []

    class Watched(Target):
        def commit(self, path: Any) -> None:
            super().commit(path)
            kept.append(int(self.cache.lengths[0]))

    monkeypatch.setattr(speculator, "Target", Watched)
    model = c64()
    for make, per_round in ((adversary, 1), (oracle, 5)):
        kept.clear()
        Speculator(model, make(model), nodes=32).generate(torch.tensor([[5]]), max_new_tokens=10, do_sample=False)
        assert kept == list(range(per_round, 11, per_round))


def test_a_processor_that_looks_at_the_last_token_sees_each_path(source: Any) -> None:
    """FC-076: bans repeating the last token, on every visited prefix."""

    class NoRepeat(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.scatter(1, input_ids[:, -1:], -torch.inf)

    model = llama().double()
    ids = torch.randint(3, VOCAB, (1, 9))
    options = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    expected = model.generate(ids, logits_processor=LogitsProcessorList([NoRepeat()]), **options)
    fast = Speculator(model, source(model))
    found = fast.generate(ids, logits_processor=LogitsProcessorList([NoRepeat()]), **options)
    assert found.tolist() == expected.tolist()


def test_allowed_tokens_by_row_in_a_batch(source: Any) -> None:
    """The batch id of prefix_allowed_tokens_fn is the row's own, whatever the others do."""

    def allowed(batch_id: int, ids: Tensor) -> list[int]:
        return list(range(10 + batch_id, VOCAB, 3))

    model = llama().double()
    ids = torch.randint(3, VOCAB, (3, 6))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, prefix_allowed_tokens_fn=allowed, **options)
    fast = Speculator(model, source(model))
    assert fast.generate(ids, prefix_allowed_tokens_fn=allowed, **options).tolist() == expected.tolist()


def test_stop_strings_inside_a_block() -> None:
    """FC-079: "STOP" is spread over four tokens; ids, stream and counts end with it."""
    tokenizer = byte_tokenizer()
    text = "abSTOPcd"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = chain(dict(zip(ids, [*ids[1:], ids[0]], strict=True)))
    fast, sink = Speculator(model, oracle(model, depth=8), nodes=64), Sink()
    start = torch.tensor([ids[:1]])
    out = fast.generate(
        start, max_new_tokens=20, do_sample=False, tokenizer=tokenizer, stop_strings="STOP", streamer=sink
    )
    expected = model.generate(start, max_new_tokens=20, do_sample=False, tokenizer=tokenizer, stop_strings="STOP")
    assert out.tolist() == expected.tolist() and out[0].tolist() == ids[:6]
    assert sink.tokens == ids[1:6] and fast.report.tokens == 5
    with pytest.raises(ValueError, match="tokenizer"):
        fast.generate(start, max_new_tokens=20, stop_strings="STOP")


def test_stop_strings_of_the_models_own_or_a_positional_config() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("abSTOPcd", add_special_tokens=False)["input_ids"]
    model = chain(dict(zip(ids, [*ids[1:], ids[0]], strict=True)))
    start = torch.tensor([ids[:1]])
    config = GenerationConfig(stop_strings="STOP", max_new_tokens=20, do_sample=False)
    fast = Speculator(model, oracle(model))
    assert fast.generate(start, config, tokenizer=tokenizer)[0].tolist() == ids[:6]
    model.generation_config.stop_strings = ["STOP"]
    assert fast.generate(start, max_new_tokens=20, do_sample=False, tokenizer=tokenizer)[0].tolist() == ids[:6]


def test_a_length_criterion_of_the_caller_replaces_the_limit() -> None:
    model = c64()
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    limit = StoppingCriteriaList([MaxLengthCriteria(10)])
    expected = model.generate(torch.tensor([[5]]), stopping_criteria=limit, **options)
    found = Speculator(model, oracle(model)).generate(torch.tensor([[5]]), stopping_criteria=limit, **options)
    assert found.tolist() == expected.tolist() and found.shape[1] == 10


def test_custom_criteria_see_one_token_at_a_time() -> None:
    class Recorder(StoppingCriteria):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.seen.append(input_ids[0].tolist())
            return torch.tensor([input_ids[0, -1] == 17])

    model = c64()
    plain, ours = Recorder(), Recorder()
    model.generate(
        torch.tensor([[5]]), max_new_tokens=30, do_sample=False, stopping_criteria=StoppingCriteriaList([plain])
    )
    fast = Speculator(model, oracle(model, depth=8), nodes=64)
    fast.generate(
        torch.tensor([[5]]), max_new_tokens=30, do_sample=False, stopping_criteria=StoppingCriteriaList([ours])
    )
    assert ours.seen == plain.seen and ours.seen[-1][-1] == 17
    plain.seen, ours.seen = [], []
    model = c64(eos=9)  # they are asked about the end token too
    model.generate(
        torch.tensor([[5]]), max_new_tokens=30, pad_token_id=0, stopping_criteria=StoppingCriteriaList([plain])
    )
    fast = Speculator(model, oracle(model))
    fast.generate(
        torch.tensor([[5]]), max_new_tokens=30, pad_token_id=0, stopping_criteria=StoppingCriteriaList([ours])
    )
    assert ours.seen == plain.seen and len(ours.seen) == 4


def test_rows_stopped_by_a_criterion_without_end_tokens_go_on_as_in_generate() -> None:
    class At(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids[:, -1] == 17

    model = c64()
    ids = torch.tensor([[5], [12]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, stopping_criteria=StoppingCriteriaList([At()]), **options)
    for source in (oracle(model), HalfOracle(model)):  # the second guesses for the second row only
        fast, sink = Speculator(model, source), Sink()
        found = fast.generate(ids, stopping_criteria=StoppingCriteriaList([At()]), streamer=sink, **options)
        assert found.tolist() == expected.tolist()
        assert torch.tensor(sink.put_[1:]).T.tolist() == expected[:, 1:].tolist()
        assert fast.report.tokens == 2 * (expected.shape[1] - 1)


class HalfOracle:
    """Right about the second row, silent about the first: the row that stops first is the faster one."""

    name, depth, wants, chain = "half", 4, (), False

    def __init__(self, model: Any) -> None:
        self.model = model

    def check(self, model: Any) -> list[str]:
        return []

    def drafter(self, model: Any, ends: Tensor, sampling: Any = None) -> Any:
        drafter = oracle(self.model).drafter(model, ends)
        whole = drafter.grow

        def half(root: Tensor, budget: Any) -> Any:
            return whole(root, budget._replace(room=budget.room * torch.tensor([0, 1])))

        drafter.grow = half  # type: ignore[method-assign]
        return drafter


def test_a_batch_streams_whole_columns() -> None:
    model = c64(eos=20)
    ids = torch.tensor([[5], [15], [18]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "pad_token_id": 0}
    sink = Sink()
    out = Speculator(model, oracle(model)).generate(ids, do_sample=False, streamer=sink, **options)
    assert sink.put_[0] == [5, 15, 18]
    assert torch.tensor(sink.put_[1:]).T.tolist() == out[:, 1:].tolist() and sink.ended == 1


def test_the_stream_ends_also_when_the_call_fails() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            raise RuntimeError("broken processor")

    model, sink = c64(), Sink()
    with pytest.raises(RuntimeError, match="broken processor"):
        Speculator(model, oracle(model)).generate(
            torch.tensor([[5]]), max_new_tokens=5, streamer=sink, logits_processor=LogitsProcessorList([Broken()])
        )
    assert sink.ended == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam"),
        ({"use_cache": False}, "use_cache"),
        ({"output_attentions": True}, "output_attentions"),
        ({"position_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1]])}, "position_ids"),
        ({"position_ids": torch.tensor([[0, 5, 9]])}, "position_ids"),
        ({"assistant_model": c64()}, "assistant_model"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache": DynamicCache()}, "an empty cache"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "padding_side='left'"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds|not understood"),
    ],
)
def test_what_is_not_exact_is_refused_by_name_before_any_forward(options: dict[str, Any], named: str) -> None:
    model = c64()
    fast = Speculator(model, oracle(model))
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=named):
        fast.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, pad_token_id=0, **options)
    assert not forwards


def test_scores_logits_and_cache_are_those_of_generate(source: Any) -> None:
    """FC-085: one entry a new token; the returned cache carries on in plain generate and here (chat)."""
    model = llama().double()
    ids = torch.randint(3, VOCAB, (1, 9))
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.2}
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = model.generate(ids, **options, **asked)
    fast = Speculator(model, source(model))
    found = fast.generate(ids, **options, **asked)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(found[name]) == len(expected[name]) == fast.report.tokens
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert found.cache.get_seq_length() == expected.cache.get_seq_length() == found.sequences.shape[1] - 1
    more = torch.cat([found.sequences, torch.randint(3, VOCAB, (1, 5))], 1)
    chat = model.generate(more, max_new_tokens=10, do_sample=False).tolist()
    forwards: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("cache") is not None:
            forwards.append(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(note, with_kwargs=True)
    ours = fast.generate(more, cache=found.cache, max_new_tokens=10, do_sample=False)
    assert ours.tolist() == chat
    assert 5 <= forwards[0] < more.shape[1] - 1  # the known tokens were not run again; a tree may have come along
    assert model.generate(more, cache=found.cache, max_new_tokens=10, do_sample=False).tolist() == chat


def test_a_cache_that_does_not_fit_is_refused() -> None:
    """FC-112: never replaced in silence."""
    model = c64()
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
    fast = Speculator(model, oracle(model))
    for ids in (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])):
        with pytest.raises(ValueError, match="cache of 3 tokens"):
            fast.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=4)
    asked = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="output_scores for 2 rows"):
        fast.generate(ids, attention_mask=torch.ones_like(ids), **asked)


def test_several_sequences_of_one_prompt() -> None:
    """num_return_sequences: rows of their own, drawn independently; with top_k=1 all are the greedy text."""
    model = llama().double()
    ids = torch.randint(3, VOCAB, (1, 6))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    fast = Speculator(model, SOURCES["medusa"](model))
    assert fast.generate(ids, top_k=1, **options).tolist() == expected.tolist() * 3
    torch.manual_seed(0)
    assert len({tuple(row) for row in fast.generate(ids, temperature=2.0, **options).tolist()}) == 3


def test_sources_and_targets_that_do_not_fit_are_refused() -> None:
    model = llama()
    with pytest.raises(ValueError, match="hidden_size"):
        Speculator(llama(hidden_size=32), SOURCES["medusa"](model))
    with pytest.raises(
        ValueError, match=r"'prompt-lokup'; known are \['lookahead', 'prompt-lookup', 'token-recycling'\]"
    ):
        Speculator(model, "prompt-lokup")
    with pytest.raises(ValueError, match=r"unknown options \['widht'\]; known here are .*'width'"):
        Speculator(model, SOURCES["medusa"](model), widht=4)
    with pytest.raises(ValueError, match=r"'longest'.*none in this merge"):
        Speculator(model, ["prompt-lookup", "lookahead"], longest=2)
    shaped = HeadsSource(SOURCES["medusa"](model), shape=Shape.of([[0], [1], [2]]))
    with pytest.raises(ValueError, match=r"may fill 2 of nodes=4 here: raise nodes \(in a merge also share\)"):
        Speculator(model, [shaped, "prompt-lookup"], nodes=4)
    with pytest.raises(ValueError, match="made Source"):
        Speculator(model, oracle(model), width=4)
    with pytest.raises(ValueError, match="unknown rule 'guess'"):
        Speculator(model, SOURCES["medusa"](model), rule="guess")
    for kind, why in (("gpt_neo", "counts slots"), ("bloom", "attention biases"), ("mpt", "attention biases")):
        odd = llama()
        odd.config.model_type = kind
        with pytest.raises(ValueError, match=why):
            Speculator(odd, "prompt-lookup")


def test_heads_of_other_weights_warn_and_stay_exact() -> None:
    """FC-067."""
    heads = SOURCES["medusa"](llama(seed=0).double())
    other = llama(seed=1).double()
    fast = Speculator(other, heads)
    assert any("other weights" in note for note in fast.notes)
    ids = torch.randint(3, VOCAB, (1, 8))
    expected = other.generate(ids, max_new_tokens=20, do_sample=False)
    assert fast.generate(ids, max_new_tokens=20, do_sample=False).tolist() == expected.tolist()
    assert "other weights" in str(fast.report)


@pytest.mark.parametrize("spoil", ["all", "one head"])
def test_heads_full_of_nan_change_no_text(spoil: str) -> None:
    model = llama().double()
    heads = SOURCES["medusa"](model)
    with torch.no_grad():
        for p in heads.parameters() if spoil == "all" else heads.blocks[2].parameters():
            p.fill_(float("nan"))
    ids = torch.randint(3, VOCAB, (1, 8))
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert Speculator(model, heads).generate(ids, max_new_tokens=20, do_sample=False).tolist() == expected.tolist()


def test_a_penalty_sees_each_row_without_its_padding() -> None:
    """The padding token is the one a row would say next: counting it in would push it away."""
    model = llama().double()
    alone = torch.randint(3, VOCAB, (1, 4), generator=torch.Generator().manual_seed(1))
    pad = int(model.generate(alone, max_new_tokens=1, do_sample=False)[0, -1])
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1, :5], mask[1, :5], ids[1, 5:] = pad, 0, alone[0]
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "repetition_penalty": 5.0,
        "do_sample": False,
    }
    expected = model.generate(ids, **options)
    assert expected[1, 9] == pad
    assert Speculator(model, SOURCES["medusa"](model)).generate(ids, **options).tolist() == expected.tolist()


def test_depth_is_capped_with_a_notice_and_zero_is_plain_decoding() -> None:
    """FC-125."""
    model = llama().double()
    ids = torch.randint(3, VOCAB, (1, 8))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False).tolist()
    fast = Speculator(model, SOURCES["medusa"](model), depth=9)
    assert fast.depth == 4 and any("depth 9" in note for note in fast.notes)
    plain = Speculator(model, SOURCES["medusa"](model), depth=0)
    assert plain.generate(ids, max_new_tokens=12, do_sample=False).tolist() == expected
    assert plain.report.tokens_per_pass == 1.0


def test_nothing_is_left_on_the_target() -> None:
    """FC-110: plain generation before and after is bit-identical, and no attribute was set."""
    model = llama()
    ids = torch.randint(3, VOCAB, (1, 8))
    before, keys = model(ids).logits, set(vars(model)) | set(vars(model.config))
    Speculator(model, SOURCES["medusa"](model)).generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(model(ids).logits, before)
    assert set(vars(model)) | set(vars(model.config)) == keys


def test_custom_generate_is_the_same_call() -> None:
    model = llama().double()
    fast = Speculator(model, SOURCES["medusa"](model))
    ids = torch.randint(3, VOCAB, (1, 8))
    assert torch.equal(
        model.generate(ids, custom_generate=fast, max_new_tokens=15, do_sample=False),
        model.generate(ids, max_new_tokens=15, do_sample=False),
    )
    with pytest.raises(ValueError, match="another model object"):
        llama().generate(ids, custom_generate=fast, max_new_tokens=15)


def test_two_threads_may_share_one_speculator() -> None:
    model = c64()
    fast = Speculator(model, SOURCES["medusa"](model))
    found: dict[int, list[int]] = {}

    def run(start: int) -> None:
        found[start] = fast.generate(torch.tensor([[start]]), max_new_tokens=30, do_sample=False)[0].tolist()

    threads = [threading.Thread(target=run, args=(start,)) for start in (3, 11, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {start: list(range(start, start + 31)) for start in (3, 11, 24)}
