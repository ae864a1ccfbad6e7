"""Which tokens are supervised, under templates of many families, token by token."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from headstart.train.conversations import Conversation
from headstart.train.masking import Masked, MaskError, encode, prompt_ids, render
from tests.byte_tokenizer import END, START, TEMPLATE, byte_tokenizer

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no é🚀"},
]
SYSTEM = {"role": "system", "content": "be yo"}


def spoken(tokenizer: PreTrainedTokenizerFast, row: Masked) -> list[str]:
    """The supervised runs of a row as text."""
    runs: list[list[int]] = []
    for t, (token, kept) in enumerate(zip(row.ids, row.supervised, strict=True)):
        if kept and (t == 0 or not row.supervised[t - 1]):
            runs.append([])
        if kept:
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def turns(text: str) -> list[dict[str, str]]:
    """u:..|a:..  ->  messages."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[turn[0]], "content": turn[2:]} for turn in text.split("|")]


DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|turn|>system\nbe good</s>\n' }}{% endif %}"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|special_10|>' + m['role'] + '<|special_11|>\n\n' + m['content'] | trim"
    " + '<|special_12|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|special_10|>assistant<|special_11|>\n\n' }}"
    "{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('no system turn here') }}{% endif %}{% endfor %}"
)
MISTRAL_SPACED = MISTRAL.replace("m['content'] + eos_token", "m['content'] + ' ' + eos_token")
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<|special_10|>' + role + '\n' + m['content'] | trim + '<|special_11|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|special_10|>model\n' }}{% endif %}"
)
# After the last user turn the think block is written (an empty one if need be), before it is cut out of the history.
QWEN = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set parts = m['content'].split('</think>') %}"
    "{{ '<|turn|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '') + '\n</think>\n\n' }}"
    "{% endif %}{{ parts[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
# FC-010's: the block is cut out of all assistant turns but the last.
STRIP = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
# The generation prompt opens a think block that no history shows.
OPENS_THINK = STRIP.replace("not loop.last", "true").replace(
    "assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"
)
CLOSES_THINK = QWEN.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n\n</think>\n\n' }}{% endif %}")
# The last turn closes with another token than the others; an end-of-text token follows.
HARMONY = (
    "{% for m in messages %}{{ '<|special_10|>' + m['role'] + '<|special_11|>' + m['content'] }}"
    "{{ '<|special_12|>' if m['role'] == 'assistant' and loop.last else '<|special_13|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|special_10|>assistant' }}{% else %}{{ eos_token }}{% endif %}"
)
# An answer has no end token of its own: the next header ends it.
GLM = (
    "{% for m in messages %}{{ '<|special_1' + ('0' if m['role'] == 'user' else '1') + '|>\n' + m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|special_11|>\n' }}{% endif %}"
)
# A space before the end token, and an end-of-text token after the last turn.
PHI = TEMPLATE.replace("m['content'] +", "m['content'] + ' ' +").replace("{% endif %}", "{% else %}<pad>{% endif %}")
# No special token anywhere; the marker is spelled in bytes.
SPELLED = TEMPLATE.replace("<|turn|>", "<<").replace("eos_token", "'>>'")
SPELLED_END = SPELLED.replace("{% endif %}", "{% else %}[END]{% endif %}")
# No marker at all behind an answer.
PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
)
NO_PROMPT = TEMPLATE.split("{% if add")[0]  # ChatML that knows no generation prompt
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ '<|turn|>assistant\n' + m['content'] +"
    " '</s>\n' }}{% endgeneration %}{% else %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)  # marks with the header and the line end inside, as published ones have
MARKED_CONTENT = TEMPLATE.replace(
    "m['content'] + eos_token", "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ eos_token",
)  # fmt: skip
MARKED_LAST = MARKED.replace("m['role'] == 'assistant' %}", "m['role'] == 'assistant' and loop.last %}")

