"""A chat template seen from outside: what it writes, and where in that text an assistant turn lies.

A turn is found by writing the conversation again with sentinels in its place: what differs is the turn. Its start moves
left to where the generation prompt ends, since what the template puts between (a think block, a space, the opening of a
tool call) the target writes itself. Its end moves right over the end-of-turn token.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from headstart.train.conversations import Conversation, Messages, Refused, text_of

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
EXTRAS = ("reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message, beside role and content
Offsets = Sequence[tuple[int, int]]


class MaskError(ValueError):
    """The supervised tokens of a conversation cannot be determined, or there are none."""


class Turn(NamedTuple):
    """Where an assistant turn lies in the rendered text, in characters: start <= end <= stop."""

    start: int  # where the generation prompt ends
    end: int  # where the content, or the last tool call's arguments, end
    stop: int  # where the end-of-turn token ends


class Chat:
    """A tokenizer with its chat template and the template's arguments; every way to render goes through here."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} gives no character offsets; expected a fast tokenizer")
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; set tokenizer.chat_template to the one the target was tuned with"
            )
        self.tokenizer, self.kwargs = tokenizer, dict(template_kwargs or {})
        self.tools: list[Any] | None = [dict(tool) for tool in tools] if tools else None
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special.update(tokenizer.all_special_ids)

    def of(self, conversation: Conversation) -> "Chat":
        """This chat with a conversation's own tools and template arguments, which win over those given here."""
        if not conversation.tools and not conversation.template_kwargs:
            return self
        other = copy.copy(self)
        other.kwargs = self.kwargs | (conversation.template_kwargs or {})
        other.tools = list(conversation.tools) if conversation.tools else None
        return other

    def text(self, messages: Messages, *, prompt: bool = False) -> str:
        """What the template writes. Raises MaskError where it refuses."""
        return str(self._apply(messages, tokenize=False, add_generation_prompt=prompt))

    def tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters [a, b) of `text` that each stands for."""
        out: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(out["input_ids"]), [(int(a), int(b)) for a, b in out["offset_mapping"]]

    def specials(self, text: str) -> list[tuple[int, int]]:
        """The characters [a, b) of each special token in `text`."""
        return [place for token, place in zip(*self.tokens(text), strict=True) if token in self.special]

    def marks(self, messages: Messages, ids: list[int]) -> list[bool] | None:
        """The template's own assistant mask, one entry a token; None if it has no generation marks."""
        if not MARKS.search(self.tokenizer.get_chat_template()):
            return None
        out = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        if list(out["input_ids"]) != ids:
            raise MaskError("the template renders otherwise when it is asked for its generation marks")
        return [bool(mark) for mark in out["assistant_masks"]]

    def _apply(self, messages: Messages, **how: Any) -> Any:
        """The tokenizer's rendering; some templates join a call's arguments to text: they get them as JSON."""
        calls = any("tool_calls" in message for message in messages)
        for told in (messages, [spelled(message) for message in messages]) if calls else (messages,):
            try:
                return self.tokenizer.apply_chat_template(_aliased(told), tools=self.tools, **how, **self.kwargs)
            except TypeError as error:
                refusal: Exception = error
            except (TemplateError, ValueError, LookupError, AttributeError) as error:
                refusal = error
                break
        raise MaskError(f"the chat template refuses the conversation: {refusal}") from refusal


