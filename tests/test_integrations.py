"""A Speculator inside other people's tools: the lines of the README, and the text they give with and without it.

lm-eval and TRL are no dependencies: their cases run where `pip install lm-eval trl` was run by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TextStreamer, pipeline

from headstart.infer.embedded import load_target
from headstart.infer.speculator import Speculator
from tests.byte_tokenizer import byte_tokenizer
from tests.drafters import oracle
from tests.toys import llama

TEXTS = ["hello there", "a", "Repeat after me: the cat sat on the mat. The cat sat", "1 2 3 4 1 2 3 4 1 2"]
CHAT = [{"role": "user", "content": "hi"}]
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 24}  # a pipeline samples unless told otherwise


class Made(NamedTuple):
    """A target, its tokenizer and a Speculator on it."""

    target: Any
    tokenizer: Any
    fast: Speculator


def toy() -> Made:
    target = llama(max_position_embeddings=512)
    return Made(target, byte_tokenizer(), Speculator(target, oracle(target)))


def embedded() -> Made:
    target, tokenizer = load_target("smollm2", dtype=torch.float32)
    return Made(target, tokenizer, Speculator(target, "prompt-lookup"))


def seeded(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return call(*args, **options)


class Recorder(TextStreamer):
    """Keeps what a streamer would print."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (TEXTS[0], GREEDY | {"return_tensors": True}),
        (TEXTS[0], SAMPLED | {"return_tensors": True}),
        (TEXTS[0], SAMPLED | {"return_full_text": False}),
        (CHAT, SAMPLED),
        (TEXTS, GREEDY | {"return_tensors": True, "batch_size": 4}),
        (TEXTS[0], SAMPLED | {"return_tensors": True, "num_return_sequences": 2, "top_k": 1}),
    ],
    ids=["greedy ids", "sampled ids", "new text", "chat", "left-padded batch", "two answers"],
)
def test_a_pipeline_says_the_same(inputs: Any, options: dict[str, Any]) -> None:
    target, tokenizer, fast = toy()
    plain = seeded(pipeline("text-generation", model=target, tokenizer=tokenizer), inputs, **options)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, custom_generate=fast)
    assert seeded(pipe, inputs, **options) == plain
    assert 0 < fast.report.passes < fast.report.tokens


def test_a_pipeline_takes_it_for_one_call_too() -> None:
    target, tokenizer, fast = toy()
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert pipe(TEXTS[0], custom_generate=fast, **GREEDY) == pipe(TEXTS[0], **GREEDY)
    assert fast.report.tokens > 0


def test_a_pipeline_streams_through_sink() -> None:
    """transformers drops `streamer` beside a callable and hands on what the callable names itself."""
    target, tokenizer, fast = toy()
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer)
    plain, sooner = Recorder(tokenizer), Recorder(tokenizer)
    pipe(TEXTS[0], streamer=plain, **GREEDY)
    pipe(TEXTS[0], custom_generate=fast, sink=sooner, **GREEDY)
    assert sooner.text == plain.text != ""


@pytest.mark.parametrize("make", [toy, pytest.param(embedded, marks=pytest.mark.embedded)])
@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"]
)
def test_lm_eval_says_the_same(make: Callable[[], Made], sampling: dict[str, Any]) -> None:
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    lm = pytest.importorskip("lm_eval.models.huggingface").HFLM
    target, tokenizer, fast = make()

    def answers() -> list[str]:
        """One prompt at a time, with stop strings that cut some of the texts."""
        options = {"until": ["\n\n", "x", "mat"], "max_gen_toks": 32, **sampling}
        asked = [instance("generate_until", {}, (text, options), i) for i, text in enumerate(TEXTS)]
        found: list[str] = seeded(lm(pretrained=target, tokenizer=tokenizer).generate_until, asked, disable_tqdm=True)
        return found

    plain = answers()
    target.generate = partial(target.generate, custom_generate=fast)
    assert answers() == plain
    assert fast.report.tokens > 0


@pytest.fixture
def own_accelerator() -> Iterator[None]:
    """accelerate keeps one state a process; the tests that follow make theirs."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(folder: Path, *, speculates: bool, **options: Any) -> tuple[Made, list[list[int]]]:
    """A toy target after GRPO steps of two prompts, two answers each; and the answers."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    target, tokenizer, fast = toy()
    if speculates:
        target.generate = partial(target.generate, custom_generate=fast)
    answers: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        answers.extend(list(ids) for ids in completion_ids)
        return [float(place) for place in range(len(completion_ids))]

    config = trl.GRPOConfig(
        folder,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=24,
        bf16=False,  # on by default, and rounding decides near ties
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        **options,
    )
    data = datasets.Dataset.from_dict({"prompt": TEXTS[:2]})
    trl.GRPOTrainer(target, reward, config, data, processing_class=tokenizer).train()
    return Made(target, tokenizer, fast), answers


@pytest.mark.usefixtures("own_accelerator")
def test_trl_gets_the_same_answers(tmp_path: Path) -> None:
    """With one token to choose from: rows of a batch draw in another order than in plain decoding."""
    _, plain = trained(tmp_path, speculates=False, max_steps=1, top_k=1)
    made, sooner = trained(tmp_path, speculates=True, max_steps=1, top_k=1)
    assert sooner == plain
    assert 0 < made.fast.report.passes < made.fast.report.tokens == sum(map(len, sooner))


@pytest.mark.usefixtures("own_accelerator")
def test_trl_trains_the_target_under_the_guesses(tmp_path: Path) -> None:
    """The guesses are those of a target that is no more; what is kept of them is up to the weights of the moment."""
    (target, tokenizer, fast), answers = trained(tmp_path, speculates=True, max_steps=2)
    assert fast.report.tokens == sum(map(len, answers[4:]))
    ids, options = tokenizer(TEXTS[0], return_tensors="pt"), GREEDY | {"custom_generate": None}
    sooner, plain = target.generate(**ids, **GREEDY), target.generate(**ids, **options)
    assert sooner.tolist() == plain.tolist() != toy().target.generate(**ids, **GREEDY).tolist()
