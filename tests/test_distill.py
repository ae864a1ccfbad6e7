"""Prompts and their answers in a folder: what is kept, what is dropped, and that a killed run goes on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from headstart.scripts.distill import distill as command
from headstart.scripts.distill import pick
from headstart.train.conversations import Conversation, load_conversations
from headstart.train.distill import temperature_of
from headstart.train.masking import encode, prompt_ids
from tests.answering import NEWLINE, SIX, asks, babbler_target, distill, rows, speller
from tests.byte_tokenizer import END, TEMPLATE, TURN, byte_tokenizer
from tests.toys import chain, llama


@pytest.fixture(scope="module")
def babbler() -> Any:
    return babbler_target()


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
    spent = json.loads((killed / "provenance.json").read_text())["seconds"]
    assert spent > 0
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
    assert json.loads((killed / "provenance.json").read_text())["seconds"] >= spent


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


def test_prompts_of_one_id_are_told_apart_over_runs(babbler: Any, tmp_path: Path) -> None:
    """Sources that number their rows from 0 on, given one after the other, together, and alone again."""

    def run(folder: str, *sources: list[Conversation]) -> list[str]:
        prompts = [prompt for source in sources for prompt in source]
        report = distill(babbler, byte_tokenizer(), prompts, tmp_path / folder, max_new_tokens=4, temperatures=[0])
        assert report.kept == len(rows(tmp_path / folder))
        return sorted(row["messages"][0]["content"] for row in rows(tmp_path / folder).values())

    one, other = asks("a", "b"), asks("c", "d")
    assert run("grown", one) == ["a", "b"]
    assert run("grown", other) == run("grown", one, other) == run("grown", other, one) == ["a", "b", "c", "d"]
    assert run("grown", one) == run("grown", other) == ["a", "b", "c", "d"]
    assert run("whole", one, other) == run("whole", one) == run("whole", other) == ["a", "b", "c", "d"]


def test_a_dropped_prompt_stands_for_no_other_of_its_id(tmp_path: Path) -> None:
    prompts = [prompt._replace(id="7") for prompt in asks("x", "y")]
    for prompt in prompts * 2:
        distill(speller(b""), byte_tokenizer(), [prompt], tmp_path, max_new_tokens=4)
    lines = [line.split("\t") for line in (tmp_path / "dropped.tsv").read_text(encoding="utf-8").splitlines()]
    assert [key.split("#")[0] for key, _, _ in lines] == ["7", "7"]
    assert {reason for _, reason, _ in lines} == {"the answer is empty"}


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"batch_size": 0}, {"temperatures": []}, {"temperatures": [-1]}]
)
def test_senseless_settings_are_refused(babbler: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected at least one t(oken|emperature)"):
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


def test_template_arguments_stand_in_the_rows_and_reach_the_masks(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template="{{ mode or 'slow' }}" + TEMPLATE)
    own = asks("b")[0]._replace(id="own", template_kwargs={"mode": "odd"})
    report = distill(
        speller(b"yo"), tokenizer, [*asks("a"), own], tmp_path, max_new_tokens=4, template_kwargs={"mode": "fast"}
    )
    assert report.kept == 2
    table = rows(tmp_path)
    assert table["p0"]["chat_template_kwargs"] == {"mode": "fast"}
    assert table["own"]["chat_template_kwargs"] == {"mode": "odd"}
    conversations, _ = load_conversations([tmp_path])
    texts = [tokenizer.decode(row.ids) for row in encode(conversations, tokenizer)[0]]
    assert [text[:4] for text in texts] == [
        {"p0": "fast", "own": "odd<"}[conversation.id] for conversation in conversations
    ]
    with pytest.raises(ValueError, match=r"template_kwargs: \{'mode': 'fast'\} there"):
        distill(speller(b"yo"), tokenizer, asks("a"), tmp_path, max_new_tokens=4)


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
    for more, told in [
        (["--dtype", "int3"], "expected one of auto, bfloat16"),
        (["--self"], "not both"),
        (["--served-model", "m"], "--concurrency are with it"),
        (["--server-args", '{"top_k": 1}'], "--concurrency are with it"),
        (["--concurrency", "4"], "--concurrency are with it"),
        (["--server", "http://localhost/v1", "--batch-size", "4"], "are without --server"),
        (["--limit", "-1"], "greater than or equal to"),
        (["--max-new-tokens", "0"], "greater than or equal to"),
        (["--temperature", "-1"], "greater than or equal to"),
        (["--server", "http://localhost/v1", "--device", "cpu"], "are without --server"),
        (["--template-kwargs", "[1]"], "expected a JSON object"),
        (["--template-kwargs", "{"], "is no JSON"),
    ]:
        wrong = CliRunner().invoke(app, [*line, *more])
        assert wrong.exit_code == 2
        assert told in " ".join(wrong.output.replace("│", " ").split())
    alone = CliRunner().invoke(app, ["--target", str(model), "--out", str(tmp_path / "self"), "--self"])
    assert "how many conversations" in " ".join(alone.output.replace("│", " ").split())


def test_the_command_writes_its_own_prompts(tmp_path: Path, babbler: Any) -> None:
    model = tmp_path / "toy"
    babbler.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    app = typer.Typer()
    app.command()(command)
    line = ["--target", str(model), "--self", "--limit", "5", "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(app, [*line, "--max-new-tokens", "20"])
    assert result.exit_code == 0, result.output
    assert "5 kept" in result.output
    assert len(rows(tmp_path / "out")) == 5
