"""User turns that a target writes itself: what is kept, what is left out and why, and that a killed run goes on."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headstart.train.answers import Answer, Asked, Done
from headstart.train.conversations import Conversation, load_conversations
from headstart.train.distill import distill_self
from headstart.train.masking import MaskError, encode
from headstart.train.sampler import Sampler
from headstart.train.selfplay import DRY, UserTurns, repeats
from headstart.train.template import Chat, user_prefix
from tests.answering import babbler_target, rows
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer

ALPHABET = "".join(map(chr, range(100)))
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def babbler() -> Any:
    return babbler_target()


class Scripted:
    """Says a list of user turns, round by round, and answers every prompt with "yes"."""

    template_kwargs: dict[str, Any] = {}  # noqa: RUF012
    max_new_tokens = 8
    notes: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, *rounds: Sequence[tuple[str, bool] | str], template: str | None = None) -> None:
        self.tokenizer = byte_tokenizer(template=template)
        self.rounds = [[turn if isinstance(turn, tuple) else (turn, True) for turn in turns] for turns in rounds]
        self.asked: list[dict[str, Any]] = []
        self.seeds: list[int] = []

    def identity(self) -> dict[str, Any]:
        return {"target": "scripted"}

    def check(self, prompt: Conversation) -> int:
        if len(prompt.messages[0]["content"]) > 300:
            raise MaskError("no room for an answer")
        return 1

    def answer(self, asked: Sequence[Asked], done: Done, more: Any, report: Any, seed: int) -> None:
        for one in asked:
            done([one], [Answer([*one.prompt.messages, {"role": "assistant", "content": "yes"}], True, 1)])

    def complete(self, prompt: Sequence[int], count: int, *, seed: int, **how: Any) -> list[tuple[str, bool]]:
        self.asked.append({"prompt": self.tokenizer.decode(prompt), "count": count, **how})
        self.seeds.append(seed)
        return self.rounds.pop(0)


def test_every_filter_is_counted_and_named(tmp_path: Path) -> None:
    first = [
        "What is the capital of France?",
        "  what is the capital of FRANCE  ",  # the same but for case, punctuation and space
        "Why?",
        "?!?!?!?!?!?!?!?!?!?!?!",
        ("Tell me about the long and winding", False),
        "Tell me <|turn|> about it all",
        "Tell me about caf\ufffd please",
        "say it again and again: " + "so good " * 8,
        "a b c a b a c b a c a b c b a b",
        "x " + "y" * 300,
        "How do trees grow in winter?",
    ]
    second = ["What is the capital of France?", "Where do rivers begin?"]
    scripted = Scripted(first, second)
    report = distill_self(scripted, 3, tmp_path)
    assert report.kept == 3
    assert [row["messages"][0]["content"] for row in rows(tmp_path).values()] == [first[0], first[-1], second[1]]
    assert report.skipped == {
        "user turn: said before": ["0.1", "1.0"],
        "user turn: shorter than 16 characters": ["0.2", "0.3"],
        "user turn: no end within 128 tokens": ["0.4"],
        "user turn: a special token or half a character in it": ["0.5", "0.6"],
        "user turn: repeats itself": ["0.7", "0.8", "0.9"],
    }
    assert scripted.asked[0] == {
        "prompt": "<|turn|>user\n",
        "count": 32,
        "closer": "</s>",
        "max_new_tokens": 128,
        "temperature": 1.0,
    }
    assert len(set(scripted.seeds)) == 2


def test_a_turn_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    words = " ".join(map(str, range(1000, 1080)))
    report = distill_self(Scripted([words, "How do trees grow?"]), 1, tmp_path)
    assert report.skipped == {"user turn: no room for an answer": ["0.0"]}


def test_rounds_without_a_turn_of_use_end_the_run(tmp_path: Path) -> None:
    scripted = Scripted(*[["no"]] * (DRY + 1))
    with pytest.raises(ValueError, match=rf"{DRY} rounds .* \({DRY} shorter than 16 characters\)"):
        distill_self(scripted, 1, tmp_path)
    assert len(scripted.rounds) == 1


def test_answers_of_no_use_end_the_run(tmp_path: Path) -> None:
    class Mute(Scripted):
        def answer(self, asked: Sequence[Asked], done: Done, more: Any, report: Any, seed: int) -> None:
            for one in asked:
                done([one], [Answer(one.prompt.messages, True, 1, "the answer is empty")])

    mute = Mute(*[[f"What is the number {i} about?", f"Why is {i} not a letter?"] for i in range(30)])
    with pytest.raises(ValueError, match=r"\d+ answers in a row .* empty\. Look at .*dropped\.tsv; prompts"):
        distill_self(mute, 3, tmp_path, turns=UserTurns(batch=2))
    dropped = (tmp_path / "dropped.tsv").read_text().count("\n")
    assert 2 * DRY <= dropped < 2 * DRY + 3


@pytest.mark.parametrize(
    ("template", "prefix", "closer"),
    [
        (TEMPLATE, "<|turn|>user\n", "</s>"),
        ("{{ '<|turn|>system\nbe kind</s>\n' }}" + TEMPLATE, "<|turn|>system\nbe kind</s>\n<|turn|>user\n", "</s>"),
        (MISTRAL, "<s>[INST] ", "[/INST]"),
        (TEMPLATE.replace("eos_token + ", ""), "<|turn|>user\n", "<|turn|>"),
    ],
)
def test_where_a_user_begins_and_ends(template: str, prefix: str, closer: str) -> None:
    tokenizer = byte_tokenizer(template=template)
    ids, found = user_prefix(Chat(tokenizer))
    assert (tokenizer.decode(ids), found) == (prefix, closer)


def test_the_target_writes_and_answers_until_there_are_enough(babbler: Any, tmp_path: Path) -> None:
    how = UserTurns(max_tokens=40, batch=8)
    sampler = Sampler(babbler, byte_tokenizer(), max_new_tokens=8, batch_size=4)
    shown: list[int] = []
    report = distill_self(sampler, 10, tmp_path, turns=how, progress=lambda done, total, tokens: shown.append(done))
    table = rows(tmp_path)
    assert shown == sorted(shown)
    assert shown[-1] == 10
    assert report.kept == len(table) == 10
    turns = [row["messages"][0]["content"] for row in table.values()]
    assert len(set(turns)) == 10
    assert all(16 <= len(turn) <= 40 and turn.isalpha() for turn in turns)
    assert {row["temperature"] for row in table.values()} == {0.0, 0.8}
    lines = (tmp_path / "selfplay/rounds.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    refused = sum(len(names) for row in rounds for names in row["refused"].values())
    assert refused + sum(len(row["kept"]) for row in rounds) == 8 * len(rounds)
    told = [names for reason, names in report.skipped.items() if reason.startswith("user turn: ")]
    assert sum(map(len, told)) == refused > 0
    conversations, _ = load_conversations([tmp_path])  # rounds.jsonl is no training data
    assert encode(conversations, sampler.tokenizer)[1].kept == 10
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert record["user_turns"] == {"temperature": 1.0, "max_tokens": 40, "shortest": 16, "batch": 8}


def test_a_killed_run_goes_on(babbler: Any, tmp_path: Path) -> None:
    how = UserTurns(max_tokens=40, batch=8)
    killed = tmp_path / "killed"

    def progress(done: int, total: int, tokens: int) -> None:
        assert total == 6
        if done == 3:
            shutil.copytree(tmp_path / "run", killed)  # what a kill at this moment leaves

    def sampler() -> Sampler:
        return Sampler(babbler, byte_tokenizer(), max_new_tokens=8, batch_size=1)

    distill_self(sampler(), 6, tmp_path / "run", turns=how, progress=progress)
    with (killed / "selfplay/rounds.jsonl").open("a") as file:
        file.write('{"round": 9, "kept": ["tor')  # a line that was torn off
    first = (killed / "answers.jsonl").read_bytes()
    assert distill_self(sampler(), 6, killed, turns=how).kept == 6
    assert (killed / "answers.jsonl").read_bytes().startswith(first)
    assert rows(killed) == rows(tmp_path / "run")
    with pytest.raises(ValueError, match="user_turns"):
        distill_self(sampler(), 6, killed)


def test_more_are_added_to_a_finished_folder(babbler: Any, tmp_path: Path) -> None:
    how = UserTurns(max_tokens=40, batch=8)
    sampler = Sampler(babbler, byte_tokenizer(), max_new_tokens=8, batch_size=4)
    distill_self(sampler, 3, tmp_path, turns=how)
    before = (tmp_path / "answers.jsonl").read_bytes()
    assert distill_self(sampler, 3, tmp_path, turns=how).kept == 3
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert distill_self(sampler, 5, tmp_path, turns=how).kept == 5
    assert (tmp_path / "answers.jsonl").read_bytes().startswith(before)


def test_the_time_limit_ends_the_run(tmp_path: Path) -> None:
    assert distill_self(Scripted(), 3, tmp_path, seconds=0).kept == 0


def test_senseless_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least one"):
        distill_self(Scripted(), 0, tmp_path)
    with pytest.raises(ValueError, match="a temperature above 0"):
        distill_self(Scripted(), 1, tmp_path, turns=UserTurns(temperature=0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x" * 24, True),
        ("x" * 23, False),
        ("abc" * 8, True),
        ("abc" * 7, False),
        ("start " + "ab" * 12, True),
        ("ab" * 12 + "!", False),
        ("", False),
        (ALPHABET[:64] * 4, True),
        (ALPHABET[:65] * 4, False),
    ],
)
def test_repeats(text: str, found: bool) -> None:
    assert repeats(text) == found
