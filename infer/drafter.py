"""Who guesses: what the loop asks of a source of guesses, whatever is behind it.

Legend: B rows, P prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headstart.infer.grow import Budget, Sampling
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree
from headstart.infer.visit import WARPERS


class Drafter(Protocol):
    """One object lives for one generate call."""

    wants: tuple[int, ...]  # hidden_states indices it reads, () = none

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        """The left-aligned prompt [B, P], its lengths [B], and how many tokens a row may reach."""

    def observe(self, seen: Seen) -> None:
        """A chunk of the prompt, or what a step made of the guesses."""

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        """Guesses after the last known tokens [B]."""


class Source(Protocol):
    """What a Speculator is made with; makes a drafter for every call."""

    @property
    def name(self) -> str:
        """For reports."""

    @property
    def depth(self) -> int:
        """Most guesses on a path."""

    @property
    def wants(self) -> tuple[int, ...]:
        """hidden_states indices its drafters read."""

    def check(self, model: Any) -> list[str]:
        """Raises ValueError where this source cannot guess for ``model``; returns warnings."""

    @property
    def chain(self) -> bool:
        """Whether its sampled trees are always chains of drawn nodes; block verification is for those."""

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Drafter:
        """A fresh drafter; nothing is guessed below the end tokens ``ends`` [e].

        ``sampling`` is given when the rule can test drawn guesses; a source without laws ignores it.
        """


def sampling_as(processors: Sequence[Any]) -> Sampling:
    """How guesses are drawn: warped as the target's tokens are, by a generator seeded from the global one."""
    generators: dict[torch.device, torch.Generator] = {}
    seed = int(torch.randint(1 << 62, (1,)))

    def pick(law: Tensor) -> Tensor:
        """[R, V] -> [R]."""
        if law.device not in generators:
            generators[law.device] = torch.Generator(law.device).manual_seed(seed)
        return torch.multinomial(law, 1, generator=generators[law.device])[:, 0]

    return Sampling(pick, tuple(p for p in processors if isinstance(p, WARPERS)))
