"""Rows in any common shape become conversations; whatever is skipped or changed is counted and named.

Shapes read: `messages` (role / content), ShareGPT `conversations` (from / value), `turns` (a list of user texts), and
`prompt` or `question` or `instruction` (+ `input`) with `answer`, `response`, `completion` or `output`. Assistant turns
may carry `tool_calls` and reasoning; a row may carry `tools` and `chat_template_kwargs`, which its template then gets.

Policy: assistant turns before the first user turn are dropped, the rest of the row stays; one unusable row never ends a
run; an unknown role refuses its row, so no turn disappears silently.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headstart.train.sources import BrokenRow, kind, placed_rows

log = logging.getLogger(__name__)

# Each {"role": one of ROLES, "content": text}. An assistant turn may have "reasoning_content", text, and "tool_calls",
# a list of {"type": "function", "function": {"name": text, "arguments": dict}}; a tool turn "name", "tool_call_id".
Messages = list[dict[str, Any]]
Turns = list[tuple[str, Mapping[str, Any]]]  # role as written, turn as written

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant", "developer": "system", "observation": "tool"}
LISTS = ("messages", "conversations", "conversation", "turns")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "response", "completion", "output")
REASONING = ("reasoning_content", "reasoning", "thinking")
IDS = ("id", "question_id", "conversation_id")
SHOWN = 5  # names a printed report gives for each reason


class Conversation(NamedTuple):
    """`id` is the row's own id, or a hash of its contents where it has none: never a position in a file."""

    id: str
    messages: Messages
    tools: list[dict[str, Any]] | None = None  # JSON schemas of what the assistant may call
    template_kwargs: dict[str, Any] | None = None  # arguments of the chat template for this row


@dataclass
class Report:
    """What a step kept, skipped and changed: for each reason the names (row id, or file:line) it applies to."""

    kept: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        self.skipped.setdefault(_printable(reason), []).append(_printable(name))

    def change(self, what: str, name: str) -> None:
        self.changed.setdefault(_printable(what), []).append(_printable(name))

    def __str__(self) -> str:
        dropped = sum(len(names) for names in self.skipped.values())
        lines = [f"{self.kept} kept, {dropped} skipped"]
        for title, table in (("skipped", self.skipped), ("changed", self.changed)):
            for reason, names in sorted(table.items(), key=lambda item: -len(item[1])):
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                lines.append(f"  {title} {len(names)}: {reason} ({', '.join(names[:SHOWN])}{more})")
        return "\n".join(lines)


class Refused(ValueError):
    """A row or a content that cannot be used; the text is the reason the report shows."""


def text_of(content: object) -> str:
    """The text of a turn: a string, or a list of text parts, which are joined without anything between.

    Raises Refused for parts that are not text (an image), for other types and for text that is no valid Unicode.
    """
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise Refused(f"content is {kind(content)}, expected text or a list of text parts")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise Refused("content holds half a surrogate pair, which no tokenizer takes") from error
    return content


