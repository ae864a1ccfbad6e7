"""BT of the field cases: a byte-level tokenizer built in code. Ids 0-63 are special, 64-319 are the bytes."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, START, END, TURN = range(4)
SPECIALS = ["<pad>", "<s>", "</s>", "<|turn|>"]
SPECIALS += [f"<|special_{i}|>" for i in range(len(SPECIALS), 64)]

# <|turn|>role, newline, content, end token, newline: ChatML with this tokenizer's markers, and no generation tag.
TURNS = "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
TEMPLATE = TURNS + PROMPT
# Raises unless user and assistant alternate after an optional system turn.
STRICT = (
    "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}{% endfor %}" + TEMPLATE
)


Merge = tuple[str, str]


def byte_tokenizer(
    *,
    strict: bool = False,
    template: str | None = None,
    adds_start: bool = False,
    merges: Sequence[Merge] = (),
    named: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """BT (strict: BT-strict). template: another chat template; adds_start: put the start token before every text.

    named: what the special tokens from id 4 on are called instead, as a template writes them.
    merges: pairs of byte letters ("Ġ" is a space, "Ċ" a line end) that become tokens of their own, from id 320 on.
    """
    letters = _byte_letters()
    specials = [*SPECIALS[:4], *named, *SPECIALS[4 + len(named) :]]
    vocab = {token: i for i, token in enumerate(specials)} | {letters[b]: 64 + b for b in range(256)}
    vocab |= {one + two: 320 + i for i, (one, two) in enumerate(merges)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    if adds_start:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template or (STRICT if strict else TEMPLATE)
    return tokenizer


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte (the table of GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
