"""Rows of any shape, good and bad: what comes out, and what the report says about the rest."""

import json
import logging
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from headstart.train.conversations import Conversation, load_conversations, message_hash

GOOD = {"id": "good", "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
HELLO_HI = GOOD["messages"]


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(folder: Path, rows: list[Any], **options: Any) -> tuple[list[Conversation], Any]:
    return load_conversations([write(folder, rows)], **options)


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn", "days": 2}}}


def call_row(arguments: Any) -> dict[str, Any]:
    """A row whose assistant calls a tool."""
    calls = [{"id": "call00001", "function": {"name": "weather", "arguments": arguments}}]
    return {"messages": [HELLO_HI[0], {"role": "assistant", "content": None, "tool_calls": calls}]}


SHAPES = {
    "messages": {"messages": HELLO_HI},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    "prompt_answer": {"prompt": "Hello", "answer": "Hi"},
    "prompt_response": {"prompt": "Hello", "response": "Hi"},
    "prompt_completion": {"prompt": "Hello", "completion": "Hi"},
    "prompt_completion_turns": {"prompt": HELLO_HI[:1], "completion": HELLO_HI[1:]},
    "question_answer": {"question": "Hello", "answer": "Hi"},
    "instruction": {"instruction": "Hello", "input": "", "output": "Hi"},
    "text_parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, "lo"]}, HELLO_HI[1]]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_give_the_same_messages(tmp_path: Path, shape: str) -> None:
    rows, report = load(tmp_path, [SHAPES[shape]])
    assert [row.messages for row in rows] == [HELLO_HI]
    assert report.kept == 1
    assert not report.skipped


def test_instruction_input_and_system_are_kept(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [{"system": "Be kind", "instruction": "Translate", "input": "Hallo", "output": "Hello"}])
    assert [m["content"] for m in rows[0].messages] == ["Be kind", "Translate\n\nHallo", "Hello"]
    assert [m["role"] for m in rows[0].messages] == ["system", "user", "assistant"]


def test_empty_rows_are_named_and_harmless(tmp_path: Path) -> None:  # FC-001
    other = {**GOOD, "id": "r3"}
    rows, report = load(tmp_path, [GOOD, {"id": "r2", "conversations": []}, other, {"id": "r4", "conversations": None}])
    assert rows == load(tmp_path, [GOOD, other])[0]
    assert report.skipped == {"no turns": ["r2"], "conversations is null, expected a list of turns": ["r4"]}
    assert "r2" in str(report)
    assert "r4" in str(report)


def test_orphan_turns_are_dropped_and_counted(tmp_path: Path) -> None:  # FC-002
    orphan = {"id": "o", "conversations": [{"from": "gpt", "value": "Sure"}, *SHAPES["sharegpt"]["conversations"]]}
    rows, report = load(tmp_path, [orphan, GOOD])
    assert [row.messages for row in rows] == [HELLO_HI, HELLO_HI]
    assert list(report.changed.values()) == [["o"]]


def test_orphan_after_a_system_turn(tmp_path: Path) -> None:
    system = {"role": "system", "content": "S"}
    rows, report = load(tmp_path, [{"id": "o", "messages": [system, {"role": "assistant", "content": "x"}, *HELLO_HI]}])
    assert rows[0].messages == [system, *HELLO_HI]
    assert list(report.changed.values()) == [["o"]]


def test_rows_without_an_answer_are_skipped(tmp_path: Path) -> None:  # FC-004
    system = {"id": "s", "messages": [{"role": "system", "content": "S"}]}
    question = {"id": "q", "messages": [{"role": "user", "content": "only a question"}]}
    only_orphan = {"id": "a", "messages": [{"role": "assistant", "content": "Sure"}]}
    empty = {"id": "e", "prompt": "x", "answer": " \n"}
    rows, report = load(tmp_path, [GOOD, system, question, only_orphan, empty, {**GOOD, "id": "2"}])
    assert [row.id for row in rows] == ["good", "2"]
    assert report.skipped["no assistant turn after a user turn"] == ["s", "q", "a"]
    assert report.skipped["an assistant turn is empty"] == ["e"]


def test_parts_that_are_no_text_skip_their_row(tmp_path: Path) -> None:  # FC-008
    image = {
        "id": "img",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]}],
    }
    rows, report = load(tmp_path, [image, GOOD])
    assert [row.id for row in rows] == ["good"]
    assert report.skipped == {"a content part is of type image, only text parts are supported": ["img"]}


