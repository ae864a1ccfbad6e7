"""What a rule sees of one ``generate`` call: processors on each row's own prefix, the draw, stopping, streaming.

Legend: B rows, P padded prompt, V vocabulary. Ids are kept in ``generate``'s padded coordinates, because that is what
its processors and criteria expect.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_of
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from headstart.infer.accept import Accepted
from headstart.infer.target import Verified
from headstart.infer.tree import DraftTree, sent

TENSOR_ONLY = (  # they look at the scores alone, so one call serves all rows
    processors_of.TemperatureLogitsWarper,
    processors_of.TopKLogitsWarper,
    processors_of.TopPLogitsWarper,
    processors_of.MinPLogitsWarper,
    processors_of.TypicalLogitsWarper,
    processors_of.EpsilonLogitsWarper,
    processors_of.InfNanRemoveLogitsProcessor,
    processors_of.LogitNormalization,
    processors_of.SuppressTokensLogitsProcessor,
)
WARPERS = TENSOR_ONLY[:4]  # those a drafter may apply to a law of its own
ONE_ROW_ONLY = (  # they carry the state of a whole batch from call to call
    processors_of.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    processors_of.SynthIDTextWatermarkLogitsProcessor,
)


def row_view(processors: Sequence[Any], row: int, rows: int) -> LogitsProcessorList:
    """The processors as row ``row`` of ``rows`` sees them: shallow copies with per-row state cut to that row."""
    return LogitsProcessorList([_row_of(p, row) for p in processors] if rows > 1 else list(processors))


def _row_of(processor: Any, row: int) -> Any:
    view = copy.copy(processor)
    ignore = getattr(view, "prompt_ignore_length", None)
    if isinstance(ignore, Tensor):
        view.prompt_ignore_length = ignore[row : row + 1]
    if isinstance(processor, processors_of.EncoderRepetitionPenaltyLogitsProcessor):
        view.encoder_input_ids = view.encoder_input_ids[row : row + 1]
    if isinstance(processor, processors_of.EncoderNoRepeatNGramLogitsProcessor):
        view.batch_size, view.generated_ngrams = 1, view.generated_ngrams[row : row + 1]
    if isinstance(processor, processors_of.PrefixConstrainedLogitsProcessor):
        allowed, sequence = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        view._num_beams = 1
        view._prefix_allowed_tokens_fn = lambda _, ids: allowed(sequence, ids)
    return view


def _criterion_of(criterion: Any, row: int, rows: int) -> Any:
    """A criterion as one row sees it; lm-eval's remembers in a list which rows of the batch are done."""
    tracker = getattr(criterion, "done_tracker", None)
    if rows == 1 or not isinstance(tracker, list) or len(tracker) != rows:
        return criterion
    view = copy.copy(criterion)
    view.done_tracker = tracker[row : row + 1]
    return view


