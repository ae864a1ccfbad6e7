"""Answers from the target itself, in process, batched and resumable: on-policy training data for its heads.

`out` is a folder: answers.jsonl holds one line an answered prompt, dropped.tsv one line a prompt whose answer was no
use, provenance.json what made them. Rows are keyed by the prompt's id, never by a position, so a run may be killed at
any time and taken up again with its prompts in another order, with fewer or with more of them.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from headstart.train.conversations import Conversation, Messages, Report, message_hash, read_rows
from headstart.train.masking import MaskError, prompt_ids, render

ANSWERS, DROPPED, PROVENANCE = "answers.jsonl", "dropped.tsv", "provenance.json"
REPLACEMENT = "\ufffd"
Progress = Callable[[int, int, int], None]  # prompts done, prompts in all, answer tokens of this run


class Answer(NamedTuple):
    """What became of one prompt. dropped: why the answer is no use, or "" for a good one."""

    messages: Messages
    finished: bool  # the target ended each of its turns itself
    tokens: int  # tokens it generated over all turns, end tokens included
    dropped: str = ""


def distill(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Conversation],
    out: str | Path,
    *,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    temperatures: Sequence[float] = (0.0, 0.8),
    seed: int = 0,
    seconds: float | None = None,
    drop_loops: bool = False,
    target_id: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Let `target` answer `prompts` (system and user turns) into the folder `out`; what is answered there stays.

    temperatures: each prompt gets one of them, 0 being greedy; sampling cuts nothing off the tail (no top-k, no top-p).
    seconds: start no further batch after this time. drop_loops: leave out answers that end in a repeated phrase.
    A prompt with several user turns is answered turn by turn; it ends early where an answer reaches max_new_tokens.
    Raises ValueError if `out` holds answers that were made otherwise.
    """
    if max_new_tokens < 1 or batch_size < 1 or not temperatures or min(temperatures) < 0:
        given = f"max_new_tokens {max_new_tokens}, batch_size {batch_size}, temperatures {list(temperatures)}"
        raise ValueError(f"{given}; expected at least one token, one row and one temperature of 0 or more")
    sampler = _Sampler(target, tokenizer, max_new_tokens, dict(template_kwargs or {}))
    sampling = {"max_new_tokens": max_new_tokens, "temperatures": list(temperatures), "top_k": 0, "top_p": 1.0}
    made = sampler.identity(target_id) | {"sampling": {**sampling, "seed": seed, "drop_loops": drop_loops}}
    store, report = _Store(Path(out), made), Report()
    asked = _keyed(prompts, report)
    todo = {key: messages for key, messages in asked.items() if key not in store.done}
    done, tokens, began = len(asked) - len(todo), 0, time.monotonic()
    try:
        for temperature, keys in _batches(todo, sampler, batch_size, temperatures, seed, report):
            if seconds is not None and time.monotonic() - began >= seconds:
                break
            with torch.random.fork_rng():
                torch.manual_seed(_number(seed, *keys))
                answers = sampler.answer([todo[key] for key in keys], temperature)
            answers = [_without_loops(answer, tokenizer) for answer in answers] if drop_loops else answers
            store.add(keys, answers, temperature)
            done, tokens = done + len(keys), tokens + sum(answer.tokens for answer in answers)
            if progress is not None:
                progress(done, len(asked), tokens)
    finally:
        store.close()
    for key, reason in store.dropped.items():
        report.skip(reason, key)
    report.kept = len(store.done) - len(store.dropped)
    return report


def temperature_of(key: str, temperatures: Sequence[float], seed: int) -> float:
    """The temperature for a prompt: a function of (seed, id), so neither order nor resuming changes it."""
    return temperatures[_number(seed, key) % len(temperatures)]


