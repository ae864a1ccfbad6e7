"""Masks under chat templates taken from released packages; `templates/sources.json` says where each is from, and its
licence. With and without generation marks, with thinking, tools and strict alternation."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from headstart.train.conversations import Conversation
from headstart.train.masking import OTHER_PROMPT, Masked, MaskError, encode, prompt_ids, render
from headstart.train.template import MARKS, Chat, spelled, user_prefix
from tests.byte_tokenizer import byte_tokenizer

FOLDER = Path(__file__).parent / "templates"
ENTRIES = {
    Path(entry["file"]).stem: entry for entry in json.loads((FOLDER / "sources.json").read_text(encoding="utf-8"))
}

CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "weather", "arguments": {"city": "Bonn", "days": 2}},
}
TOOL = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}},
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yo"},
            {"role": "user", "content": "yo?"},
            {"role": "assistant", "content": "no é🚀"},
        ]
    },
    "system": {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yo"},
        ]
    },
    "think": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yo", "reasoning_content": "one"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "no", "reasoning_content": "two"},
        ]
    },
    "tools": {
        "tools": [{"type": "function", "function": TOOL}],
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "name": "weather", "tool_call_id": "call00001"},
            {"role": "assistant", "content": "It is 12."},
        ],
    },
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the template and the special tokens it writes."""
    entry = ENTRIES[name]
    template = (FOLDER / entry["file"]).read_text(encoding="utf-8")
    named = [token for token in entry["specials"] if token not in ("<s>", "</s>")]
    tokenizer = byte_tokenizer(template=template, named=named)
    tokenizer.eos_token = entry["eos"]
    if entry["bos"]:
        tokenizer.bos_token = entry["bos"]
    return tokenizer


def spoken(tokenizer: PreTrainedTokenizerFast, row: Masked) -> list[str]:
    """The supervised runs of a row as text."""
    runs: list[list[int]] = []
    for t, (token, kept) in enumerate(zip(row.ids, row.supervised, strict=True)):
        if kept and (t == 0 or not row.supervised[t - 1]):
            runs.append([])
        if kept:
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


CALL_JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call><|im_end|>'
DS_END = "<｜end▁of▁sentence｜>"
DS_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Bonn", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' + DS_END
)
GLM_CALL = (
    "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>"
)
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn", "days": 2}, "id": "call00001"}]</s>'
GPTOSS_CALL = " to=functions.weather<|channel|>commentary json<|message|>" + '{"city": "Bonn", "days": 2}' + "<|call|>"
NO_REASONING = "leaves out the reasoning of the last assistant turn"
NO_CALL = "leaves out the tool call of assistant turn 1"
EMPTY = "<think>\n\n</think>\n\n"

