"""Tokens of a conversation and which of them are supervised, for any chat template, found by rendering.

A conversation is rendered and tokenized once, as a whole, without added special tokens: templates write their own.
Where each assistant turn lies in that text, tool calls and reasoning included, `template.find_turn` says. The mask is
a matter of places, not of ids, so a pad token that equals the end token changes nothing. Where a template marks its
turns with `{% generation %}`, the marks narrow what is supervised.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from headstart.train.conversations import Conversation, Messages, Report
from headstart.train.template import Chat, MaskError, find_turn, plain

__all__ = ["MaskError", "Masked", "TrainOn", "encode", "prompt_ids", "render"]

TrainOn = Literal["assistant", "all"]
SHORTEST = 3  # a head one step ahead reads token t and predicts t + 2
OTHER_PROMPT = "the template writes the last turn's prompt otherwise than when the target is asked for that turn"


class Masked(NamedTuple):
    """One row of training data; both lists are of one length. supervised[t]: token t is one the target is to say."""

    ids: list[int]
    supervised: list[bool]


def render(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Masked:
    """Tokenize a whole conversation and find what is supervised: the assistant's turns and their end-of-turn tokens.

    Supervised is what the target writes itself: contents, reasoning and tool calls as the template shows them. Headers,
    other roles, and white space that a template writes after the end-of-turn token are not.
    train_on="all" supervises every token instead. template_kwargs go to the template (e.g. enable_thinking), and so do
    the JSON schemas of `tools`.
    Raises MaskError where the template refuses the conversation, drops or repeats a turn, leaves out a tool call or the
    last turn's reasoning, or where nothing (or everything) would be supervised.
    """
    return _render(Chat(tokenizer, template_kwargs, tools), messages, train_on)


def prompt_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The ids that `generate` gets for these messages: rendered with the generation prompt, exactly one start token.

    They are the first ids of `render` for the same messages and an answer. Raises MaskError for content without text.
    """
    chat = Chat(tokenizer, template_kwargs, tools)
    return chat.tokens(chat.text(plain(messages), prompt=True))[0]


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

    A conversation's own tools and template arguments go to the template, the latter over template_kwargs.
    Rows that the template refuses, rows shorter than 3 tokens and rows whose supervised tokens are all cut off are left
    out; rows that show another prompt than `generate` would (a think block cut out of histories, a system turn dropped)
    stay. The report names each by its id. Raises ValueError if no row is left.
    """
    limit = min((n for n in (max_length, position_limit) if n is not None), default=None)
    if limit is not None and limit < SHORTEST:
        raise ValueError(f"rows would be cut at {limit} tokens; expected at least {SHORTEST}")
    chat, report, rows = Chat(tokenizer, template_kwargs), Report(), []
    for conversation in conversations:
        try:
            row = _render(chat.of(conversation), conversation.messages, train_on)
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
            if not _prompted_alike(chat.of(conversation), plain(conversation.messages)):
                report.change(OTHER_PROMPT, conversation.id)
            rows.append(cut)
    report.kept = len(rows)
    if not rows:
        raise ValueError(f"no row is left to train on out of {len(conversations)}:\n{report}")
    return rows, report


def _render(chat: Chat, messages: Sequence[Mapping[str, Any]], train_on: TrainOn) -> Masked:
    clean = plain(messages)
    text = chat.text(clean)
    ids, offsets = chat.tokens(text)
    if train_on == "all":
        return Masked(ids, [True] * len(ids))
    if train_on != "assistant":
        raise ValueError(f"train_on is {train_on!r}; expected 'assistant' or 'all'")
    marked = chat.marks(clean, ids)
    specials = [place for token, place in zip(ids, offsets, strict=True) if token in chat.special]
    supervised = [False] * len(ids)
    for index in (i for i, message in enumerate(clean) if message["role"] == "assistant"):
        turn = find_turn(chat, clean, index, text, specials)
        inside = [t for t, (a, b) in enumerate(offsets) if _begins(text, a, b, turn.start) and a < turn.stop]
        wanted = inside if marked is None else [t for t in inside if marked[t]]
        if wanted:
            wanted += [t for t in inside if offsets[t][0] >= turn.end]
        for t in wanted:
            supervised[t] = True
    if not any(supervised) or all(supervised):
        raise MaskError(f"{'every' if any(supervised) else 'no'} token would be supervised; rendered: {text[:200]!r}")
    return Masked(ids, supervised)


def _prompted_alike(chat: Chat, messages: Messages) -> bool:
    """Whether the row begins as the prompt of its last assistant turn does."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    try:
        return last == 0 or chat.text(messages).startswith(chat.text(messages[:last], prompt=True))
    except MaskError:  # it takes no conversation that ends there
        return True


def _begins(text: str, a: int, b: int, start: int) -> bool:
    """Token [a, b) begins at or after `start`, white space that it shares with the header aside."""
    return a >= start or (b > start and not text[a:start].strip())