@pytest.mark.parametrize("arguments", [CALL["function"]["arguments"], json.dumps(CALL["function"]["arguments"])])
def test_tool_calls_come_out_alike(tmp_path: Path, arguments: Any) -> None:
    tool = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "12 degrees", "weight": 1}
    row = call_row(arguments)
    row["messages"] += [tool, HELLO_HI[1]]
    (conversation,), report = load(tmp_path, [row])
    assert not report.skipped
    assert conversation.messages == [
        HELLO_HI[0],
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call00001"}]},
        {"role": "tool", "content": "12 degrees", "name": "weather", "tool_call_id": "call00001"},
        HELLO_HI[1],
    ]
    flat = call_row(arguments)
    flat["messages"][1]["tool_calls"] = [{"name": "weather", "arguments": arguments}]
    assert load(tmp_path, [flat])[0][0].messages[1]["tool_calls"] == [CALL]


def test_tools_and_template_arguments_come_along(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    row = {"messages": HELLO_HI, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    spelled = {**row, "tools": json.dumps(tools), "chat_template_kwargs": '{"enable_thinking": false}'}
    bare = {**row, "tools": None, "chat_template_kwargs": {}}
    for given in (row, spelled):
        (conversation,), _ = load(tmp_path, [given])
        assert (conversation.tools, conversation.template_kwargs) == (tools, {"enable_thinking": False})
    assert load(tmp_path, [bare])[0][0] == load(tmp_path, [{"messages": HELLO_HI}])[0][0]
    assert load(tmp_path, [row])[0][0].id != load(tmp_path, [bare])[0][0].id


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(tmp_path: Path, name: str) -> None:
    turn = {"role": "assistant", "content": "Hi", name: "hm"}
    rows, _ = load(tmp_path, [{"messages": [{**HELLO_HI[0], name: "not mine"}, turn]}])
    assert rows[0].messages == [HELLO_HI[0], {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}]


def test_columns_that_other_rows_fill_change_nothing(tmp_path: Path) -> None:
    empty = dict.fromkeys(("conversations", "prompt", "answer", "tools", "system", "id"))
    filled = {"role": None, "content": None, "tool_calls": None, "reasoning": None, "name": None}
    sharegpt = [{**filled, **turn} for turn in SHAPES["sharegpt"]["conversations"]]
    assert load(tmp_path, [{**empty, "messages": HELLO_HI}])[0][0].messages == HELLO_HI
    assert load(tmp_path, [{**empty, "messages": None, "conversations": sharegpt}])[0][0].messages == HELLO_HI
    assert load(tmp_path, [{**empty, "messages": None, "prompt": "Hello", "answer": "Hi"}])[0][0].messages == HELLO_HI


def test_a_broken_line_is_skipped_and_named(tmp_path: Path) -> None:
    path = write(tmp_path, [GOOD, {**GOOD, "id": "2"}])
    with path.open("ab") as file:
        file.write(b'{"id": "torn", "mess\n[1]\n{"id": "bytes", "prompt": "\xff", "answer": "x"}\n')
        file.write(b'{"id": "4", "prompt": "a", "answer": "b"}')
    rows, report = load_conversations([path])
    assert [row.id for row in rows] == ["good", "2", "4"]
    ((torn, torn_names), (listed, listed_names), (odd, odd_names)) = report.skipped.items()
    assert "expected one JSON object a line" in torn
    assert "found of type list" in listed
    assert "surrogate" in odd
    assert [*torn_names, *listed_names, *odd_names] == ["rows.jsonl:3", "rows.jsonl:4", "bytes"]


def test_mixed_types_in_any_order(tmp_path: Path) -> None:  # FC-017
    rows = [
        {"id": "d", **call_row({"time": "2025-08-01"})},
        {"id": "e", **call_row({"time": 1690876800})},
        {"id": "a", "arguments": {"time": "2025-08-01"}, "messages": HELLO_HI},
        {"id": "b", "arguments": {"time": 1690876800}, "messages": HELLO_HI},
        {"id": "c", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, HELLO_HI[1]]},
    ]
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    one, other = load(tmp_path, rows)[0], load(tmp_path, rows[::-1])[0]
    assert len(one) == 5
    assert one == other[::-1]
    assert load_conversations([listed])[0] == one


def test_unknown_roles_are_refused_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # FC-020
    turns = [{"from": "human", "value": "Hello"}, {"from": "smollm-135m", "value": "Hi"}]
    rows = [{"id": f"r{i}", "conversations": turns} for i in range(3)]
    with caplog.at_level(logging.WARNING):
        none, report = load(tmp_path, rows)
    assert none == []
    assert list(report.skipped.values()) == [["r0", "r1", "r2"]]
    (warning,) = caplog.messages
    assert "smollm-135m" in warning
    assert "3 rows" in warning
    mapped, _ = load(tmp_path, rows, roles={"smollm-135m": "assistant"})
    assert [row.messages for row in mapped] == [HELLO_HI] * 3


def test_roles_map_to_known_roles_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"maps 'bot' to 'robot'; expected one of system, user, assistant, tool"):
        load(tmp_path, [GOOD], roles={"bot": "robot"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "no field named"),
        ({"messages": "x"}, "messages is of type str"),
        ({"messages": ["x"]}, "has no role"),
        ({"messages": [{"role": "user"}]}, "content is null"),
        ({"prompt": 5, "answer": "x"}, "content is of type int"),
        ({"prompt": "\ud83d", "answer": "x"}, "surrogate"),
        ({"messages": [HELLO_HI[0], {"role": "assistant", "tool_calls": [{"id": "f"}]}]}, "a tool call has no name"),
        ({"messages": [HELLO_HI[0], {"role": "assistant", "tool_calls": "f"}]}, "expected a list on an assistant turn"),
        ({"messages": [{**HELLO_HI[0], "tool_calls": [{"name": "f"}]}, HELLO_HI[1]]}, "on a turn of role user"),
        (call_row('{"a": '), "arguments is no JSON"),
        (call_row([1]), "arguments is of type list, expected a dict or its JSON"),
        ({"messages": HELLO_HI, "tools": {"name": "f"}}, "tools is of type dict, expected a list or its JSON"),
    ],
)
def test_odd_rows_are_skipped_with_a_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    rows, report = load(tmp_path, [row, GOOD])
    assert [kept.id for kept in rows] == ["good"]
    ((told, names),) = report.skipped.items()
    assert reason in told
    assert names == ["rows.jsonl:1"]


