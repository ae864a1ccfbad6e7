"""What a run reads before it trains: prompts to evaluate on, and a word on those that are no use."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.train.prepare import make_heads, read_prompts
from headstart.train.recipe import Recipe
from tests.byte_tokenizer import byte_tokenizer

USER = {"role": "user", "content": "hi"}
ROWS: dict[str, dict[str, Any]] = {
    "good": {"messages": [USER]},
    "two turns": {"messages": [USER, {"role": "assistant", "content": "yo"}, USER]},
    "long": {"prompt": "x" * 230},
    "refused": {"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER]},
    "empty": {"messages": []},
}


def read(folder: Path, *names: str) -> tuple[list[list[int]], str]:
    path, told = folder / "held.jsonl", list[str]()
    path.write_text("".join(json.dumps({"id": name, **ROWS[name]}) + "\n" for name in names))
    data = {"train": ["rows.jsonl"], "heldout": [str(path)]}
    recipe = Recipe.model_validate({"target": "toy", "out": "out", "data": data, "evaluate": {"max_new_tokens": 16}})
    tracker: Any = SimpleNamespace(say=told.append)
    prompts = read_prompts(recipe, 256, byte_tokenizer(strict=True), tracker)
    return [prompt.tolist() for prompt in prompts], "\n".join(told)


def test_prompts_that_cannot_be_decoded_are_skipped_and_named(tmp_path: Path) -> None:
    """A prompt without room would be decoded plainly, and count as one the heads are bad at."""
    prompts, told = read(tmp_path, *ROWS)
    assert len(prompts) == 2 and prompts[0] == prompts[1]
    assert "2 kept, 3 skipped" in told
    assert "no room for 16 tokens: the target has 256 positions (long)" in told
    assert "roles must alternate" in told and "(refused)" in told and "no turns (empty)" in told


def test_asking_for_evaluation_without_a_prompt_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.heldout has no prompt to evaluate on.*\n0 kept, 2 skipped"):
        read(tmp_path, "long", "empty")


def test_a_target_whose_logits_are_not_its_output_layers_is_refused_before_the_training() -> None:
    """Between the last hidden state and the output of this one is another layer: heads would learn another law."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("modernbert-decoder", num_attention_heads=4, initializer_range=0.3, **sizes)
    target = AutoModelForCausalLM.from_config(config).eval()
    recipe = Recipe.model_validate({"target": "toy", "out": "out", "data": {"train": ["rows.jsonl"]}})
    with pytest.raises(ValueError, match="applied to its last hidden state does not give its logits"):
        make_heads(recipe, target, [], SimpleNamespace(say=print))  # type: ignore[arg-type]
