"""User turns that the target writes itself: it goes on from where its chat template lets a user begin.

A chat model has seen templates in training, so behind the user's header it writes what users ask (Magpie, Xu et al.
2024, arXiv 2406.08464). Turns are drawn in rounds; what is of no use is left out and counted by reason. A round is
one line of OUT/selfplay/rounds.jsonl, seeded by its number, so a run that was killed goes on with the next round.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headstart.train.answers import Answerer, append, mend, number
from headstart.train.conversations import Conversation, Messages, message_hash
from headstart.train.masking import MaskError
from headstart.train.sources import read_rows
from headstart.train.template import Chat, user_prefix

ROUNDS = Path("selfplay") / "rounds.jsonl"  # in a folder of its own: *.jsonl beside it are training data
REPLACEMENT = "\ufffd"
DRY = 8  # rounds one after the other without a turn, or an answer, of use before the run gives up
MANY_WORDS, FEW_OF_THEM = 12, 0.4  # a text of so many words, of which less than this share differ, repeats itself


class UserTurns(NamedTuple):
    """How user turns are drawn, and which are kept."""

    temperature: float = 1.0
    max_tokens: int = 128  # a longer one is left out
    shortest: int = 16  # characters
    batch: int = 32  # turns a round


class Turns:
    """The user turns of one folder: those of earlier rounds, and more on demand."""

    def __init__(self, folder: Path, answerer: Answerer, settings: UserTurns, seed: int) -> None:
        if settings.temperature <= 0 or settings.max_tokens < 1 or settings.batch < 1:
            raise ValueError(f"{settings}; expected a temperature above 0, at least one token and one turn a round")
        chat = Chat(answerer.tokenizer, answerer.template_kwargs)
        self.prefix, self.closer = user_prefix(chat)
        self.special = [token for token in chat.tokenizer.convert_ids_to_tokens(sorted(chat.special)) if token]
        self.path, self.answerer, self.settings, self.seed = folder / ROUNDS, answerer, settings, seed
        self.prompts: list[Conversation] = []
        self.refused: dict[str, list[str]] = {}  # reason -> "round.draw" of each turn left out
        self.rounds, self._dry, self._seen = 0, 0, set[str]()
        self.path.parent.mkdir(exist_ok=True)
        mend(self.path)
        for row in read_rows(self.path):
            self._take(row)

    def extend(self) -> None:
        """One more round. Raises ValueError where round after round yields nothing of use."""
        how = self.settings
        drawn = self.answerer.complete(
            self.prefix,
            how.batch,
            closer=self.closer,
            max_new_tokens=how.max_tokens,
            temperature=how.temperature,
            seed=number(self.seed, "selfplay", str(self.rounds)),
        )
        row: dict[str, Any] = {"round": self.rounds, "kept": [], "refused": {}}
        fresh: set[str] = set()
        for index, (text, finished) in enumerate(drawn):
            text = text.strip()
            reason = self._fault(text, finished, fresh)
            if reason:
                row["refused"].setdefault(reason, []).append(f"{self.rounds}.{index}")
            else:
                fresh.add(plain_words(text))
                row["kept"].append(text)
        append(self.path, [json.dumps(row, ensure_ascii=False)])
        self._take(row)
        self._dry = 0 if row["kept"] else self._dry + 1
        if self._dry >= DRY:
            told = ", ".join(f"{len(names)} {reason}" for reason, names in self.refused.items())
            raise ValueError(
                f"{DRY} rounds of user turns yielded none of use ({told}): this target does not write users' turns "
                "behind its template's header; give prompts instead"
            )

    def _take(self, row: dict[str, Any]) -> None:
        self.rounds = row["round"] + 1
        for text in row["kept"]:
            self._seen.add(plain_words(text))
            messages: Messages = [{"role": "user", "content": text}]
            self.prompts.append(Conversation(f"self/{message_hash(messages)}", messages))
        for reason, names in row["refused"].items():
            self.refused.setdefault(reason, []).extend(names)

    def _fault(self, text: str, finished: bool, fresh: set[str]) -> str:
        """Why a drawn turn is left out, or ""."""
        if not finished:
            return f"no end within {self.settings.max_tokens} tokens"
        if len(text) < self.settings.shortest or not plain_words(text):
            return f"shorter than {self.settings.shortest} characters"
        if REPLACEMENT in text or any(token in text for token in self.special):
            return "a special token or half a character in it"
        words = text.casefold().split()
        if repeats(text) or (len(words) >= MANY_WORDS and len(set(words)) < FEW_OF_THEM * len(words)):
            return "repeats itself"
        if plain_words(text) in self._seen or plain_words(text) in fresh:
            return "said before"
        try:
            self.answerer.check(Conversation("", [{"role": "user", "content": text}]))
        except MaskError as error:
            return str(error)
        return ""


def plain_words(text: str) -> str:
    """What two texts have in common that differ in case, punctuation and spaces alone."""
    return re.sub(r"\W+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def repeats(items: Sequence[Any], *, times: int = 4, shortest: int = 24, longest: int = 64) -> bool:
    """Whether the tail is a phrase of up to `longest` items over and over: `times` or more, over `shortest` items."""
    for period in range(1, min(longest, len(items) // times) + 1):
        span = max(period * times, shortest)
        if span <= len(items) and all(items[-i] == items[-i - period] for i in range(1, span - period + 1)):
            return True
    return False