# What is supervised, run by run; a text instead: why the template cannot show that conversation.
EXPECTED: dict[str, dict[str, list[str] | str]] = {
    "smollm2": {
        "chat": ["yo<|im_end|>", "no é🚀<|im_end|>"],
        "system": ["yo<|im_end|>"],
        "think": NO_REASONING,
        "tools": NO_CALL,
    },
    "qwen2_5": {
        "chat": ["yo<|im_end|>", "no é🚀<|im_end|>"],
        "system": ["yo<|im_end|>"],
        "think": NO_REASONING,
        "tools": [CALL_JSON, "It is 12.<|im_end|>"],
    },
    "qwen3": {  # the think block is cut out of the history
        "chat": ["yo<|im_end|>", EMPTY + "no é🚀<|im_end|>"],
        "system": [EMPTY + "yo<|im_end|>"],
        "think": ["yo<|im_end|>", "<think>\ntwo\n</think>\n\nno<|im_end|>"],
        "tools": [CALL_JSON, EMPTY + "It is 12.<|im_end|>"],
    },
    "qwen3_training": {
        "chat": [EMPTY + "yo<|im_end|>", EMPTY + "no é🚀<|im_end|>"],
        "system": [EMPTY + "yo<|im_end|>"],
        "think": ["<think>\none\n</think>\n\nyo<|im_end|>", "<think>\ntwo\n</think>\n\nno<|im_end|>"],
        "tools": [EMPTY + CALL_JSON, EMPTY + "It is 12.<|im_end|>"],
    },
    "deepseekv3": {  # its prompt opens a think block that no history shows
        "chat": ["yo" + DS_END, "no é🚀" + DS_END],
        "system": ["yo" + DS_END],
        "think": NO_REASONING,
        "tools": [DS_CALL, "It is 12." + DS_END],
    },
    "deepseekv3_training": {
        "chat": ["yo" + DS_END, "no é🚀" + DS_END],
        "system": ["yo" + DS_END],
        "think": NO_REASONING,
        "tools": [DS_CALL, "It is 12." + DS_END],
    },
    "gptoss": {  # only the last turn of a conversation ends it
        "chat": ["<|channel|>final<|message|>yo<|end|>", "<|channel|>final<|message|>no é🚀<|return|>"],
        "system": ["<|channel|>final<|message|>yo<|return|>"],
        "think": [
            "<|channel|>final<|message|>yo<|end|>",
            "<|channel|>analysis<|message|>two<|end|><|start|>assistant<|channel|>final<|message|>no<|return|>",
        ],
        "tools": [GPTOSS_CALL, "<|channel|>final<|message|>It is 12.<|return|>"],
    },
    "glm4moe": {  # the next turn's header ends a turn
        "chat": ["\n<think></think>\nyo<|user|>", "\n<think></think>\nno é🚀"],
        "system": ["\n<think></think>\nyo"],
        "think": ["\n<think></think>\nyo<|user|>", "\n<think>two</think>\nno"],
        "tools": [GLM_CALL, "\n<think></think>\nIt is 12."],
    },
    "phi3_5": {  # an end-of-text token follows the last turn
        "chat": ["yo<|end|>", "no é🚀<|end|>"],
        "system": ["yo<|end|>"],
        "think": NO_REASONING,
        "tools": NO_CALL,
    },
    "mistral_v1": {  # roles must alternate; no generation prompt
        "chat": [" yo</s>", " no é🚀</s>"],
        "system": [" yo</s>"],
        "think": NO_REASONING,
        "tools": "roles must alternate",
    },
    "mistral_v2v3": {  # the system turn is written only while the user has the last word
        "chat": [" yo</s>", " no é🚀</s>"],
        "system": ["yo</s>"],
        "think": NO_REASONING,
        "tools": [MISTRAL_CALL, " It is 12.</s>"],
    },
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_template_is_as_its_package_has_it_and_free_to_pass_on(name: str) -> None:
    entry = ENTRIES[name]
    assert hashlib.sha256((FOLDER / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    assert {entry["package_licence"], entry["model_licence"]} <= {"Apache-2.0", "MIT"}
    assert entry["package"].split()[1][0].isdigit()
    assert entry["path"]


def test_the_kinds_of_templates_are_there() -> None:
    assert len(ENTRIES) >= 8
    assert ENTRIES.keys() == EXPECTED.keys()
    marked = [name for name in ENTRIES if MARKS.search((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))]
    assert marked == ["qwen3_training", "deepseekv3_training"]


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", EXPECTED)
def test_exactly_the_assistant_turns_are_supervised(name: str, case: str) -> None:
    tokenizer, given, expected = tokenizer_of(name), CONVERSATIONS[case], EXPECTED[name][case]
    if isinstance(expected, str):
        with pytest.raises(MaskError, match=expected):
            render(given["messages"], tokenizer, tools=given.get("tools"))
        return
    row = render(given["messages"], tokenizer, tools=given.get("tools"))
    assert spoken(tokenizer, row) == expected
    joins = (name, case) == ("deepseekv3", "tools")  # it joins arguments to text, and so takes them as JSON alone
    messages = [spelled(message) for message in given["messages"]] if joins else given["messages"]
    whole = tokenizer.apply_chat_template(messages, tools=given.get("tools"), tokenize=True)
    assert row.ids == whole["input_ids"]


@pytest.mark.parametrize("case", ["chat", "system", "think", "tools"])
@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_supervised_begins_where_generate_begins(name: str, case: str) -> None:
    """The row up to its last supervised run is the prompt that `generate` gets, or the report says that it is not."""
    tokenizer, given = tokenizer_of(name), CONVERSATIONS[case]
    if isinstance(EXPECTED[name][case], str):
        return
    messages, tools = given["messages"], given.get("tools")
    (row,), report = encode([Conversation("r", messages, tools)], tokenizer)
    prompt = prompt_ids(messages[:-1], tokenizer, tools=tools)
    begins = row.ids[: len(prompt)] == prompt
    assert begins == (OTHER_PROMPT not in report.changed)
    assert begins == (
        not (name.startswith("deepseekv3") and case != "tools") and (name, case) != ("mistral_v2v3", "system")
    )
    if begins:
        assert row.supervised[len(prompt)]
        assert not row.supervised[len(prompt) - 1]


def test_thinking_off_is_an_argument_of_the_template() -> None:
    tokenizer, chat = tokenizer_of("qwen3"), CONVERSATIONS["chat"]["messages"]
    off = {"enable_thinking": False}
    row = render(chat, tokenizer, template_kwargs=off)
    assert spoken(tokenizer, row) == ["yo<|im_end|>", "no é🚀<|im_end|>"]  # the prompt has written the empty block
    prompt = prompt_ids(chat[:3], tokenizer, template_kwargs=off)
    assert row.ids[: len(prompt)] == prompt
    (kept,), _ = encode([Conversation("r", chat, None, off)], tokenizer)
    assert kept == row


def test_two_calls_and_a_text_before_them() -> None:
    second = {"type": "function", "function": {"name": "time", "arguments": {}}}
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, second], "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "and?"}, turn]
    expected = (
        "<think>\nhm\n</think>\n\nLet me see.\n"
        + CALL_JSON.removesuffix("<|im_end|>")
        + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>'
    )
    for name in ("qwen3", "qwen3_training"):
        tokenizer = tokenizer_of(name)
        assert spoken(tokenizer, render(messages, tokenizer)) == [expected]


PREFIXES = {
    "qwen3": ("<|im_start|>user\n", "<|im_end|>"),
    "deepseekv3": ("<｜begin▁of▁sentence｜><｜User｜>", "<｜Assistant｜>"),
    "glm4moe": ("[gMASK]<sop><|user|>\n", "<|assistant|>"),
    "phi3_5": ("<|user|>\n", "<|end|>"),
    "mistral_v1": ("<s> [INST] ", "[/INST]"),
    "mistral_v2v3": ("<s>[INST] ", "[/INST]"),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_where_a_user_begins_and_ends(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ids, closer = user_prefix(Chat(tokenizer))
    assert (tokenizer.decode(ids), closer) == PREFIXES[name]
