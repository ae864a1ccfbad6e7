"""Answers in process, turn by turn, under the whole law."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headstart.train.conversations import Conversation
from headstart.train.masking import prompt_ids
from headstart.train.sampler import Sampler
from tests.answering import SIX, asks, babbler_target, distill, rows, speller
from tests.byte_tokenizer import END, byte_tokenizer
from tests.toys import chain, llama


@pytest.fixture(scope="module")
def babbler() -> Any:
    return babbler_target()


def test_sampling_is_from_the_whole_law(tmp_path: Path) -> None:
    target = chain({}, eos=END)  # says every token alike
    printable = range(64 + 33, 64 + 127)
    target.generation_config.update(top_k=5, top_p=0.2, suppress_tokens=[i for i in range(320) if i not in printable])
    given = []
    spied = _spied(target, lambda ids, generation_config, **_: given.append(generation_config))
    distill(spied, byte_tokenizer(), asks(*map(str, range(400))), tmp_path, max_new_tokens=1, temperatures=[0.7])
    assert len({row["messages"][-1]["content"] for row in rows(tmp_path).values()}) > 85  # 94 in all; 400 draws see 93
    assert {config.temperature for config in given} == {0.7}


@pytest.mark.parametrize(
    "cut",
    [{"min_p": 0.9}, {"typical_p": 0.1}, {"epsilon_cutoff": 0.3}, {"eta_cutoff": 0.3}, {"top_k": 1, "top_p": 0.1}],
)
def test_the_targets_own_config_cuts_nothing_off(cut: dict[str, Any]) -> None:
    def drawn(**config: Any) -> list[tuple[str, bool]]:
        target = llama(num_hidden_layers=1, initializer_range=0.02)
        target.generation_config.update(**config)
        sampler = Sampler(target, byte_tokenizer())
        return sampler.complete([70, 71], 64, closer="", max_new_tokens=1, temperature=1.0, seed=0)

    assert drawn(**cut) == drawn()


def test_several_user_turns_are_answered_in_turn(tmp_path: Path) -> None:
    system = {"role": "system", "content": "S"}
    asked = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    prompts = [Conversation("m", [system, *asked]), *asks("three")]
    distill(speller(b"yo"), byte_tokenizer(), prompts, tmp_path, max_new_tokens=8)
    answer = {"role": "assistant", "content": "yo"}
    assert rows(tmp_path)["m"]["messages"] == [system, asked[0], answer, asked[1], answer]
    assert rows(tmp_path)["m"]["tokens"] == 6
    assert len(rows(tmp_path)["p0"]["messages"]) == 2


def test_later_turns_see_the_earlier_answers(babbler: Any, tmp_path: Path) -> None:
    prompt = Conversation("m", [{"role": "user", "content": "on"}, {"role": "user", "content": "two"}])
    tokenizer, seen = byte_tokenizer(), []
    plain = babbler.generate
    distill(
        _spied(babbler, lambda ids, **_: seen.append(ids.tolist())), tokenizer, [prompt], tmp_path, max_new_tokens=30
    )
    babbler.generate = plain
    messages = rows(tmp_path)["m"]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * len(seen)
    assert seen == [[prompt_ids(messages[: 2 * i + 1], tokenizer)] for i in range(len(seen))]


def _spied(target: Any, look: Callable[..., None]) -> Any:
    """The target, each call of its generate shown to `look` first."""
    plain = target.generate

    def generate(ids: Any, **options: Any) -> Any:
        look(ids, **options)
        return plain(ids, **options)

    target.generate = generate
    return target


def test_a_cut_answer_ends_its_conversation(tmp_path: Path) -> None:
    prompt = Conversation("m", [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    distill(speller(b"abcdef"), byte_tokenizer(), [prompt], tmp_path, max_new_tokens=3)
    row = rows(tmp_path)["m"]
    assert [m["content"] for m in row["messages"]] == ["one", "abc"]
    assert (row["finished"], row["tokens"]) == (False, 3)


def test_a_cut_inside_a_character_is_moved_before_it(tmp_path: Path) -> None:
    distill(speller("aé".encode()), byte_tokenizer(), SIX[:1], tmp_path, max_new_tokens=2)
    assert (rows(tmp_path)["p0"]["messages"][-1]["content"], rows(tmp_path)["p0"]["tokens"]) == ("a", 1)
