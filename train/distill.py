"""Answers from the target itself: on-policy training data for its heads.

Prompts come from files and data sets (`distill`), or the target writes them too (`distill_self`). Answers come from the
target in this process (`Sampler`) or from a server (`Server`), and go into a folder (`answers`) that a run may leave
and take up at any instant, with its prompts in another order, with fewer or with more of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.heads.tie import vocabulary_fingerprint
from headstart.train.answers import DROPPED, Answer, Answerer, Asked, Store, number
from headstart.train.conversations import Conversation, Report, message_hash
from headstart.train.masking import MaskError
from headstart.train.provenance import template_hash
from headstart.train.selfplay import DRY, Turns, UserTurns, repeats

Progress = Callable[[int, int, int], None]  # prompts done, prompts in all, answer tokens of this run
GREEDY_AND_WARM = (0.0, 0.8)


def distill(
    answerer: Answerer,
    prompts: Sequence[Conversation],
    out: str | Path,
    *,
    temperatures: Sequence[float] = GREEDY_AND_WARM,
    seed: int = 0,
    seconds: float | None = None,
    drop_loops: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Let `answerer` answer `prompts` (system and user turns) into the folder `out`; what is answered there stays.

    temperatures: each prompt gets one of them, 0 being greedy. seconds: begin no further prompt after this time.
    drop_loops: leave out answers that end in a repeated phrase. A prompt with several user turns is answered turn by
    turn; it ends early where an answer is cut off. Raises ValueError if `out` holds answers that were made otherwise.
    """
    report = Report()
    told_apart = _by_id(prompts, report)
    settings = _settings(answerer, temperatures, seed, drop_loops) | {"user_turns": "given"}
    with Store(Path(out), settings, answerer.notes) as store:
        asked = _keyed(told_apart, store.done)
        clerk = _Clerk(answerer, store, temperatures, seed, seconds, drop_loops, progress, report)
        clerk.answer(asked, len(asked), sum(key in store.done for key in asked))
        return clerk.close()


