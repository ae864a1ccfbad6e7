"""Answers of a target on disk: one folder, appended to row by row, that a run may leave and take up at any instant.

    OUT/answers.jsonl     one line an answered prompt: id, messages, temperature, finished, tokens, prompt_digest, and,
                          where there are any, tools and chat_template_kwargs
    OUT/dropped.tsv       one line a prompt whose answer was no use: id, reason, digest of the prompt
    OUT/provenance.json   what made them: target, template, sampling, versions, counts

A line is on the disk before its prompt counts as done, and a line that a kill tore off is cut away. Rows are keyed by
the prompt's id, never by a position; the digest of its turns and tools tells prompts of one id apart.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from headstart.train.conversations import Conversation, Messages, Report, message_hash
from headstart.train.provenance import ANSWERS, PROVENANCE
from headstart.train.sources import read_rows

DROPPED, LOCK = "dropped.tsv", ".lock"
PACKAGES = ("headstart-llm", "torch", "transformers", "tokenizers")


class Asked(NamedTuple):
    """A prompt that waits for its answer."""

    key: str  # names its row
    prompt: Conversation  # system and user turns
    temperature: float  # 0 = greedy
    length: int  # tokens of the whole prompt through the template


class Answer(NamedTuple):
    """What became of one prompt. dropped: why the answer is no use, or "" for a good one."""

    messages: Messages
    finished: bool  # the target ended each of its turns itself
    tokens: int  # tokens it generated over all turns, end tokens included
    dropped: str = ""


Done = Callable[[Sequence[Asked], Sequence[Answer]], None]


class Answerer(Protocol):
    """Who answers: the target in process, or a server."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    max_new_tokens: int
    notes: dict[str, Any]  # told in the provenance; may change from run to run

    def identity(self) -> dict[str, Any]:
        """What answers depend on besides the sampling and the template."""
        ...

    def check(self, prompt: Conversation) -> int:
        """Tokens of a prompt. Raises MaskError where it cannot be answered."""
        ...

    def answer(self, asked: Sequence[Asked], done: Done, more: Callable[[], bool], report: Report, seed: int) -> None:
        """Answers prompts in any order and hands each to `done` once, until `more` says no."""
        ...

    def complete(
        self, prompt: Sequence[int], count: int, *, closer: str, max_new_tokens: int, temperature: float, seed: int
    ) -> list[tuple[str, bool]]:
        """`count` continuations of one raw prompt, up to an end token or the text `closer`: (text, came to an end)."""
        ...


class Store:
    """The output folder, locked: what is done, and rows appended to it."""

    def __init__(self, folder: Path, settings: dict[str, Any], notes: dict[str, Any] | None = None) -> None:
        """`settings` must be those of the answers that are there; `notes` are kept beside them, and may change.

        Raises ValueError if `folder` holds answers that were made otherwise, or while another run writes there.
        """
        self.folder, self.began = folder, time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another run writes into {folder}; wait for it, or give another folder") from error
        try:
            self.record = self._checked(settings) | (notes or {})
            self.spent = float(self.record.get("seconds", 0))  # in earlier runs
            self.record["versions"] = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
            mend(folder / ANSWERS)
            mend(folder / DROPPED)
            lines = (folder / DROPPED).read_text(encoding="utf-8").splitlines()
            left_out = [line.split("\t") for line in lines]
            self.dropped = {key: reason for key, reason, *_ in left_out}
            # key -> digest of the prompt, "" where an earlier release did not write it down
            self.done = {str(row["id"]): str(row.get("prompt_digest", "")) for row in read_rows(folder / ANSWERS)}
            self.done |= {key: more[0] if more else "" for key, _, *more in left_out}
            self._write_record()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._write_record()
        self._lock.release()

    @property
    def kept(self) -> int:
        """Rows in answers.jsonl."""
        return len(self.done) - len(self.dropped)

    def add(self, asked: Iterable[Asked], answers: Iterable[Answer]) -> None:
        """Puts answers on the disk."""
        rows, drops = [], []
        for one, answer in zip(asked, answers, strict=True):
            if one.key in self.done:
                raise AssertionError(f"{one.key} was answered twice")
            digest = self.done[one.key] = message_hash(one.prompt.messages, one.prompt.tools)
            if answer.dropped:
                self.dropped[one.key] = " ".join(answer.dropped.split())
                drops.append(f"{one.key}\t{self.dropped[one.key]}\t{digest}")
                continue
            row: dict[str, Any] = {"id": one.key, "messages": answer.messages, "temperature": one.temperature}
            row |= {"finished": answer.finished, "tokens": answer.tokens, "prompt_digest": digest}
            if one.prompt.tools:
                row["tools"] = one.prompt.tools
            arguments = self.record["template_kwargs"] | (one.prompt.template_kwargs or {})
            if arguments:
                row["chat_template_kwargs"] = arguments
            rows.append(json.dumps(row, ensure_ascii=False))
        append(self.folder / ANSWERS, rows)
        append(self.folder / DROPPED, drops)
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
        self.record["seconds"] = round(self.spent + time.time() - self.began, 2)
        self.record["counts"] = {"answered": self.kept, "dropped": len(self.dropped)}
        draft = self.folder / (PROVENANCE + ".part")
        draft.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.folder / PROVENANCE)


def number(seed: int, *keys: str) -> int:
    """A seed of 56 bits for these keys."""
    return int.from_bytes(hashlib.sha256("\n".join((str(seed), *keys)).encode()).digest()[:7], "big")


def append(path: Path, lines: Iterable[str]) -> None:
    """Adds lines to a file, and returns when they are on the disk."""
    text = "".join(line + "\n" for line in lines)
    if text:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def mend(path: Path, block: int = 1 << 16) -> None:
    """Cuts off what follows the last line end; an absent file becomes an empty one."""
    path.touch()
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - block)
            file.seek(begin)
            at = file.read(end - begin).rfind(b"\n")
            if at >= 0:
                end = begin + at + 1
                break
            end = begin
        file.truncate(end)