THINK = "u:hi|a:<think>one</think>yo|u:and?|a:<think>two</think>no"
HARMONY_RUNS = ["<|special_11|>yo<|special_13|>", "<|special_11|>no<|special_12|>"]
# template, conversation, the supervised runs; whether prompt_ids is the start of the row for every assistant turn
CASES: dict[str, tuple[str, str, list[str], bool]] = {
    "chatml": (TEMPLATE, "u:hi|a:yo|u:and?|a:no", ["yo</s>", "no</s>"], True),
    "chatml system": (TEMPLATE, "s:be yo|u:hi|a:yo", ["yo</s>"], True),
    "chatml default system": (DEFAULT_SYSTEM + TEMPLATE, "u:hi|a:yo|u:and?|a:no", ["yo</s>", "no</s>"], True),
    "same text everywhere": (TEMPLATE, "s:yo|u:yo|a:yo|u:yo|a:yo", ["yo</s>", "yo</s>"], True),
    "special token in a content": (TEMPLATE, "u:a</s>b|a:c</s>d|u:x|a:y", ["c</s>d</s>", "y</s>"], True),
    "ends on a question": (TEMPLATE, "u:hi|a:yo|u:and?", ["yo</s>"], True),
    "llama 3": (LLAMA3, "s:S|u:hi|a: yo\n|u:and?|a:no", ["yo<|special_12|>", "no<|special_12|>"], True),
    "mistral": (MISTRAL, "u:hi|a:yo|u:and?|a:no", [" yo</s>", " no</s>"], True),
    "mistral, space before the end": (MISTRAL_SPACED, "u:hi|a:yo|u:and?|a:no", [" yo </s>", " no </s>"], True),
    "gemma": (GEMMA, "u:hi|a:yo|u:and?|a:no", ["yo<|special_11|>", "no<|special_11|>"], True),
    "qwen thinking": (QWEN, THINK, ["yo</s>", "<think>\ntwo\n</think>\n\nno</s>"], True),
    "qwen without a thought": (QWEN, "u:hi|a:yo|u:and?|a:no", ["yo</s>", "<think>\n\n</think>\n\nno</s>"], True),
    "strip all but the last": (STRIP, THINK, ["yo</s>", "<think>two</think>no</s>"], True),
    "prompt opens a think block": (OPENS_THINK, THINK, ["yo</s>", "no</s>"], False),
    "harmony": (HARMONY, "u:hi|a:yo|u:?|a:no", HARMONY_RUNS, True),
    "marker in ordinary tokens": (SPELLED, "u:hi|a:yo|u:and?|a:no", ["yo>>", "no>>"], True),
    "no marker": (PLAIN, "u:hi|a:yo|u:and?|a:no", ["yo", "no"], True),
    "no generation prompt": (NO_PROMPT, "u:hi|a:yo|u:and?|a:no", ["yo</s>", "no</s>"], True),
    "prompt closes an empty think block": (CLOSES_THINK, THINK, ["yo</s>", "two\n</think>\n\nno</s>"], False),
    "the next header ends a turn": (GLM, "u:hi|a:yo|u:and?|a:no", ["yo<|special_10|>", "no"], True),
    "space, end, end of text": (PHI, "u:hi|a:yo|u:and?|a:no", ["yo </s>", "no </s>"], True),
    "spelled end of text": (SPELLED_END, "u:hi|a:yo|u:and?|a:no", ["yo>>", "no>>\n[END]"], True),
    "no marker, special token in a question": (PLAIN, "u:hi|a:yo|u:x</s>y|a:no", ["yo", "no"], True),
    "generation marks": (MARKED, "u:hi|a:yo|u:and?|a:no", ["yo</s>", "no</s>"], True),
    "marks around contents": (MARKED_CONTENT, "u:hi|a:yo|u:and?|a:no", ["yo</s>", "no</s>"], True),
    "marks on the last turn": (MARKED_LAST, "u:hi|a:yo|u:and?|a:no", ["no</s>"], True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_supervised_runs(case: str) -> None:
    template, text, runs, starts = CASES[case]
    tokenizer, messages = byte_tokenizer(template=template), turns(text)
    row = render(messages, tokenizer)
    assert spoken(tokenizer, row) == runs
    assert row.ids == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    for i in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
        prompt = prompt_ids(messages[:i], tokenizer)
        assert (row.ids[: len(prompt)] == prompt) == starts


def test_byte_runs_are_whole() -> None:
    tokenizer = byte_tokenizer()
    row = render([SYSTEM, *CHAT], tokenizer)
    assert spoken(tokenizer, row) == ["yo</s>", "no é🚀</s>"]
    assert sum(row.supervised) == 3 + len("no é🚀".encode()) + 1  # FC-034: nothing of the other three turns


@pytest.mark.parametrize(
    ("template", "answer", "merges", "run"),
    [
        (PLAIN, "yo", ["Ġ y"], " yo"),  # the header's last space and the answer's first letter are one token
        (TEMPLATE, "\n yo", ["Ċ Ċ"], "\n\n yo</s>"),
        (MISTRAL, "yo", ["Ġ y"], " yo</s>"),
        (PLAIN, "yo", [": Ġ"], "yo"),
        (PLAIN, "yo", ["o Ċ"], "yo\n"),  # the answer's last letter and the line end after it
        (TEMPLATE, "yo", ["t Ċ", "tĊ y"], "o</s>"),  # half of it is the header's: not the target's to say
    ],
)
def test_tokens_across_the_border(template: str, answer: str, merges: list[str], run: str) -> None:
    tokenizer = byte_tokenizer(template=template, merges=[tuple(merge.split(" ")) for merge in merges])
    row = render([{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}], tokenizer)
    assert spoken(tokenizer, row) == [run]
    assert row.ids.count(320 + len(merges) - 1) > 0


def test_training_on_all_is_an_option() -> None:  # FC-034
    row = render(CHAT, byte_tokenizer(), train_on="all")
    assert all(row.supervised)
    with pytest.raises(ValueError, match="expected 'assistant' or 'all'"):
        render(CHAT, byte_tokenizer(), train_on="user")  # type: ignore[arg-type]


def test_exactly_one_start_token() -> None:  # FC-022
    tokenizer = byte_tokenizer(template="{{ bos_token }}" + TEMPLATE, adds_start=True)
    assert tokenizer("a")["input_ids"][0] == START
    row, prompt = render(CHAT, tokenizer), prompt_ids(CHAT[:3], tokenizer)
    assert row.ids.count(START) == prompt.count(START) == 1
    assert row.ids[: len(prompt)] == prompt
    generated_from = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, tokenize=True)["input_ids"]
    assert prompt == generated_from


def test_pad_equal_to_end_changes_nothing() -> None:  # FC-023
    tokenizer = byte_tokenizer()
    before = render(CHAT, tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    assert render(CHAT, tokenizer) == before
    ends = [t for t, token in enumerate(before.ids) if token == END]
    assert [before.supervised[t] for t in ends] == [False, True, False, True]


def test_parts_equal_the_plain_string() -> None:  # FC-008
    tokenizer = byte_tokenizer()
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]}]
    plain = [{"role": "user", "content": "hi there"}]
    assert prompt_ids(parts, tokenizer) == prompt_ids(plain, tokenizer)
    assert render([*parts, CHAT[1]], tokenizer) == render([*plain, CHAT[1]], tokenizer)
    with pytest.raises(MaskError, match="a content part is of type image"):
        prompt_ids([{"role": "user", "content": [*parts[0]["content"], {"type": "image"}]}], tokenizer)