def repeats(items: Sequence[Any], *, times: int = 4, shortest: int = 24, longest: int = 64) -> bool:
    """Whether the tail is a phrase of up to `longest` items over and over: `times` or more, over `shortest` items."""
    for period in range(1, min(longest, len(items) // times) + 1):
        span = max(period * times, shortest)
        if span <= len(items) and all(items[-i] == items[-i - period] for i in range(1, span - period + 1)):
            return True
    return False


class _Sampler:
    """Batched answers through plain `generate`: rows padded on the left, each answer cut at its first end token."""

    def __init__(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, template: dict[str, Any]
    ) -> None:
        if target.training:
            raise ValueError("the target is in training mode; call target.eval() first")
        self.target, self.tokenizer, self.length, self.template = target, tokenizer, length, template
        config = target.generation_config
        own = config.eos_token_id if config is not None else None
        self.ends = {i for i in (*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id) if i is not None}
        self.room = getattr(target.config.get_text_config(), "max_position_embeddings", math.inf)

    def identity(self, target_id: str | None) -> dict[str, Any]:
        """What an answer depends on besides the sampling: target, chat template and its arguments."""
        return {
            "target": target_id or Path(self.target.config._name_or_path).name,
            "template_sha256": hashlib.sha256(self.tokenizer.get_chat_template().encode()).hexdigest(),
            "template_kwargs": self.template,
        }

    def prompt(self, messages: Messages) -> list[int]:
        """Prompt ids. Raises MaskError where the template refuses or an answer would pass the last position."""
        ids = prompt_ids(messages, self.tokenizer, template_kwargs=self.template)
        if len(ids) + self.length > self.room:
            raise MaskError(f"no room for an answer: the target has {self.room} positions")
        return ids

    def answer(self, prompts: Sequence[Messages], temperature: float) -> list[Answer]:
        """Answer each prompt turn by turn; a row leaves the batch once it is cut off or dropped."""
        answers = [Answer([], True, 0) for _ in prompts]
        waiting = [list(messages) for messages in prompts]
        active = list(range(len(prompts)))
        while active:
            ids = {}
            for row in active:
                head = next(i for i, m in enumerate(waiting[row]) if m["role"] == "user") + 1
                answers[row] = answers[row]._replace(messages=answers[row].messages + waiting[row][:head])
                waiting[row] = waiting[row][head:]
                try:
                    ids[row] = self.prompt(answers[row].messages)
                except MaskError as error:
                    answers[row] = answers[row]._replace(dropped=str(error))
            for row, new in zip(ids, self._generate(list(ids.values()), temperature), strict=True):
                answers[row] = self._extend(answers[row], ids[row], new)
            active = [r for r in ids if waiting[r] and answers[r].finished and not answers[r].dropped]
        return answers

    def _generate(self, prompts: Sequence[list[int]], temperature: float) -> list[list[int]]:
        """Generated ids of each prompt, the first end token included, nothing after it."""
        if not prompts:
            return []
        width = max(map(len, prompts))
        pad = next((i for i in (self.tokenizer.pad_token_id, *sorted(self.ends)) if i is not None), 0)
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.target.device)  # [B, P]
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=ids.device)
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        ends = sorted(self.ends) or None
        config = GenerationConfig(
            max_new_tokens=self.length, do_sample=temperature > 0, pad_token_id=pad, eos_token_id=ends, **sampling
        )
        with torch.inference_mode():
            full = self.target.generate(ids, attention_mask=mask, generation_config=config)  # type: ignore[operator]
        rows: list[list[int]] = full[:, width:].tolist()  # [B, n], padded after the end token
        return [row[: next((i + 1 for i, token in enumerate(row) if token in self.ends), len(row))] for row in rows]

    def _extend(self, answer: Answer, prompt: list[int], new: list[int]) -> Answer:
        """Append what was generated. It is dropped if it does not come back to the same ids through the template."""
        finished = new[-1] in self.ends
        text = self._decode(new[:-1] if finished else new)
        while not finished and len(new) > 1 and text.endswith(REPLACEMENT):  # cut off inside a character
            new = new[:-1]
            text = self._decode(new)
        messages = [*answer.messages, {"role": "assistant", "content": text}]
        dropped = "" if text.strip() else "the answer is empty"
        if not dropped and not self._comes_back(messages, prompt + new):
            dropped = "the answer's text does not tokenize to the generated ids"
        return Answer(messages, finished, answer.tokens + len(new), dropped)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _comes_back(self, messages: Messages, ids: list[int]) -> bool:
        try:
            return render(messages, self.tokenizer, template_kwargs=self.template).ids[: len(ids)] == ids
        except MaskError:
            return False