def message_hash(messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
    """16 hex digits that depend on the turns and tools alone: the key of a row without an id of its own."""
    told: object = {"messages": messages, "tools": tools} if tools else messages
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def load_conversations(
    paths: Sequence[str | Path], *, roles: Mapping[str, str] | None = None, trainable: bool = True
) -> tuple[list[Conversation], Report]:
    """Read files, folders or data sets (see `sources`) into conversations.

    roles: what unknown role names stand for, e.g. {"smollm-135m": "assistant"}; wins over the built-in aliases.
    trainable: True keeps rows with an assistant turn. False reads prompts for the target to answer: system and user
        turns stay, assistant turns are dropped and counted.
    """
    names = {**ALIASES, **{role: role for role in ROLES}, **(roles or {})}
    for name, role in names.items():
        if role not in ROLES:
            raise ValueError(f"roles maps {name!r} to {role!r}; expected one of {', '.join(ROLES)}")
    report = Report()
    kept: list[Conversation] = []
    for path in paths:
        for place, row in placed_rows(path):
            name = place
            try:
                if isinstance(row, BrokenRow):
                    raise Refused(str(row))
                own = next((str(row[key]) for key in IDS if row.get(key) is not None), None)
                name = own or place
                messages = _trim(_messages(row, names), name, trainable, report)
                tools, arguments = _parsed(row, "tools", list), _parsed(row, "chat_template_kwargs", dict)
                if not _is_text([own, messages, tools, arguments]):
                    raise Refused("the row holds half a surrogate pair, which no tokenizer takes")
            except Refused as refusal:
                report.skip(str(refusal), name)
                continue
            kept.append(Conversation(own or message_hash(messages, tools), messages, tools, arguments))
    report.kept = len(kept)
    for reason, rows in report.skipped.items():
        if reason.startswith("unknown role"):
            log.warning("%s: %d rows refused", reason, len(rows))
    return kept, report


def _is_text(value: object) -> bool:
    """Whether every string in a JSON value is valid Unicode."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    """The text, with escapes for what no file or terminal takes."""
    return text.encode(errors="backslashreplace").decode()


def _trim(messages: Messages, name: str, trainable: bool, report: Report) -> Messages:
    """Drop orphan assistant turns (prompts: all assistant turns) and refuse rows with nothing left to do."""
    if not trainable:
        if any(m["role"] == "tool" for m in messages):
            raise Refused("a tool turn answers a call that the target did not make")
        rest = [m for m in messages if m["role"] != "assistant"]
        if not rest or rest[-1]["role"] != "user":
            raise Refused("no user turn at the end")
        if len(rest) < len(messages):
            report.change("assistant turns dropped: the target answers itself", name)
        return rest
    first_user = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    rest = [m for i, m in enumerate(messages) if i > first_user or m["role"] != "assistant"]
    answers = [m for m in rest if m["role"] == "assistant"]
    if not answers:
        raise Refused("no assistant turn after a user turn")
    if not all(answer["content"].strip() or "tool_calls" in answer for answer in answers):
        raise Refused("an assistant turn is empty")
    if len(rest) < len(messages):
        report.change("assistant turns before the first user turn dropped", name)
    return rest


def _messages(row: Mapping[str, Any], names: Mapping[str, str]) -> Messages:
    turns = _turns(row)
    if not turns:
        raise Refused("no turns")
    unknown = next((role for role, _ in turns if role not in names), None)
    if unknown is not None:
        raise Refused(f'unknown role "{unknown}" (a known one, or an entry in roles, is expected)')
    messages = [message_of(names[role], turn) for role, turn in turns]
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(system)})
    return messages


def message_of(role: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    calls = turn.get("tool_calls")
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise Refused(f"tool_calls {kind(calls)} on a turn of role {role}, expected a list on an assistant turn")
    message: dict[str, Any] = {"role": role, "content": "" if content is None and calls else text_of(content)}
    if role == "assistant":
        reasoning = next((turn[key] for key in REASONING if turn.get(key)), None)
        if reasoning is not None:
            message["reasoning_content"] = text_of(reasoning)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
    if role == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    return message


def _call(call: object) -> dict[str, Any]:
    """One tool call as templates read it: arguments as an object, also where they were given as its JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool call has no name")
    arguments = _parsed({"arguments": function.get("arguments") or {}}, "arguments", dict)
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    if isinstance(call, dict) and isinstance(call.get("id"), str):
        made["id"] = call["id"]
    return made


def _parsed(row: Mapping[str, Any], key: str, wanted: type) -> Any:
    """row[key], a `wanted` or the JSON text of one; None where there is nothing in it."""
    value = row.get(key)
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise Refused(f"{key} is no JSON: {error.msg}") from error
    if value and not isinstance(value, wanted):
        raise Refused(f"{key} is {kind(value)}, expected a {wanted.__name__} or its JSON")
    return value or None


def _turns(row: Mapping[str, Any]) -> Turns:
    """The turns of a row in any shape."""
    lists = [key for key in LISTS if key in row]
    if any(row[key] is not None for key in lists) or (lists and not any(row.get(key) is not None for key in PROMPTS)):
        key = next((key for key in lists if row[key] is not None), lists[0])
        return _listed(row[key], key)
    named = next((key for key in PROMPTS if row.get(key) is not None), None)
    if named is None:
        raise Refused(f"no field named {', '.join((*LISTS, *PROMPTS))}")
    prompt = row[named]
    if named == "instruction" and isinstance(row.get("input"), str) and row["input"]:
        prompt = f"{prompt}\n\n{row['input']}"
    asked: Turns = [("user", {"content": prompt})]
    turns = _listed(prompt, named) if _is_turns(prompt) else asked
    answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
    if answer is None:
        return turns
    said: Turns = [("assistant", {"content": answer})]
    return turns + (_listed(answer, "answer") if _is_turns(answer) else said)


def _is_turns(value: object) -> bool:
    """A list of turns, as against a list of content parts."""
    return isinstance(value, list) and all(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value
    )


def _listed(value: object, key: str) -> Turns:
    if not isinstance(value, list):
        raise Refused(f"{key} is {kind(value)}, expected a list of turns")
    turns: Turns = []
    for turn in value:
        if key == "turns" and isinstance(turn, str):
            turns.append(("user", {"content": turn}))
        elif isinstance(turn, dict) and ("role" in turn or "from" in turn):
            turns.append((str(turn["role"] if turn.get("role") is not None else turn.get("from")), turn))
        else:
            raise Refused(f"a turn of {key} has no role (or from)")
    return turns


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    found = part.get("type") if isinstance(part, dict) else None
    told = kind(part) if found is None else f"of type {found}"
    raise Refused(f"a content part is {told}, only text parts are supported")