def test_template_arguments_reach_the_template() -> None:
    tokenizer = byte_tokenizer(template="{{ mode or 'slow' }}" + TEMPLATE)
    fast = render(CHAT, tokenizer, template_kwargs={"mode": "fast"})
    assert tokenizer.decode(fast.ids).startswith("fast")
    assert fast.ids[:4] == prompt_ids(CHAT[:1], tokenizer, template_kwargs={"mode": "fast"})[:4]


def test_marked_turns_with_calls_whose_arguments_a_template_joins_to_text() -> None:
    template = TEMPLATE.replace(
        "m['content'] + eos_token", "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + "
        "(m.tool_calls[0].function.arguments if m.tool_calls else '') + eos_token }}{% endgeneration %}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{{ ''",
    )  # fmt: skip
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    calling = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = byte_tokenizer(template=template)
    assert spoken(tokenizer, render(calling, tokenizer)) == ['{"city": "Bonn"}</s>']
    assert spoken(tokenizer, render(CHAT, tokenizer)) == ["yo</s>", "no é🚀</s>"]


DROPS_FIRST = "{% set messages = messages[-2:] %}" + TEMPLATE
DEPENDS = TEMPLATE.replace("eos_token +", "('' if m['content'] == 'yo' else '!') + eos_token +")
TWICE = TEMPLATE.replace("m['content'] +", "m['content'] + m['content'] +")
NEVER_MARKED = TEMPLATE + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
ONLY_ANSWERS = "{% for m in messages %}{{ m['content'] if m['role'] == 'assistant' else '' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (TEMPLATE, CHAT[:1], "no token would be supervised"),
        (DROPS_FIRST, CHAT, "writes assistant turn 1 0 times"),
        (TWICE, CHAT, "writes assistant turn 1 2 times"),
        (DEPENDS, CHAT, "assistant turn 1 cannot be told from the text around it"),
        (NEVER_MARKED, CHAT, "no token would be supervised"),
        (ONLY_ANSWERS, CHAT[:2], "every token would be supervised"),
        (MISTRAL, [SYSTEM, *CHAT], "refuses the conversation: no system turn here"),
    ],
)
def test_masks_that_cannot_be_are_errors(template: str, messages: Any, error: str) -> None:
    with pytest.raises(MaskError, match=error):
        render(messages, byte_tokenizer(template=template))


