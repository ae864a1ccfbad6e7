"""Tokens of a conversation and which of them are supervised, for any chat template, found by rendering.

A conversation is rendered and tokenized once, as a whole, without added special tokens: templates write their own. To
find assistant turn i in that text, the conversation is rendered again with a sentinel as its content: what differs is
the turn. Its start moves left to where the generation prompt ends, since what the template puts between (a think block,
a space) the target writes itself. Its end moves right over the end-of-turn token. The mask is a matter of places, not
of ids, so a pad token that equals the end token changes nothing. Where a template marks its turns with
`{% generation %}`, the marks narrow what is supervised.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from headstart.train.conversations import Conversation, Messages, Refused, Report, text_of

TrainOn = Literal["assistant", "all"]
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHORTEST = 3  # a head one step ahead reads token t and predicts t + 2


class MaskError(ValueError):
    """The supervised tokens of a conversation cannot be determined, or there are none."""


class Masked(NamedTuple):
    """One row of training data; both lists are of one length. supervised[t]: token t is one the target is to say."""

    ids: list[int]
    supervised: list[bool]


class _Turn(NamedTuple):
    """Where an assistant turn lies in the rendered text, in characters: start <= end <= stop."""

    start: int  # where the generation prompt ends
    end: int  # where the content ends
    stop: int  # where the end-of-turn token ends


def render(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    template_kwargs: Mapping[str, Any] | None = None,
) -> Masked:
    """Tokenize a whole conversation and find what is supervised: the assistant's contents and their end-of-turn tokens.

    Headers, other roles, and white space that a template writes after the end-of-turn token are not supervised.
    train_on="all" supervises every token instead. template_kwargs go to the template (e.g. enable_thinking).
    Raises MaskError where the template refuses the conversation, drops or repeats a turn, or where nothing (or
    everything) would be supervised.
    """
    return _render(_Chat(tokenizer, template_kwargs), messages, train_on)


def prompt_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids that `generate` gets for these messages: rendered with the generation prompt, exactly one start token.

    They are the first ids of `render` for the same messages and an answer. Raises MaskError for content without text.
    """
    chat = _Chat(tokenizer, template_kwargs)
    return chat.tokens(chat.text(_plain(messages), prompt=True))[0]


def encode(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    position_limit: int | None = None,
    train_on: TrainOn = "assistant",
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[Masked], Report]:
    """Render conversations and cut each at the smaller of max_length and position_limit (the target's), in tokens.

    Rows that the template refuses, rows shorter than 3 tokens and rows whose supervised tokens are all cut off are left
    out. The report names each by its id. Raises ValueError if no row is left.
    """
    limit = min((n for n in (max_length, position_limit) if n is not None), default=None)
    if limit is not None and limit < SHORTEST:
        raise ValueError(f"rows would be cut at {limit} tokens; expected at least {SHORTEST}")
    chat, report, rows = _Chat(tokenizer, template_kwargs), Report(), []
    for conversation in conversations:
        try:
            row = _render(chat, conversation.messages, train_on)
        except MaskError as error:
            report.skip(str(error).split("; rendered:")[0], conversation.id)
            continue
        cut = Masked(row.ids[:limit], row.supervised[:limit])
        if len(cut.ids) < SHORTEST:
            report.skip(f"fewer than {SHORTEST} tokens", conversation.id)
        elif not any(cut.supervised):
            report.skip(f"nothing supervised in the first {limit} tokens", conversation.id)
        else:
            if len(cut.ids) < len(row.ids):
                report.change(f"cut at {limit} tokens", conversation.id)
            rows.append(cut)
    report.kept = len(rows)
    if not rows:
        raise ValueError(f"no row is left to train on out of {len(conversations)}:\n{report}")
    return rows, report


class _Chat:
    """A tokenizer with its chat template; every way to render and tokenize goes through here."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} gives no character offsets; expected a fast tokenizer")
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; set tokenizer.chat_template to the one the target was tuned with"
            )
        self.tokenizer, self.kwargs = tokenizer, dict(template_kwargs or {})
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special.update(tokenizer.all_special_ids)

    def text(self, messages: Messages, *, prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt, **self.kwargs
                )
            )
        except TemplateError as error:
            raise MaskError(f"the chat template refuses the conversation: {error}") from error

    def tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters [a, b) of `text` that each stands for."""
        out: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(out["input_ids"]), [(int(a), int(b)) for a, b in out["offset_mapping"]]

    def marks(self, messages: Messages, ids: list[int]) -> list[bool] | None:
        """The template's own assistant mask, one entry a token; None if it has no generation marks."""
        if not MARKS.search(self.tokenizer.get_chat_template()):
            return None
        out: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self.kwargs
        )
        if list(out["input_ids"]) != ids:
            raise MaskError("the template renders otherwise when it is asked for its generation marks")
        return [bool(mark) for mark in out["assistant_masks"]]


