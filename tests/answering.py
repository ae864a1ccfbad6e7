"""Toy targets that answer, and what they have answered: for the tests of distillation."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from headstart.train import distill as distilling
from headstart.train.conversations import Conversation, Report
from headstart.train.sampler import Sampler
from tests.byte_tokenizer import END
from tests.toys import chain, llama

LETTERS = [64 + b for b in b"abcdefghijklmnopqrstuvwxyz"]
NEWLINE = 64 + ord("\n")  # the last token of the generation prompt


def babbler_target() -> Any:
    """T0, its words limited to letters and the end token, so that every answer is valid text."""
    target = llama(num_hidden_layers=2)
    target.generation_config.suppress_tokens = [i for i in range(320) if i not in (*LETTERS, END)]
    return target


def speller(text: bytes, *, then: int = END) -> Any:
    """A target that answers every prompt with `text` (no byte twice) and the token `then`."""
    ids = [NEWLINE, *(64 + byte for byte in text), then]
    return chain(dict(pairwise(ids)), eos=END)


def asks(*texts: str) -> list[Conversation]:
    return [Conversation(f"p{i}", [{"role": "user", "content": text}]) for i, text in enumerate(texts)]


SIX = asks("a", "what is it", "b", "hi there", "say yes or no", "c?")

OF_SAMPLER = ("max_new_tokens", "batch_size", "target_id", "template_kwargs")


def distill(target: Any, tokenizer: Any, prompts: list[Conversation], out: Path, **options: Any) -> Report:
    """Answers in process."""
    own = {key: options.pop(key) for key in OF_SAMPLER if key in options}
    return distilling.distill(Sampler(target, tokenizer, **own), prompts, out, **options)


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    table = {row["id"]: row for row in map(json.loads, lines)}
    assert len(table) == len(lines), "an id twice"
    return table
