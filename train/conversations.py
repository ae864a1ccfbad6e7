"""Rows in any common shape become conversations; whatever is skipped or changed is counted and named.

Shapes read: `messages` (role / content), ShareGPT `conversations` (from / value), `turns` (a list of user texts), and
`prompt` or `question` or `instruction` (+ `input`) with `answer`, `response`, `completion` or `output`.

Policy: assistant turns before the first user turn are dropped, the rest of the row stays; one unusable row never ends a
run; an unknown role refuses its row, so no turn disappears silently. Files are read with plain `json`, row by row: no
schema is inferred, and a field may be a string in one row and a number or a list in the next.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

Messages = list[dict[str, str]]  # each {"role": one of ROLES, "content": text}

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant", "developer": "system", "observation": "tool"}
LISTS = ("messages", "conversations", "conversation", "turns")
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "response", "completion", "output")
IDS = ("id", "question_id", "conversation_id")
SHOWN = 5  # names a printed report gives for each reason


class Conversation(NamedTuple):
    """`id` is the row's own id, or a hash of its messages where it has none: never a position in a file."""

    id: str
    messages: Messages


@dataclass
class Report:
    """What a step kept, skipped and changed: for each reason the names (row id, or file:line) it applies to."""

    kept: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        self.skipped.setdefault(reason, []).append(name)

    def change(self, what: str, name: str) -> None:
        self.changed.setdefault(what, []).append(name)

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
        raise Refused(f"content is {_kind(content)}, expected text or a list of text parts")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise Refused("content holds half a surrogate pair, which no tokenizer takes") from error
    return content


def message_hash(messages: Messages) -> str:
    """16 hex digits that depend on roles and contents alone: the key of a row without an id of its own."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a .jsonl or .json file, or of a folder: its *.jsonl files by name or, if it has none, its *.json files.

    A .json file holds one list of objects, or one object a line. Raises ValueError naming file and line of broken text.
    """
    for _, row in _placed_rows(Path(path)):
        yield row


def load_conversations(
    paths: Sequence[str | Path], *, roles: Mapping[str, str] | None = None, trainable: bool = True
) -> tuple[list[Conversation], Report]:
    """Read files or folders into conversations.

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
        for place, row in _placed_rows(Path(path)):
            own = next((str(row[key]) for key in IDS if row.get(key) is not None), None)
            try:
                messages = _messages(row, names)
                messages = _trim(messages, own or place, trainable, report)
            except Refused as refusal:
                report.skip(str(refusal), own or place)
                continue
            kept.append(Conversation(own or message_hash(messages), messages))
    report.kept = len(kept)
    for reason, rows in report.skipped.items():
        if reason.startswith("unknown role"):
            log.warning("%s: %d rows refused", reason, len(rows))
    return kept, report


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
    answers = [m["content"] for m in rest if m["role"] == "assistant"]
    if not answers:
        raise Refused("no assistant turn after a user turn")
    if not all(answer.strip() for answer in answers):
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
    messages = [{"role": names[role], "content": text_of(content)} for role, content in turns]
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(system)})
    return messages


def _turns(row: Mapping[str, Any]) -> list[tuple[str, object]]:
    """(role as written, content as written) for each turn of a row in any shape."""
    for key in LISTS:
        if key in row:
            return _listed(row[key], key)
    named = next((key for key in PROMPTS if key in row), None)
    if named is None:
        raise Refused(f"no field named {', '.join((*LISTS, *PROMPTS))}")
    prompt = row[named]
    if named == "instruction" and isinstance(row.get("input"), str) and row["input"]:
        prompt = f"{prompt}\n\n{row['input']}"
    turns = _listed(prompt, named) if _is_turns(prompt) else [("user", prompt)]
    answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
    if answer is None:
        return turns
    return turns + (_listed(answer, "answer") if _is_turns(answer) else [("assistant", answer)])


def _is_turns(value: object) -> bool:
    """A list of turns, as against a list of content parts."""
    return isinstance(value, list) and all(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value
    )


def _listed(value: object, key: str) -> list[tuple[str, object]]:
    if not isinstance(value, list):
        raise Refused(f"{key} is {_kind(value)}, expected a list of turns")
    turns: list[tuple[str, object]] = []
    for turn in value:
        if key == "turns" and isinstance(turn, str):
            turns.append(("user", turn))
        elif isinstance(turn, dict) and ("role" in turn or "from" in turn):
            if turn.get("tool_calls"):
                raise Refused("tool_calls are not supported: write the call into the assistant's content")
            content = turn.get("content") if "content" in turn else turn.get("value")
            turns.append((str(turn["role"] if "role" in turn else turn["from"]), content))
        else:
            raise Refused(f"a turn of {key} has no role (or from)")
    return turns


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    raise Refused(
        f"a content part is {_kind(part) if kind is None else f'of type {kind}'}, only text parts are supported"
    )


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _placed_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", row) for each row; the line of a row inside a JSON list is its number in the list."""
    if path.is_dir():
        files = sorted(path.glob("*.jsonl")) or sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"{path}: a folder without .jsonl or .json files; expected at least one")
        for file in files:
            yield from _placed_rows(file)
        return
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(
            f"{path}: expected a .jsonl or .json file or a folder of them; save other formats as JSON Lines"
        )
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; expected JSON Lines with one row a line")
    with path.open(encoding="utf-8-sig") as lines:
        listed = path.suffix == ".json" and lines.read(4096).lstrip().startswith("[")
        lines.seek(0)
        rows = enumerate(_parse(lines.read(), path, 1)) if listed else _lines(lines, path)
        for number, row in rows:
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}:{number}: found {_kind(row)}, expected an object such as {{'messages': [...]}}"
                )
            yield f"{path.name}:{number}", row


def _lines(lines: Iterator[str], path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _parse(line.strip(), path, number)


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{line + error.lineno - 1}: {error.msg}; expected one JSON object a line") from error