def distill_self(
    answerer: Answerer,
    count: int,
    out: str | Path,
    *,
    turns: UserTurns | None = None,
    temperatures: Sequence[float] = GREEDY_AND_WARM,
    seed: int = 0,
    seconds: float | None = None,
    drop_loops: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Without any data: the target writes user turns, then answers them, until `out` holds `count` conversations.

    turns: how user turns are drawn and which are kept (`selfplay`). The rest is as in `distill`. Raises ValueError
    where round after round yields no user turn, or no answer, of use.
    """
    if count < 1:
        raise ValueError(f"{count} conversations asked for; expected at least one")
    turns, report = turns or UserTurns(), Report()
    settings = _settings(answerer, temperatures, seed, drop_loops) | {"user_turns": turns._asdict()}
    with Store(Path(out), settings, answerer.notes) as store:
        clerk = _Clerk(answerer, store, temperatures, seed, seconds, drop_loops, progress, report)
        drawn, in_vain = Turns(store.folder, answerer, turns, seed), 0
        while store.kept < count and clerk.more():
            waiting = [prompt for prompt in drawn.prompts if prompt.id not in store.done.keys() | clerk.put_off]
            missing = count - store.kept
            if len(waiting) < missing:
                drawn.extend()
                continue
            before = store.kept, len(store.dropped)
            clerk.answer({prompt.id: prompt for prompt in waiting[:missing]}, count)
            in_vain = 0 if store.kept > before[0] else in_vain + len(store.dropped) - before[1]
            if in_vain >= DRY * turns.batch:
                last = list(store.dropped.values())[-1]
                raise ValueError(
                    f"{in_vain} answers in a row were of no use, the last one: {last}. Look at "
                    f"{store.folder / DROPPED}; prompts in place of the target's own turns may help"
                )
        for reason, names in drawn.refused.items():
            for name in names:
                report.skip(f"user turn: {reason}", name)
        return clerk.close()


def temperature_of(key: str, temperatures: Sequence[float], seed: int) -> float:
    """The temperature for a prompt: a function of (seed, id), so neither order nor resuming changes it."""
    return temperatures[number(seed, key) % len(temperatures)]


class _Clerk:
    """Brings prompts to the answerer and answers to the store, and keeps count."""

    def __init__(
        self,
        answerer: Answerer,
        store: Store,
        temperatures: Sequence[float],
        seed: int,
        seconds: float | None,
        drop_loops: bool,
        progress: Progress | None,
        report: Report,
    ) -> None:
        self.answerer, self.store, self.temperatures, self.seed = answerer, store, temperatures, seed
        self.drop_loops, self.progress, self.report = drop_loops, progress, report
        self.stop = None if seconds is None else time.monotonic() + seconds
        self.put_off: set[str] = set()  # not to be answered in this run
        self.ready: int | None = 0
        self.total = self.tokens = 0

    def more(self) -> bool:
        return self.stop is None or time.monotonic() < self.stop

    def answer(self, prompts: Mapping[str, Conversation], total: int, ready: int | None = None) -> None:
        """Has answered what is not in the store yet; what does not fit is skipped and named. ready, total: where the
        display of the progress begins and ends; without `ready` it shows the rows kept."""
        todo = []
        for key, prompt in prompts.items():
            if key in self.store.done:
                continue
            try:
                length = self.answerer.check(prompt)
            except MaskError as error:
                self.report.skip(str(error), key)
                self.put_off.add(key)
                continue
            todo.append(Asked(key, prompt, temperature_of(key, self.temperatures, self.seed), length))
        self.ready, self.total = ready, total
        self.answerer.answer(todo, self._done, self.more, self.report, self.seed)
        self.put_off.update(one.key for one in todo if one.key not in self.store.done)

    def close(self) -> Report:
        for key, reason in self.store.dropped.items():
            self.report.skip(reason, key)
        self.report.kept = self.store.kept
        return self.report

    def _done(self, asked: Sequence[Asked], answers: Sequence[Answer]) -> None:
        self.store.add(asked, [self._without_loops(answer) for answer in answers])
        self.ready = None if self.ready is None else self.ready + len(asked)
        self.tokens += sum(answer.tokens for answer in answers)
        if self.progress is not None:
            self.progress(self.store.kept if self.ready is None else self.ready, self.total, self.tokens)

    def _without_loops(self, answer: Answer) -> Answer:
        if not self.drop_loops or answer.dropped:
            return answer
        last = self.answerer.tokenizer(answer.messages[-1]["content"], add_special_tokens=False)["input_ids"]
        return answer._replace(dropped="the answer ends in a loop") if repeats(last) else answer


def _settings(answerer: Answerer, temperatures: Sequence[float], seed: int, drop_loops: bool) -> dict[str, Any]:
    """What answers depend on, and what must therefore be the same for a folder to be carried on."""
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures {list(temperatures)}; expected at least one temperature of 0 or more")
    sampling = {"max_new_tokens": answerer.max_new_tokens, "temperatures": list(temperatures), "top_k": 0, "top_p": 1.0}
    return {
        **answerer.identity(),
        "tokenizer_fingerprint": vocabulary_fingerprint(answerer.tokenizer.get_vocab()),
        "template_sha256": template_hash(answerer.tokenizer),
        "template_kwargs": answerer.template_kwargs,
        "sampling": {**sampling, "seed": seed, "drop_loops": drop_loops},
    }


def _by_id(prompts: Sequence[Conversation], report: Report) -> dict[str, dict[str, Conversation]]:
    """id -> digest -> prompt; a prompt given twice counts once."""
    named: dict[str, dict[str, Conversation]] = {}
    for prompt in prompts:
        if {m["role"] for m in prompt.messages} - {"system", "user"} or prompt.messages[-1]["role"] != "user":
            raise ValueError(f"prompt {prompt.id}: expected system and user turns, a user turn last")
        same = named.setdefault(" ".join(prompt.id.split()), {})
        digest = message_hash(prompt.messages, prompt.tools)
        if digest in same:
            report.change("the same prompt twice, answered once", prompt.id)
        same[digest] = prompt
    return named


def _keyed(named: Mapping[str, Mapping[str, Conversation]], done: Mapping[str, str]) -> dict[str, Conversation]:
    """Prompts by key: the id, with the digest behind it where the id names several, be it among these prompts or those
    that are ``done`` (key -> digest). What was done under either keeps its key."""
    keyed = {}
    for name, same in named.items():
        for digest, prompt in same.items():
            own, alone = f"{name}#{digest}", len(same) == 1
            if name in done:
                alone = done[name] == digest or (alone and not done[name])
            keyed[name if alone and own not in done else own] = prompt
    return keyed
