"""Answers in process: plain `generate` on batches of prompts of like length, padded on the left.

Legend: B rows, P prompt tokens, n new tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.tie import Tie, fingerprint
from headstart.train.answers import Answer, Asked, Done, number
from headstart.train.conversations import Conversation, Messages, Report
from headstart.train.masking import MaskError, prompt_ids, render

REPLACEMENT = "\ufffd"
# `generate` takes what is left out from the target's own config
OPEN = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


class Sampler:
    """Answers prompts turn by turn, each answer cut at its first end token.

    Sampling cuts nothing off the tail (OPEN), also where the target's generation config would. A batch is seeded by its
    prompts, so neither order nor resuming changes what is drawn, and the global generator is left alone.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = 256,
        batch_size: int = 32,
        target_id: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if target.training:
            raise ValueError("the target is in training mode; call target.eval() first")
        if max_new_tokens < 1 or batch_size < 1:
            given = f"max_new_tokens {max_new_tokens}, batch_size {batch_size}"
            raise ValueError(f"{given}; expected at least one token and one row")
        self.target, self.tokenizer, self.template_kwargs = target, tokenizer, dict(template_kwargs or {})
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.target_id = target_id or Path(target.config._name_or_path).name
        config = target.generation_config
        own = config.eos_token_id if config is not None else None
        self.ends = {i for i in (*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id) if i is not None}
        self.room = getattr(target.config.get_text_config(), "max_position_embeddings", math.inf)
        self.notes: dict[str, Any] = {"dtype": str(target.dtype).removeprefix("torch."), "batch_size": batch_size}

    def identity(self) -> dict[str, Any]:
        """What the answers depend on besides the sampling and the template."""
        return {
            "target": self.target_id,
            "revision": getattr(self.target.config, "_commit_hash", None),
            "fingerprint": fingerprint(Tie.of(self.target)),
            "answered": "in process",
        }

    def check(self, prompt: Conversation) -> int:
        """Tokens of a prompt. Raises MaskError where the template refuses it or an answer would pass the last
        position."""
        return len(self._prompt(prompt, prompt.messages))

    def answer(self, asked: Sequence[Asked], done: Done, more: Callable[[], bool], report: Report, seed: int) -> None:
        """Answers prompts batch by batch and hands each batch to `done`, until `more` says no."""
        for batch in batches(asked, self.batch_size, seed):
            if not more():
                return
            with torch.random.fork_rng():
                torch.manual_seed(number(seed, *(one.key for one in batch)))
                answers = self._answer([one.prompt for one in batch], batch[0].temperature)
            done(batch, answers)

    def complete(
        self, prompt: Sequence[int], count: int, *, closer: str, max_new_tokens: int, temperature: float, seed: int
    ) -> list[tuple[str, bool]]:
        """`count` continuations of one prompt, up to an end token or the text `closer`: (text, came to an end)."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            stops = self.tokenizer(closer, add_special_tokens=False)["input_ids"] if closer else []
            ends = self.ends | (set(stops) if len(stops) == 1 else set())
            rows = self._generate([list(prompt)] * count, temperature, max_new_tokens, ends)
        found = []
        for row in rows:
            finished = row[-1] in ends
            text = str(self.tokenizer.decode(row[:-1] if finished else row, clean_up_tokenization_spaces=False))
            found.append((text.split(closer)[0], finished or closer in text) if closer else (text, finished))
        return found

    def _prompt(self, prompt: Conversation, messages: Messages) -> list[int]:
        arguments = self.template_kwargs | (prompt.template_kwargs or {})
        ids = prompt_ids(messages, self.tokenizer, template_kwargs=arguments, tools=prompt.tools)
        if len(ids) + self.max_new_tokens > self.room:
            raise MaskError(f"no room for an answer: the target has {self.room} positions")
        return ids

    def _answer(self, prompts: Sequence[Conversation], temperature: float) -> list[Answer]:
        """Answers each prompt turn by turn; a row leaves the batch once it is cut off or dropped."""
        answers = [Answer([], True, 0) for _ in prompts]
        waiting = [list(prompt.messages) for prompt in prompts]
        active = list(range(len(prompts)))
        while active:
            ids = {}
            for row in active:
                head = next(i for i, m in enumerate(waiting[row]) if m["role"] == "user") + 1
                answers[row] = answers[row]._replace(messages=answers[row].messages + waiting[row][:head])
                waiting[row] = waiting[row][head:]
                try:
                    ids[row] = self._prompt(prompts[row], answers[row].messages)
                except MaskError as error:
                    answers[row] = answers[row]._replace(dropped=str(error))
            new = self._generate(list(ids.values()), temperature, self.max_new_tokens, self.ends)
            for row, tokens in zip(ids, new, strict=True):
                answers[row] = self._extend(prompts[row], answers[row], ids[row], tokens)
            active = [r for r in ids if waiting[r] and answers[r].finished and not answers[r].dropped]
        return answers

    def _generate(
        self, prompts: Sequence[list[int]], temperature: float, length: int, ends: set[int]
    ) -> list[list[int]]:
        """Generated ids of each prompt, the first end token included, nothing after it."""
        if not prompts:
            return []
        width = max(map(len, prompts))
        pad = next((i for i in (self.tokenizer.pad_token_id, *sorted(self.ends)) if i is not None), 0)
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.target.device)  # [B, P]
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=ids.device)
        sampling: dict[str, Any] = {"temperature": temperature, **OPEN} if temperature else {}
        if temperature and getattr(self.target.generation_config, "min_p", None):
            sampling["min_p"] = 0.0  # not where it need not be: it sorts the vocabulary whatever it is
        config = GenerationConfig(
            max_new_tokens=length,
            do_sample=temperature > 0,
            pad_token_id=pad,
            eos_token_id=sorted(ends) or None,
            **sampling,
        )
        with torch.inference_mode():
            full = self.target.generate(ids, attention_mask=mask, generation_config=config)  # type: ignore[operator]
        rows: list[list[int]] = full[:, width:].tolist()  # [B, n], padded after the end token
        return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]

    def _extend(self, prompt: Conversation, answer: Answer, ids: list[int], new: list[int]) -> Answer:
        """Append what was generated. It is dropped if it does not come back to the same ids through the template."""
        finished = new[-1] in self.ends
        text = self._decode(new[:-1] if finished else new)
        while not finished and len(new) > 1 and text.endswith(REPLACEMENT):  # cut off inside a character
            new = new[:-1]
            text = self._decode(new)
        messages = [*answer.messages, {"role": "assistant", "content": text}]
        dropped = "" if text.strip() else "the answer is empty"
        if not dropped and not self._comes_back(prompt, messages, ids + new):
            dropped = "the answer's text does not tokenize to the generated ids"
        return Answer(messages, finished, answer.tokens + len(new), dropped)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _comes_back(self, prompt: Conversation, messages: Messages, ids: list[int]) -> bool:
        arguments = self.template_kwargs | (prompt.template_kwargs or {})
        try:
            row = render(messages, self.tokenizer, template_kwargs=arguments, tools=prompt.tools)
        except MaskError:
            return False
        return row.ids[: len(ids)] == ids


def batches(asked: Sequence[Asked], size: int, seed: int) -> list[list[Asked]]:
    """Batches of one temperature and turn count and of like prompt length, mixed: a run cut short is a fair sample."""
    groups: dict[tuple[float, int], list[Asked]] = {}
    for one in asked:
        groups.setdefault((one.temperature, len(one.prompt.messages)), []).append(one)
    made = []
    for group in groups.values():
        ordered = sorted(group, key=lambda one: (one.length, one.key))
        made += [ordered[at : at + size] for at in range(0, len(ordered), size)]
    return sorted(made, key=lambda batch: number(seed, *(one.key for one in batch)))