def test_a_tokenizer_without_template_is_an_error() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        render(CHAT, tokenizer)


def rows_of(*chats: list[dict[str, str]]) -> list[Conversation]:
    return [Conversation(f"r{i}", chat) for i, chat in enumerate(chats)]


def test_rows_are_cut_at_the_smaller_limit() -> None:  # FC-029
    long = [CHAT[0], {"role": "assistant", "content": "x" * 300}]
    rows, report = encode(rows_of(long, CHAT), byte_tokenizer(), position_limit=256)
    assert [len(row.ids) for row in rows] == [256, len(render(CHAT, byte_tokenizer()).ids)]
    assert report.changed == {"cut at 256 tokens": ["r0"]}
    assert report.kept == 2
    rows, _ = encode(rows_of(long), byte_tokenizer(), max_length=128, position_limit=256)
    assert len(rows[0].ids) == len(rows[0].supervised) == 128


def test_rows_left_without_supervision_are_dropped() -> None:
    late = [{"role": "user", "content": "x" * 100}, CHAT[1]]
    rows, report = encode(rows_of(late, CHAT), byte_tokenizer(), max_length=64)
    assert len(rows) == 1
    assert report.skipped == {"nothing supervised in the first 64 tokens": ["r0"]}


def test_short_rows_are_dropped() -> None:
    tokenizer = byte_tokenizer(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows, report = encode(rows_of(short, CHAT), tokenizer)
    assert len(rows) == 1
    assert report.skipped == {"fewer than 3 tokens": ["r0"]}


def test_a_row_that_the_template_refuses_is_counted() -> None:  # FC-002
    twice = [CHAT[0], CHAT[0], CHAT[1]]
    rows, report = encode(rows_of(CHAT[:1], CHAT, CHAT[2:3]), byte_tokenizer())
    assert report.skipped == {"no token would be supervised": ["r0", "r2"]}
    rows, report = encode(rows_of(twice, CHAT), byte_tokenizer(strict=True))
    assert rows == [render(CHAT, byte_tokenizer())]
    ((reason, names),) = report.skipped.items()
    assert "roles must alternate" in reason
    assert names == ["r0"]
    with pytest.raises(ValueError, match="no row is left to train on out of 1"):
        encode(rows_of(twice), byte_tokenizer(strict=True))


@pytest.fixture(scope="module")
def s135() -> Any:
    from headstart.infer.embedded import load_tokenizer

    return load_tokenizer("smollm2")


@pytest.mark.embedded
def test_embedded_answers_and_their_ends_are_supervised(s135: Any) -> None:  # FC-007, FC-023
    assert s135.pad_token_id == s135.eos_token_id
    chat = [*CHAT[:3], {"role": "assistant", "content": "no, it is 12"}]
    row = render(chat, s135)
    assert spoken(s135, row) == ["yo<|im_end|>", "no, it is 12<|im_end|>"]
    assert "named SmolLM" in s135.decode(row.ids)
    prompt = prompt_ids(chat[:3], s135)
    assert row.ids[: len(prompt)] == prompt


@pytest.mark.embedded
def test_embedded_parts_equal_the_plain_string(s135: Any) -> None:  # FC-008
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]}]
    assert prompt_ids(parts, s135) == prompt_ids([{"role": "user", "content": "hi there"}], s135)