class _Store:
    """The output folder: what is done, and rows appended to it. A line that a kill tore off is cut away."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.began = folder, time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self.record = self._checked(settings)
        _mend(folder / ANSWERS)
        _mend(folder / DROPPED)
        lines = (folder / DROPPED).read_text(encoding="utf-8").splitlines()
        self.dropped = dict(line.split("\t", 1) for line in lines)
        self.done = {str(row["id"]) for row in read_rows(folder / ANSWERS)} | self.dropped.keys()
        self._write_record()

    def add(self, keys: Iterable[str], answers: Iterable[Answer], temperature: float) -> None:
        rows, drops = [], []
        for key, answer in zip(keys, answers, strict=True):
            self.done.add(key)
            if answer.dropped:
                self.dropped[key] = " ".join(answer.dropped.split())
                drops.append(f"{key}\t{self.dropped[key]}")
                continue
            row = {"id": key, "messages": answer.messages, "temperature": temperature}
            rows.append(json.dumps(row | {"finished": answer.finished, "tokens": answer.tokens}, ensure_ascii=False))
        for name, lines in ((ANSWERS, rows), (DROPPED, drops)):
            with (self.folder / name).open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(line + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        self._write_record()

    def close(self) -> None:
        self.record["seconds"] = round(self.record.get("seconds", 0) + time.time() - self.began, 1)
        self._write_record()

    def _checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / PROVENANCE
        if not path.exists() and not (self.folder / ANSWERS).exists():
            return dict(settings)
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        other = [key for key, value in settings.items() if before.get(key) != value]
        if other:
            told = "; ".join(f"{key}: {before.get(key)} there, {settings[key]} asked for" for key in other)
            raise ValueError(f"{self.folder} holds other answers ({told}); give a new folder or the same settings")
        return before

    def _write_record(self) -> None:
        self.record["versions"] = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
        self.record["versions"]["python"] = platform.python_version()
        self.record["counts"] = {"answered": len(self.done) - len(self.dropped), "dropped": len(self.dropped)}
        draft = self.folder / (PROVENANCE + ".part")
        draft.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.folder / PROVENANCE)


def _mend(path: Path) -> None:
    """Cut off what follows the last line end; an absent file becomes an empty one."""
    path.touch()
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)


def _keyed(prompts: Sequence[Conversation], report: Report) -> dict[str, Messages]:
    """Prompts by key: the id, with a hash behind it where one id names several; a repeated prompt counts once."""
    named: dict[str, dict[str, Messages]] = {}
    for prompt in prompts:
        if {m["role"] for m in prompt.messages} - {"system", "user"} or prompt.messages[-1]["role"] != "user":
            raise ValueError(f"prompt {prompt.id}: expected system and user turns, a user turn last")
        same = named.setdefault(" ".join(prompt.id.split()), {})
        if message_hash(prompt.messages) in same:
            report.change("the same prompt twice, answered once", prompt.id)
        same[message_hash(prompt.messages)] = prompt.messages
    return {
        (key if len(same) == 1 else f"{key}#{digest}"): messages
        for key, same in named.items()
        for digest, messages in same.items()
    }


def _batches(
    todo: Mapping[str, Messages], sampler: _Sampler, size: int, temperatures: Sequence[float], seed: int, report: Report
) -> list[tuple[float, list[str]]]:
    """(temperature, keys) of batches of like prompt length and turn count, mixed: a run cut short is a fair sample."""
    groups: dict[tuple[float, int], list[tuple[int, str]]] = {}
    for key, messages in todo.items():
        try:
            length = len(sampler.prompt(messages))
        except MaskError as error:
            report.skip(str(error), key)
            continue
        groups.setdefault((temperature_of(key, temperatures, seed), len(messages)), []).append((length, key))
    batches = []
    for (temperature, _), group in groups.items():
        keys = [key for _, key in sorted(group)]
        batches += [(temperature, keys[at : at + size]) for at in range(0, len(keys), size)]
    return sorted(batches, key=lambda batch: _number(seed, *batch[1]))


def _without_loops(answer: Answer, tokenizer: PreTrainedTokenizerBase) -> Answer:
    last = tokenizer(answer.messages[-1]["content"], add_special_tokens=False)["input_ids"]
    return answer._replace(dropped="the answer ends in a loop") if not answer.dropped and repeats(last) else answer


def _number(seed: int, *keys: str) -> int:
    return int.from_bytes(hashlib.sha256("\n".join((str(seed), *keys)).encode()).digest()[:7], "big")