def plain(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Messages with contents as text and nothing in them that is empty. Raises MaskError for content without text."""
    try:
        return [_plain(message) for message in messages]
    except Refused as error:
        raise MaskError(str(error)) from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    extras = {key: message[key] for key in EXTRAS if message.get(key)}
    content = message.get("content")
    text = "" if content is None and "tool_calls" in extras else text_of(content)
    return {"role": str(message["role"]), "content": text, **extras}


def user_prefix(chat: Chat) -> tuple[list[int], str]:
    """(ids up to where the text of a first user turn begins, what the template writes right behind that text)."""
    sentinel = _sentinels("")[0]
    parts = chat.text([{"role": "user", "content": sentinel}], prompt=True).split(sentinel)
    if len(parts) != 2:
        raise MaskError(f"the chat template writes a user's text {len(parts) - 1} times; expected once")
    behind = parts[1].strip()
    places = chat.specials(behind)
    return chat.tokens(parts[0])[0], behind[slice(*places[0])] if places else behind.splitlines()[0] if behind else ""


def find_turn(chat: Chat, messages: Messages, index: int, text: str, specials: Offsets) -> Turn:
    """Where turn `index` lies in `text`, the rendering of all messages, whose special tokens lie at `specials`."""
    marks = _sentinels(text)
    head, tail = messages[:index], messages[index + 1 :]
    stand_in = _stand_in(messages[index], marks)
    before, after, only_call = _around(chat, [*head, stand_in, *tail], index, marks)
    first = len(before) if text.startswith(before) else _shared(text, before)
    kept = _shared(text[first:][::-1], after[::-1])
    lost = len(after) - kept  # what only the stand-in has, as the quote that closes its argument
    end = len(text) - kept
    alone = chat.text([*head, stand_in])
    own = alone[max(alone.rfind(mark) for mark in marks) + 1 :]
    own = own[: _shared(own, after)]  # what the template writes behind this turn, whatever comes next
    calls = "tool_calls" in stand_in
    if lost > (len(own) if calls else 0):
        raise MaskError(f"assistant turn {index} cannot be told from the text around it; rendered: {text[:200]!r}")
    own = own[lost:]
    start = _start(chat, head, text, first)
    if only_call and start == first:
        start = _header_end(chat, head, tail, text, marks[1])
    if calls:
        return Turn(start, end, _call_stop(chat, head, text, end, own, specials, marks[1]))
    stop = next((b for a, b in specials if a == end or end < a < end + len(own)), end + len(own.rstrip()))
    return Turn(start, end, stop)


def _sentinels(text: str) -> tuple[str, str, str]:
    """For reasoning, content and arguments: characters of private use, which no template strips, not in `text`."""
    free = (c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
    return next(free), next(free), next(free)


def _stand_in(message: Mapping[str, Any], marks: tuple[str, str, str]) -> dict[str, Any]:
    """The turn with a sentinel for its reasoning, its content and its last call's arguments, where it has them."""
    made = dict(message)
    if "reasoning_content" in message:
        made["reasoning_content"] = marks[0]
    if message["content"] or "tool_calls" not in message:
        made["content"] = marks[1]
    if "tool_calls" in message:
        *others, last = message["tool_calls"]
        function = {**last["function"], "arguments": {marks[2]: marks[2]}}
        made["tool_calls"] = [*others, {**last, "function": function}]
    return made


def _around(chat: Chat, messages: Messages, index: int, marks: tuple[str, str, str]) -> tuple[str, str, bool]:
    """What stands before the first and behind the last sentinel of turn `index`, each of which must have its place; and
    whether the turn shows nothing but a tool call."""
    text, turn = chat.text(messages), messages[index]
    if turn["content"] and text.count(marks[1]) != 1:
        raise MaskError(f"the chat template writes assistant turn {index} {text.count(marks[1])} times; expected once")
    if "tool_calls" in turn and marks[2] not in text:
        raise MaskError(f"the chat template leaves out the tool call of assistant turn {index}")
    last = all(message["role"] != "assistant" for message in messages[index + 1 :])
    if last and "reasoning_content" in turn and marks[0] not in text:
        raise MaskError("the chat template leaves out the reasoning of the last assistant turn")
    places = [text.find(mark) for mark in marks if mark in text]
    only_call = marks[0] not in text and marks[1] not in text
    return text[: min(places)], text[max(text.rfind(mark) for mark in marks) + 1 :], only_call


def _start(chat: Chat, head: Messages, text: str, first: int) -> int:
    """Where the generation prompt for the turn after `head` ends, or `first` where this text does not hold it."""
    try:
        prompt = chat.text(head, prompt=True) if head else ""
    except MaskError:
        return first
    if not prompt or not text.startswith(prompt) or len(prompt) > first:
        return first
    between = text[len(prompt) : first]
    if not between.strip() or prompt != chat.text(head):
        return len(prompt)
    return first  # the template knows no generation prompt: what lies between is the header


def _header_end(chat: Chat, head: Messages, tail: Messages, text: str, mark: str) -> int:
    """Where a turn that is only a tool call begins: where one of plain text would."""
    for rest in (tail, []):
        try:
            before = chat.text([*head, {"role": "assistant", "content": mark}, *rest]).split(mark)[0]
        except MaskError:  # roles that no longer alternate
            continue
        if text.startswith(before.rstrip()):
            return _shared(text, before)
    raise MaskError(f"the beginning of assistant turn {len(head)}, a tool call, cannot be found")


def _call_stop(chat: Chat, head: Messages, text: str, end: int, own: str, specials: Offsets, mark: str) -> int:
    """Where the end-of-turn token behind a tool call ends.

    A plain turn's end token if `own` has it; where plain turns have none, the special token that the next turn begins
    with; else the last special token in `own`, or `own` without the white space after it.
    """
    try:
        behind = chat.text([*head, {"role": "assistant", "content": mark}]).split(mark)[-1]
        ends = chat.specials(behind)
        closer = behind[slice(*ends[0])] if ends else None
    except MaskError:
        closer = ""
    inside = [(a, b) for a, b in specials if end <= a < end + len(own)]
    following = [b for a, b in specials if a == end + len(own)]
    if closer is None and following:
        return following[0]
    named = [b for a, b in inside if text[a:b] == closer]
    return named[0] if named else inside[-1][1] if inside else end + len(own.rstrip())


def _aliased(messages: Messages) -> Messages:
    """Reasoning under both names that templates read it by."""
    return [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]


def spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as JSON text."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