class Emission:
    """The Visit of one call: every emitted token goes through ``law``, ``draw`` and ``emit``, as in ``generate``."""

    def __init__(
        self,
        prompt: Tensor,
        processors: Sequence[LogitsProcessor],
        criteria: StoppingCriteriaList,
        *,
        max_length: int,
        do_sample: bool,
        pad: int | None,
        sink: Any = None,
        record: bool = False,
        in_order: bool = True,
    ) -> None:
        """``prompt`` [B, P] padded ids; ``max_length`` counts them too; ``pad`` fills finished rows; ``record`` keeps
        the scores and logits of every emitted token (one row only); ``in_order`` says that the rule asks for laws of
        emitted tokens only, one after the other."""
        self.rows, self.start = prompt.shape
        self.max_length, self.do_sample, self.sink = max_length, do_sample, sink
        shared = sorted(type(p).__name__ for p in processors if isinstance(p, ONE_ROW_ONLY))
        if shared and self.rows > 1:
            raise ValueError(
                f"{shared} keep one state for a whole batch; {self.rows} rows were given: decode them singly"
            )
        if shared and not in_order:
            raise ValueError(f"{shared} carry a state from token to token, which only the rule 'match' follows")
        self._pad = 0 if pad is None else pad
        self.ids = prompt.new_full((self.rows, max(max_length, self.start)), self._pad)
        self.ids[:, : self.start] = prompt
        self.length = [self.start] * self.rows  # padded coordinates, prompt included
        self._stopped: list[int | None] = [None] * self.rows  # length at which a criterion first held
        self.ends = {i for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.tolist()}
        self._pads = any(hasattr(c, "eos_token_id") for c in criteria)  # generate pads finished rows only then
        own = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        self._criteria = [[_criterion_of(c, row, self.rows) for c in own] for row in range(self.rows)]
        self._tensor_only = all(type(p) in TENSOR_ONLY for p in processors)
        self._processors: list[Any] = [row_view(processors, row, self.rows) for row in range(self.rows)]
        self._verified: Verified | None = None
        self._tree: DraftTree | None = None
        self._base: list[int] = []  # lengths when the step began
        self._streamed = self.start
        self._states: list[Tensor] = []  # of the generator, after each draw of a walk
        self.reads = 0  # times the host waited for the device, but for what the loop itself reads
        self._record = record
        self.scores: tuple[Tensor, ...] = ()  # processed, [1, V] a token
        self.logits: tuple[Tensor, ...] = ()  # as the target gave them, float32

    def open(self, tree: DraftTree, verified: Verified) -> None:
        """A step begins: laws at the nodes of ``tree`` are read from ``verified`` until the next one."""
        self._tree, self._verified, self._base = tree, verified, list(self.length)

    def law(self, node: Tensor) -> Tensor:
        """Processed float32 scores [B, V] at nodes [B], each after its own path, whether that is emitted already or
        not; rows with -1 are not visited and stay zero."""
        assert self._verified is not None
        logits, device = self._verified.logits, self.ids.device
        visited = [(row, at) for row, at in enumerate(node.tolist()) if at >= 0]
        whole = len(visited) == self.rows
        if whole and self.rows == 1:
            raw = logits[:, visited[0][1]].to(device, torch.float32, copy=True)  # processors may write into it
        else:
            rows = torch.tensor([row for row, _ in visited], device=logits.device)
            raw = logits[rows, node.to(logits.device)[rows]].to(device, torch.float32)  # [R, V]
        scores = raw.clone() if self._record else raw
        if self._tensor_only:
            scores = self._processors[0](self.ids[: len(visited), : self.start], scores)  # they look at scores alone
        else:
            parts = [
                self._processors[row](self._prefix(row, at), scores[i : i + 1]) for i, (row, at) in enumerate(visited)
            ]
            scores = torch.cat(parts)
        if self._record:
            self.scores, self.logits = (*self.scores, scores), (*self.logits, raw)
        if whole:
            return scores
        return scores.new_zeros(self.rows, scores.shape[1]).index_copy_(0, rows.to(device), scores)  # [B, V]

    @property
    def walks(self) -> bool:
        """Whether ``walk`` may accept: processors see scores only, nothing but end tokens and length stops a row."""
        return self._tensor_only and not any(self._criteria) and not self._record

    def open_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B] bool rows not finished, [B] tokens each still wants, [e] end tokens; all on the target's device."""
        assert self._verified is not None
        device = self._verified.logits.device
        wanted = sent(self.wanted(), device)
        return wanted > 0, wanted, sent(sorted(self.ends), device)

    def law_at(self, node: Tensor) -> Tensor:
        """[B] nodes -> [B, V] processed scores, all rows, nothing read back; for processors that see scores only."""
        assert self._verified is not None
        logits = self._verified.logits
        raw = logits[torch.arange(self.rows, device=logits.device), node.to(logits.device)].to(torch.float32)
        scores: Tensor = self._processors[0](self.ids[:, : self.start], raw)
        return scores

    def draw_at(self, scores: Tensor) -> Tensor:
        """[B, V] -> [B], a draw for every row; remembers where the generator stands after each."""
        if not self.do_sample:
            return scores.argmax(-1)
        drawn = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        self._states.append(_generator_state(scores.device))
        return drawn

    def settle(self, accepted: Accepted) -> None:
        """Emits what ``walk`` accepted, on the CPU, and sets the generator back to its last draw that counted."""
        for column in accepted.tokens.T:
            self.emit(column)
        if self.do_sample:
            assert self._verified is not None
            _set_generator_state(self._verified.logits.device, self._states[int(accepted.count.max()) - 1])
        self._states = []

    def _prefix(self, row: int, node: int) -> Tensor:
        """The row's text down to ``node`` [1, P + ...]; guesses are written where they will stand if they are kept."""
        assert self._tree is not None
        path = []
        while node > 0:
            path.append(self._tree.tokens[row, node])
            node = int(self._tree.parents[row, node])
        base = self._base[row]
        if path and base + len(path) > self.length[row]:
            self.ids[row, base : base + len(path)] = torch.stack(path[::-1]).to(self.ids.device)
        return self.ids[row : row + 1, : base + len(path)]

    def draw(self, scores: Tensor, wanted: Tensor) -> Tensor:
        """[B, V] -> [B]: argmax, or one multinomial draw a row of ``wanted`` from the softmax, exactly as
        ``generate``."""
        self.reads += 1
        if not self.do_sample:
            return scores.argmax(-1)
        if self.rows == 1:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        rows = wanted.nonzero()[:, 0].to(scores.device)
        drawn = torch.multinomial(torch.softmax(scores[rows], dim=-1), num_samples=1).squeeze(1)
        return scores.new_zeros(self.rows, dtype=torch.int64).index_copy_(0, rows, drawn)

    def coin(self, p: Tensor) -> Tensor:
        """[B] chances -> [B] bool, from the global generator on the ids' device."""
        self.reads += 1
        return torch.rand(p.shape, device=self.ids.device) < p.to(self.ids.device)

    def emit(self, token: Tensor) -> Tensor:
        """Appends [B] tokens (-1 = none), evaluates the criteria per token and row, streams. -> [B] bool: goes on."""
        for row, value in enumerate(token.tolist()):
            if value < 0:
                continue
            self.ids[row, self.length[row]] = value
            self.length[row] += 1
            if self._stopped[row] is None and self._stops(row, value):
                self._stopped[row] = self.length[row]
        self._stream()
        return torch.tensor(self._going(), device=token.device)

    def running(self) -> Tensor:
        """[B] bool: rows that still want tokens."""
        return torch.tensor(self._going(), device=self.ids.device)

    def roots(self) -> Tensor:
        """The last known token of each row [B]."""
        at = sent(self.length, self.ids.device) - 1
        return self.ids.gather(1, at[:, None])[:, 0]

    def wanted(self) -> list[int]:
        """Tokens each row may still emit."""
        going = self._going()
        return [self.max_length - length if on else 0 for length, on in zip(self.length, going, strict=True)]

    @property
    def longest(self) -> int:
        """Padded length of the text so far; once all rows have stopped, where the last one did."""
        stopped = [s for s in self._stopped if s is not None]
        return max(stopped) if len(stopped) == self.rows else max(self.length)

    def sequences(self) -> Tensor:
        """Prompt and tokens [B, P + longest], finished rows padded, as ``generate`` returns them."""
        for row, length in enumerate(self.length):
            self.ids[row, length:] = self._pad  # guesses that were not kept may stand there
        return self.ids[:, : self.longest]

    def _stops(self, row: int, value: int) -> bool:
        ids, scores = self.ids[row : row + 1, : self.length[row]], self.scores if self._record else None
        self.reads += len(self._criteria[row])
        held = [bool(torch.as_tensor(c(ids, scores)).all()) for c in self._criteria[row]]  # each is asked
        return value in self.ends or self.length[row] >= self.max_length or any(held)

    def _going(self) -> list[bool]:
        """Without end tokens ``generate`` pads nobody: stopped rows write on until the last one stops."""
        stopped = [s for s in self._stopped if s is not None]
        if self._pads:
            return [s is None for s in self._stopped]
        if len(stopped) < self.rows:
            return [length < self.max_length for length in self.length]
        last = max(stopped)
        return [length < last for length in self.length]

    def overshoot(self) -> int:
        """Tokens written past the place where the last row stopped: they are in no result."""
        longest = self.longest
        return sum(max(0, length - longest) for length in self.length)

    def _stream(self) -> None:
        """Puts a column of tokens [B] as soon as every row has it or is finished."""
        if self.sink is None:
            return
        going = self._going()
        ready = min([n for n, on in zip(self.length, going, strict=True) if on], default=self.longest)
        if not self._pads and None in self._stopped:  # who stops last is not known: stream what all rows have passed
            ready = min(self.length)
        while self._streamed < ready:
            self.reads += 1
            self.sink.put(self.ids[:, self._streamed].cpu())
            self._streamed += 1


def _generator_state(device: torch.device) -> Tensor:
    """Of the global generator that draws on ``device``; kept on the host, so no sync."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