def test_half_surrogates_anywhere_skip_the_row_and_can_be_told(tmp_path: Path) -> None:
    half = "\ud83d"
    rows = [
        GOOD,
        {**GOOD, "id": half},
        {**GOOD, "id": "tools", "tools": [{"name": half}]},
        {**GOOD, "id": "kwargs", "chat_template_kwargs": {"mode": half}},
        call_row({"city": half}) | {"id": "call"},
        {"id": "role", "messages": [{"role": half, "content": "x"}]},
        {**GOOD, "note": half, "id": "elsewhere"},
    ]
    kept, report = load(tmp_path, rows)
    assert [row.id for row in kept] == ["good", "elsewhere"]
    assert sorted(map(len, report.skipped.values())) == [1, 4]
    assert "\\ud83d" in str(report) and str(report).encode()


def test_rows_without_an_id_are_known_by_their_content(tmp_path: Path) -> None:
    bare = {"messages": HELLO_HI}
    other = {"prompt": "Hello", "answer": "Ho"}
    first, second = load(tmp_path, [bare, other])[0]
    assert load(tmp_path, [other, bare])[0] == [second, first]
    assert first.id == message_hash(HELLO_HI) != second.id
    assert load(tmp_path, [{**bare, "id": 7}])[0][0].id == "7"


def test_prompts_keep_what_the_target_has_to_answer(tmp_path: Path) -> None:
    rows = [
        {"id": "turns", "turns": ["one", "two"]},
        {
            "id": "chat",
            "messages": [{"role": "system", "content": "S"}, *HELLO_HI, {"role": "user", "content": "and?"}],
        },
        {"id": "question", "prompt": "one"},
        {"id": "tool", "messages": [HELLO_HI[0], {"role": "tool", "content": "5"}]},
        {"id": "system last", "messages": [HELLO_HI[0], {"role": "system", "content": "S"}]},
        {"id": "nothing", "messages": [{"role": "assistant", "content": "x"}]},
    ]
    prompts, report = load(tmp_path, rows, trainable=False)
    assert {p.id: [m["content"] for m in p.messages] for p in prompts} == {
        "turns": ["one", "two"],
        "chat": ["S", "Hello", "and?"],
        "question": ["one"],
    }
    assert list(report.changed.values()) == [["chat"]]
    assert sorted(report.skipped.values()) == [["system last", "nothing"], ["tool"]]


@pytest.mark.parametrize(
    ("name", "count", "trainable"),
    [("smollm2-answers", 1317, True), ("quickstart-prompts", 6, False), ("heldout-prompts", 8, False)],
)
def test_shipped_data(name: str, count: int, trainable: bool) -> None:
    path = Path(str(files("headstart.recipes") / f"{name}.jsonl"))
    rows, report = load_conversations([path], trainable=trainable)
    assert (len({row.id for row in rows}), report.skipped, report.changed) == (count, {}, {})
    assert path.stat().st_size < 1_900_000
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\w@\w|\b\d{3}-\d{3}-\d{4}\b", text)


def test_a_long_report_stays_short(tmp_path: Path) -> None:
    _, report = load(tmp_path, [{"id": f"r{i}", "messages": []} for i in range(40)])
    assert "r4" in str(report)
    assert "r5" not in str(report)
    assert "and 35 more" in str(report)