def _render(chat: _Chat, messages: Sequence[Mapping[str, Any]], train_on: TrainOn) -> Masked:
    clean = _plain(messages)
    text = chat.text(clean)
    ids, offsets = chat.tokens(text)
    if train_on == "all":
        return Masked(ids, [True] * len(ids))
    if train_on != "assistant":
        raise ValueError(f"train_on is {train_on!r}; expected 'assistant' or 'all'")
    marked = chat.marks(clean, ids)
    supervised = [False] * len(ids)
    for index in (i for i, message in enumerate(clean) if message["role"] == "assistant"):
        turn = _find_turn(chat, clean, index, text, ids, offsets)
        inside = [t for t, (a, b) in enumerate(offsets) if _begins(text, a, b, turn.start) and a < turn.stop]
        wanted = inside if marked is None else [t for t in inside if marked[t]]
        if wanted:
            wanted += [t for t in inside if offsets[t][0] >= turn.end]
        for t in wanted:
            supervised[t] = True
    if not any(supervised) or all(supervised):
        raise MaskError(f"{'every' if any(supervised) else 'no'} token would be supervised; rendered: {text[:200]!r}")
    return Masked(ids, supervised)


def _find_turn(
    chat: _Chat, messages: Messages, index: int, text: str, ids: list[int], offsets: list[tuple[int, int]]
) -> _Turn:
    """Where turn `index` lies in `text`, the rendering of all messages."""
    sentinel = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)  # private use: no template strips it
    stand_in = {**messages[index], "content": sentinel}
    parts = chat.text([*messages[:index], stand_in, *messages[index + 1 :]]).split(sentinel)
    if len(parts) != 2:
        raise MaskError(f"the chat template writes assistant turn {index} {len(parts) - 1} times; expected once")
    before, after = parts
    first = len(before) if text.startswith(before) else _shared(text, before)
    end = len(text) - len(after)
    if not text.endswith(after) or first > end:
        raise MaskError(f"assistant turn {index} cannot be told from the text around it; rendered: {text[:200]!r}")
    start = _prompt_end(chat, messages[:index], text, first)
    alone = chat.text([*messages[:index], stand_in]).split(sentinel)[-1]
    own = alone[: _shared(alone, text[end:])]  # what the template writes after this turn, whatever comes next
    return _Turn(start, end, _turn_stop(chat, text, end, own, ids, offsets))


def _prompt_end(chat: _Chat, messages: Messages, text: str, first: int) -> int:
    """Where the generation prompt for the turn after `messages` ends, or `first` where this text does not hold it."""
    try:
        prompt = chat.text(messages, prompt=True) if messages else ""
    except MaskError:
        return first
    if not prompt or not text.startswith(prompt) or len(prompt) > first:
        return first
    between = text[len(prompt) : first]
    if not between.strip() or prompt != chat.text(messages):
        return len(prompt)
    return first  # the template knows no generation prompt: what lies between is the header


def _turn_stop(chat: _Chat, text: str, end: int, own: str, ids: list[int], offsets: list[tuple[int, int]]) -> int:
    """Where the end-of-turn token ends: the special token right after the content or else the first one in `own`.

    Where the marker is spelled in ordinary tokens it is `own` without the white space after it.
    """
    for token, (a, b) in zip(ids, offsets, strict=True):
        if a >= end and token in chat.special and (a == end or a < end + len(own)):
            return b
    return end + len(own.rstrip())


def _begins(text: str, a: int, b: int, start: int) -> bool:
    """Token [a, b) begins at or after `start`, white space that it shares with the header aside."""
    return a >= start or (b > start and not text[a:start].strip())


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _plain(messages: Sequence[Mapping[str, Any]]) -> Messages:
    try:
        return [{"role": str(message["role"]), "content": text_of(message.get("content"))} for message in messages]
    except Refused as error:
        raise MaskError(str(error)) from error
