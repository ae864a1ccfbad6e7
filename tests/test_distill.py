"""Answers of toy targets: what is written, what is dropped, and that a killed run goes on where it stopped."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from headstart.scripts.distill import distill as command
from headstart.scripts.distill import pick
from headstart.train.conversations import Conversation, load_conversations
from headstart.train.distill import distill, repeats, temperature_of
from headstart.train.masking import encode, prompt_ids
from tests.byte_tokenizer import END, TURN, byte_tokenizer
from tests.toys import chain, llama

LETTERS = [64 + b for b in b"abcdefghijklmnopqrstuvwxyz"]
ALPHABET = "".join(map(chr, range(100)))
NEWLINE = 64 + ord("\n")  # the last token of the generation prompt


@pytest.fixture(scope="module")
def babbler() -> Any:
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


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    table = {row["id"]: row for row in map(json.loads, lines)}
    assert len(table) == len(lines), "an id twice"
    return table


def counted(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each generate call from now on."""
    calls: list[int] = []
    plain = target.generate

    def generate(ids: Any, **options: Any) -> Any:
        calls.append(len(ids))
        return plain(ids, **options)

    monkeypatch.setattr(target, "generate", generate)
    return calls


def test_greedy_answers_are_those_of_generate(babbler: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    report = distill(babbler, tokenizer, SIX, tmp_path, max_new_tokens=12, batch_size=4, temperatures=[0.0])
    table = rows(tmp_path)
    assert sorted(table) == [prompt.id for prompt in SIX]
    assert report.kept == 6
    for prompt in SIX:
        ids = torch.tensor([prompt_ids(prompt.messages, tokenizer)])
        alone = babbler.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        new = alone[0, ids.shape[1] :].tolist()
        row = table[prompt.id]
        assert row["messages"] == [
            *prompt.messages,
            {"role": "assistant", "content": tokenizer.decode(new, skip_special_tokens=True)},
        ]
        assert (row["temperature"], row["finished"], row["tokens"]) == (0.0, new[-1] == END, len(new))


def test_answers_are_training_data(babbler: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    distill(babbler, tokenizer, SIX, tmp_path, max_new_tokens=12)
    conversations, report = load_conversations([tmp_path])
    assert (len(conversations), report.skipped) == (6, {})
    for conversation, row in zip(conversations, encode(conversations, tokenizer)[0], strict=True):
        told = rows(tmp_path)[conversation.id]
        assert sum(row.supervised) == told["tokens"] + (not told["finished"])  # the template adds the end token


def test_order_changes_nothing_and_seeds_do(babbler: Any, tmp_path: Path) -> None:
    for name, prompts, seed in (("one", SIX, 0), ("other", SIX[::-1], 0), ("seed", SIX, 1)):
        torch.rand(7)  # the global generator is somewhere else each time
        distill(
            babbler, byte_tokenizer(), prompts, tmp_path / name, max_new_tokens=12, temperatures=[0, 0.8], seed=seed
        )
    assert rows(tmp_path / "one") == rows(tmp_path / "other")
    assert rows(tmp_path / "one") != rows(tmp_path / "seed")


def test_temperatures_hang_on_seed_and_id() -> None:
    drawn = [temperature_of(f"p{i}", [0.0, 0.8], 0) for i in range(400)]
    assert 160 < drawn.count(0.0) < 240
    assert drawn != [temperature_of(f"p{i}", [0.0, 0.8], 1) for i in range(400)]
    assert temperature_of("p0", [0.5], 3) == 0.5


def test_sampling_is_from_the_whole_law(tmp_path: Path) -> None:
    target = chain({}, eos=END)  # says every token alike
    printable = range(64 + 33, 64 + 127)
    target.generation_config.update(top_k=5, top_p=0.2, suppress_tokens=[i for i in range(320) if i not in printable])
    given = []
    spied = _spied(target, lambda ids, generation_config, **_: given.append(generation_config))
    distill(spied, byte_tokenizer(), asks(*map(str, range(400))), tmp_path, max_new_tokens=1, temperatures=[0.7])
    assert len({row["messages"][-1]["content"] for row in rows(tmp_path).values()}) > 85  # 94 in all; 400 draws see 93
    assert {config.temperature for config in given} == {0.7}


def test_global_randomness_is_left_alone(babbler: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    distill(babbler, byte_tokenizer(), SIX, tmp_path, max_new_tokens=4, temperatures=[1.0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_killed_run_goes_on(babbler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # FC-016
    killed, options = tmp_path / "killed", {"max_new_tokens": 8, "batch_size": 1}

    def progress(done: int, total: int, tokens: int) -> None:
        assert total == 6
        if done == 3:
            shutil.copytree(tmp_path / "run", killed)  # what a kill at this moment leaves

    distill(babbler, byte_tokenizer(), SIX, tmp_path / "run", progress=progress, **options)
    assert json.loads((killed / "provenance.json").read_text())["counts"] == {"answered": 3, "dropped": 0}
    first = (killed / "answers.jsonl").read_bytes()
    with (killed / "answers.jsonl").open("ab") as file:
        file.write(first[:40])  # a line that was torn off
    calls = counted(babbler, monkeypatch)
    distill(babbler, byte_tokenizer(), SIX, killed, **options)
    assert len(calls) == 3
    assert (killed / "answers.jsonl").read_bytes().startswith(first)
    assert rows(killed) == rows(tmp_path / "run")
    report = distill(babbler, byte_tokenizer(), SIX[::-1], killed, **options)
    assert len(calls) == 3
    assert report.kept == len(rows(killed)) == 6


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


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (lambda: speller(b""), "the answer is empty"),
        (lambda: speller(b"ab\xff"), "the answer's text does not tokenize to the generated ids"),
        (lambda: chain({NEWLINE: 161, 161: TURN, TURN: 162, 162: END}, eos=END), "does not tokenize"),
    ],
)
def test_useless_answers_are_dropped_once(
    target: Callable[[], Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target()
    report = distill(model, byte_tokenizer(), SIX, tmp_path, max_new_tokens=8)
    ((told, names),) = report.skipped.items()
    assert reason in told
    assert sorted(names) == [prompt.id for prompt in SIX]
    assert rows(tmp_path) == {}
    calls = counted(model, monkeypatch)
    again = distill(model, byte_tokenizer(), SIX, tmp_path, max_new_tokens=8)
    assert (calls, again.skipped, again.kept) == ([], report.skipped, 0)


def test_loops_are_dropped_on_request(tmp_path: Path) -> None:
    looper = chain({NEWLINE: 161, 161: 162, 162: 161}, eos=END)
    assert distill(looper, byte_tokenizer(), SIX[:2], tmp_path / "kept", max_new_tokens=40).kept == 2
    report = distill(looper, byte_tokenizer(), SIX[:2], tmp_path / "dropped", max_new_tokens=40, drop_loops=True)
    assert report.skipped == {"the answer ends in a loop": ["p0", "p1"]}


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


def test_prompts_that_do_not_fit_are_skipped(babbler: Any, tmp_path: Path) -> None:
    prompts = [*SIX[:1], *asks("x" * 300)[:1]]
    prompts[1] = prompts[1]._replace(id="long")
    report = distill(babbler, byte_tokenizer(), prompts, tmp_path, max_new_tokens=8)
    assert report.skipped == {"no room for an answer: the target has 256 positions": ["long"]}
    assert list(rows(tmp_path)) == ["p0"]


def test_refused_prompts_are_skipped(babbler: Any, tmp_path: Path) -> None:
    twice = Conversation("s", [{"role": "system", "content": "S"}] * 2 + SIX[0].messages)
    report = distill(babbler, byte_tokenizer(strict=True), [*SIX, twice], tmp_path, max_new_tokens=4)
    assert list(report.skipped.values()) == [["s"]]
    assert report.kept == 6


def test_ids_that_clash_and_prompts_given_twice(babbler: Any, tmp_path: Path) -> None:
    one, other = (Conversation("7", prompt.messages) for prompt in SIX[:2])
    report = distill(babbler, byte_tokenizer(), [one, other, one], tmp_path, max_new_tokens=4, temperatures=[0])
    keys = {row["messages"][0]["content"]: key for key, row in rows(tmp_path).items()}
    assert sorted(keys) == ["a", "what is it"]
    assert all(key.startswith("7#") for key in keys.values())
    assert list(report.changed.values()) == [["7"]]


def test_other_settings_want_another_folder(babbler: Any, tmp_path: Path) -> None:
    distill(babbler, byte_tokenizer(), SIX[:1], tmp_path, max_new_tokens=4)
    before = (tmp_path / "answers.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"sampling: .*'max_new_tokens': 4.*'max_new_tokens': 5.*give a new folder"):
        distill(babbler, byte_tokenizer(), SIX, tmp_path, max_new_tokens=5)
    with pytest.raises(ValueError, match="template_sha256"):
        distill(babbler, byte_tokenizer(strict=True), SIX, tmp_path, max_new_tokens=4)
    assert (tmp_path / "answers.jsonl").read_bytes() == before


def test_a_folder_of_others_is_refused(babbler: Any, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"id": "mine"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="holds other answers"):
        distill(babbler, byte_tokenizer(), SIX, tmp_path)


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"batch_size": 0}, {"temperatures": []}, {"temperatures": [-1]}]
)
def test_senseless_settings_are_refused(babbler: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected at least one token"):
        distill(babbler, byte_tokenizer(), SIX, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_training_mode_and_answered_prompts_are_refused(babbler: Any, tmp_path: Path) -> None:
    answered = Conversation("a", [*SIX[0].messages, {"role": "assistant", "content": "x"}])
    with pytest.raises(ValueError, match="prompt a: expected system and user turns"):
        distill(babbler, byte_tokenizer(), [answered], tmp_path)
    with pytest.raises(ValueError, match=r"call target\.eval"):
        distill(llama(num_hidden_layers=1).train(), byte_tokenizer(), SIX, tmp_path)


def test_the_time_limit_stops_before_a_batch(babbler: Any, tmp_path: Path) -> None:
    assert distill(babbler, byte_tokenizer(), SIX, tmp_path, max_new_tokens=4, seconds=0).kept == 0
    assert distill(babbler, byte_tokenizer(), SIX, tmp_path, max_new_tokens=4, seconds=600).kept == 6


def test_provenance(babbler: Any, tmp_path: Path) -> None:
    distill(babbler, byte_tokenizer(), SIX, tmp_path, max_new_tokens=4, seed=3, target_id="toy")
    record = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    assert record["target"] == "toy"
    assert record["sampling"]["seed"] == 3
    assert record["counts"] == {"answered": 6, "dropped": 0}
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["template_sha256"]) == 64


def test_limit_takes_from_all_sources_whatever_the_order() -> None:  # FC-013
    sources = [Conversation(f"{name}{i}", []) for name in "ab" for i in range(100)]
    chosen = pick(sources, 50, 0)
    assert 15 < sum(row.id.startswith("a") for row in chosen) < 35
    assert pick(sources[::-1], 50, 0) == chosen
    assert pick(sources, 50, 1) != chosen
    assert pick(sources, None, 0) == sources


def test_the_command(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    speller(b"yo").save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt._asdict()) + "\n" for prompt in SIX), encoding="utf-8")
    app = typer.Typer()
    app.command()(command)
    line = ["--target", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "out"), "--limit", "4"]
    result = CliRunner().invoke(app, [*line, "--max-new-tokens", "6", "--temperature", "0", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "6 kept, 0 skipped" in result.output
    assert "4/4 prompts" in result.output
    assert [row["messages"][-1]["content"] for row in rows(tmp_path / "out").values()] == ["yo"] * 4
    assert json.loads((tmp_path / "out/provenance.json").read_text())["target"] == "toy"
    wrong = CliRunner().invoke(app, [*line, "--dtype", "int3"])
    assert wrong.exit_code == 2
    assert "expected one of auto, bfloat16" in wrong.output
