"""Answers from a server that fails now and then: each row once, whatever happens on the way."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headstart.scripts.distill import distill as command
from headstart.train.conversations import Conversation, load_conversations
from headstart.train.distill import distill, distill_self, temperature_of
from headstart.train.masking import encode, prompt_ids
from headstart.train.selfplay import UserTurns
from headstart.train.server import PATIENCE, Server, ServerError
from tests.answering import rows
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer
from tests.chat_server import ChatServer, Request, chat_reply, serving

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
CALLING = TEMPLATE.replace(
    "m['content'] +",
    "m['content'] + (m.reasoning_content or '') + "
    "(m.tool_calls[0].function.arguments | tojson if m.tool_calls else '') +",
)


def asks(count: int) -> list[Conversation]:
    return [Conversation(f"p{i}", [{"role": "user", "content": f"question {i}"}]) for i in range(count)]


def echo(request: Request) -> tuple[Any, ...]:
    return 200, chat_reply(f"answer to {request.said}")


def client(server: ChatServer | str, *, template: str | None = None, **options: Any) -> Server:
    url = server if isinstance(server, str) else server.url
    options = {"target_id": "toy", "max_new_tokens": 16, "concurrency": 4, "backoff": 0.01, **options}
    return Server(url, byte_tokenizer(template=template), **options)


def assert_echoed(folder: Path, count: int) -> None:
    table = rows(folder)
    assert sorted(table) == sorted(f"p{i}" for i in range(count))
    for i in range(count):
        assert [m["content"] for m in table[f"p{i}"]["messages"]] == [f"question {i}", f"answer to question {i}"]


def test_what_is_asked_and_what_is_kept(tmp_path: Path) -> None:
    with serving(echo) as server:
        report = distill(
            client(server, model="served", api_key="k", template_kwargs={"enable_thinking": False}, body={"top_k": -1}),
            asks(10),
            tmp_path,
            temperatures=[0.0, 0.7],
            seed=3,
        )
    assert (report.kept, report.skipped) == (10, {})
    assert_echoed(tmp_path, 10)
    bodies = {request.said: request.body for request in server.requests}
    for i in range(10):
        body = bodies[f"question {i}"]
        assert body["temperature"] == temperature_of(f"p{i}", [0.0, 0.7], 3) == rows(tmp_path)[f"p{i}"]["temperature"]
        assert (body["model"], body["max_tokens"], body["top_p"], body["top_k"]) == ("served", 16, 1.0, -1)
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert len({body["seed"] for body in bodies.values()}) == 10
    assert {request.path for request in server.requests} == {"/v1/chat/completions"}
    assert server.requests[0].headers["Authorization"] == "Bearer k"
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert (record["target"], record["answered"], record["served_model"]) == ("toy", "by a server", "served")
    assert record["template_kwargs"] == {"enable_thinking": False}
    assert rows(tmp_path)["p0"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.url not in json.dumps(record)  # an address is of no use to others


def test_order_and_concurrency_change_nothing(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        return 200, chat_reply(f"{request.body['seed']} {request.body['temperature']}")

    with serving(behave) as server:
        distill(client(server), asks(12), tmp_path / "one")
        distill(client(server, concurrency=1), asks(12)[::-1], tmp_path / "other")
    assert rows(tmp_path / "one") == rows(tmp_path / "other")


def test_failures_that_pass_are_asked_again(tmp_path: Path) -> None:
    failures: list[tuple[Any, ...]] = [
        (503, {"error": "busy"}),
        (429, {"error": "slow down"}, {"Retry-After": "0.01"}),
        (0, None),  # the connection is dropped
        (200, b"{"),
        (200, {"choices": []}),
    ]
    tries: Counter[str] = Counter()

    def behave(request: Request) -> tuple[Any, ...]:
        tries[request.said] += 1
        return echo(request) if tries[request.said] > 2 else failures[request.number % len(failures)]

    with serving(behave) as server:
        report = distill(client(server), asks(20), tmp_path)
    assert (report.kept, report.skipped) == (20, {})
    assert_echoed(tmp_path, 20)
    assert len(server.requests) == 60


def test_a_request_that_hangs_is_asked_again(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        if request.number == 0:
            time.sleep(0.5)
        return echo(request)

    with serving(behave) as server:
        assert distill(client(server, timeout=0.1), asks(3), tmp_path).kept == 3
    assert Counter(request.said for request in server.requests).most_common(1)[0][1] == 2


def test_waiting_is_as_long_as_the_server_asks(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        return echo(request) if request.number else (429, {}, {"Retry-After": "0.3"})

    began = time.monotonic()
    with serving(behave) as server:
        assert distill(client(server), asks(1), tmp_path).kept == 1
    assert time.monotonic() - began >= 0.3


def test_a_refused_prompt_is_dropped_and_named(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        return (400, {"error": "too long"}) if request.said == "question 3" else echo(request)

    with serving(behave) as server:
        report = distill(client(server), asks(6), tmp_path)
        ((reason, names),) = report.skipped.items()
        assert names == ["p3"]
        assert reason == 'the server refused it: 400 {"error": "too long"}'
        asked = len(server.requests)
        assert distill(client(server), asks(6), tmp_path).skipped == report.skipped
        assert len(server.requests) == asked == 6  # nothing is asked twice


def test_a_server_that_refuses_everything_ends_the_run_and_nothing_is_dropped(tmp_path: Path) -> None:
    with serving(lambda request: (400, {"error": "unknown field top_k"})) as server:
        with pytest.raises(ServerError, match="unknown field top_k"):
            distill(client(server), asks(30), tmp_path)
        assert PATIENCE < len(server.requests) <= PATIENCE + 4  # one of them a plain prompt, which was refused too
        with pytest.raises(ServerError, match="refused every prompt"):
            distill(client(server), asks(2), tmp_path)
    assert (tmp_path / "dropped.tsv").read_text() == ""
    with serving(echo) as server:
        assert distill(client(server), asks(30), tmp_path).kept == 30


def test_refused_prompts_alone_are_the_prompts_fault_where_a_plain_one_is_answered(tmp_path: Path) -> None:
    """As where nothing else is left for a run that goes on, or the first prompts of all are too long."""
    with serving(lambda r: echo(r) if r.said == "Hi" else (400, {"error": "too long"})) as server:
        for count in (2, 2 * PATIENCE):
            report = distill(client(server), asks(count), tmp_path)
            assert (report.kept, [len(names) for names in report.skipped.values()]) == (0, [count])
        assert Counter(request.said for request in server.requests)["Hi"] == 2  # once a run
        assert distill(client(server), asks(2), tmp_path).skipped  # nothing is left to ask
        assert len(server.requests) == 2 * PATIENCE + 2


def test_a_prompt_the_server_fails_at_is_left_for_the_next_run(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        return (500, {"error": "boom"}) if request.said == "question 1" else echo(request)

    with serving(behave) as server:
        report = distill(client(server, retries=2), asks(4), tmp_path)
        assert report.kept == 3
        assert report.skipped == {'the server did not answer; left for the next run: 500 {"error": "boom"}': ["p1"]}
        assert Counter(request.said for request in server.requests)["question 1"] == 3
    with serving(echo) as server:
        assert distill(client(server), asks(4), tmp_path).kept == 4
        assert [request.said for request in server.requests] == ["question 1"]


def test_a_server_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    with serving(echo) as server:
        url = server.url
    with pytest.raises(ServerError, match=r"8 prompts in a row came to nothing.*ConnectError"):
        distill(client(url, retries=1, backoff=0.001), asks(20), tmp_path)


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_ends_the_run_at_once(tmp_path: Path, status: int) -> None:
    with serving(lambda request: (status, {"error": "no"})) as server:
        with pytest.raises(ServerError, match=rf"answers {status} .*'toy'; check the address"):
            distill(client(server), asks(40), tmp_path)
        assert len(server.requests) <= 4


def test_turns_cuts_and_empty_answers(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        if request.said == "cut":
            return 200, chat_reply("and then", finish="length")
        return (200, chat_reply(" ")) if request.said == "empty" else echo(request)

    def prompt(*texts: str) -> Conversation:
        return Conversation(texts[0], [{"role": "user", "content": text} for text in texts])

    with serving(behave) as server:
        report = distill(client(server), [prompt("a", "b"), prompt("cut", "c"), prompt("empty", "d")], tmp_path)
    table = rows(tmp_path)
    assert [m["content"] for m in table["a"]["messages"]] == ["a", "answer to a", "b", "answer to b"]
    assert (table["a"]["finished"], table["a"]["tokens"]) == (True, 6)
    assert [m["content"] for m in table["cut"]["messages"]] == ["cut", "and then"]
    assert table["cut"]["finished"] is False
    assert report.skipped == {"the answer is empty": ["empty"]}
    second = next(request for request in server.requests if request.said == "b")
    assert [m["role"] for m in second.body["messages"]] == ["user", "assistant", "user"]


def test_reasoning_and_tool_calls_come_back_as_training_data(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        if "tools" in request.body:
            return 200, chat_reply(None, finish="tool_calls", tool_calls=[CALL])  # type: ignore[arg-type]
        return 200, chat_reply("yes", reasoning_content="hm")

    calling = asks(1)[0]._replace(id="calls", tools=TOOLS)
    with serving(behave) as server:
        assert distill(client(server, template=CALLING), [*asks(1), calling], tmp_path).skipped == {}
    table = rows(tmp_path)
    assert table["p0"]["messages"][-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert table["calls"]["messages"][-1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}
    assert table["calls"]["tools"] == TOOLS
    tokenizer = byte_tokenizer(template=CALLING)
    conversations, _ = load_conversations([tmp_path])
    texts = {}
    for conversation, row in zip(conversations, encode(conversations, tokenizer)[0], strict=True):
        spoken = [token for token, on in zip(row.ids, row.supervised, strict=True) if on]
        texts[conversation.id] = tokenizer.decode(spoken)
    assert texts == {"p0": "yeshm</s>", "calls": '{"city": "Bonn"}</s>'}


def test_an_answer_the_template_cannot_show_is_dropped(tmp_path: Path) -> None:
    with serving(lambda request: (200, chat_reply("yes", reasoning="hm"))) as server:
        report = distill(client(server), asks(1), tmp_path)
    assert list(report.skipped) == ["the chat template leaves out the reasoning of the last assistant turn"]


def test_another_template_on_the_server_is_told(tmp_path: Path) -> None:
    right = len(prompt_ids(asks(1)[0].messages, byte_tokenizer()))

    def behave(request: Request) -> tuple[Any, ...]:
        reply = chat_reply("yes")
        reply["usage"]["prompt_tokens"] = right + (request.said == "question 1")
        return 200, reply

    with serving(behave) as server:
        report = distill(client(server), asks(2), tmp_path)
    assert report.changed == {"the server's prompt has another length than this template gives it": ["p1"]}


def test_killed_at_any_moment_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    """Real processes and SIGKILL, the server failing now and then."""
    count = 60

    def behave(request: Request) -> tuple[Any, ...]:
        time.sleep(0.005)
        return (503, {}) if request.number % 7 == 3 else echo(request)

    fork = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds importing
    with serving(behave) as server:
        for kill_at in (5, 17, 40):
            kept = (tmp_path / "answers.jsonl").read_bytes() if (tmp_path / "answers.jsonl").exists() else b""
            child = fork.Process(target=distill, args=(client(server), asks(count), tmp_path))
            child.start()
            first = len(server.requests)
            while len(server.requests) < first + kill_at:
                assert child.is_alive(), "it ended before it was killed"
                time.sleep(0.001)
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            assert child.exitcode == -signal.SIGKILL
            assert (tmp_path / "answers.jsonl").read_bytes().startswith(kept)
        killed = (tmp_path / "answers.jsonl").read_bytes()
        done = killed.count(b"\n")
        assert 0 < done < count
        time.sleep(0.1)  # what the killed client had sent is handled by now
        before = len(server.requests)
        assert distill(client(server), asks(count)[::-1], tmp_path).kept == count
        answered = {request.said for request in server.requests[before:]}
    assert len(answered) == count - done  # what was on the disk is not asked again
    assert (tmp_path / "answers.jsonl").read_bytes().startswith(killed[: killed.rfind(b"\n") + 1])
    assert_echoed(tmp_path, count)


def test_a_server_writes_user_turns_too(tmp_path: Path) -> None:
    def behave(request: Request) -> tuple[Any, ...]:
        if request.path == "/v1/chat/completions":
            return echo(request)
        text = f"Tell me about number {request.body['seed'] % 5} please</s>\n<|turn|>assistant"
        return 200, {"choices": [{"text": text, "finish_reason": "stop" if request.number % 4 else "length"}]}

    with serving(behave) as server:
        report = distill_self(client(server), 5, tmp_path, turns=UserTurns(batch=8))
    assert report.kept == len(rows(tmp_path)) == 5
    assert {row["messages"][0]["content"] for row in rows(tmp_path).values()} == {
        f"Tell me about number {i} please" for i in range(5)
    }
    assert report.skipped["user turn: said before"]
    assert report.skipped["user turn: no end within 128 tokens"]
    raw = next(request.body for request in server.requests if request.path == "/v1/completions")
    assert byte_tokenizer().decode(raw["prompt"]) == "<|turn|>user\n"
    assert (raw["stop"], raw["temperature"], raw["max_tokens"]) == (["</s>"], 1.0, 128)


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="expected an address such as"):
        client("localhost:8000")
    with pytest.raises(ValueError, match="expected at least one token"):
        client("http://localhost/v1", concurrency=0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    byte_tokenizer().save_pretrained(tmp_path / "toy")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt._asdict()) + "\n" for prompt in asks(3)), encoding="utf-8")
    app = typer.Typer()
    app.command()(command)
    with serving(echo) as server:
        line = ["--target", str(tmp_path / "toy"), "--server", server.url, "--prompts", str(prompts)]
        result = CliRunner().invoke(app, [*line, "--out", str(tmp_path / "out"), "--served-model", "m"])
    assert result.exit_code == 0, result.output
    assert "3 kept" in result.output
    assert_echoed(tmp_path / "out", 3)
    assert {(r.body["model"], r.body["top_k"], r.headers["Authorization"]) for r in server.requests} == {
        ("m", -1, "Bearer secret")
    }
    assert "secret" not in (tmp_path / "out/provenance.json").read_text()
