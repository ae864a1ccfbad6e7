"""What is seen of a call of ``generate`` from outside: forwards of the target, and when the first token came.

Legend: B rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headstart.infer.report import Clock


class FirstToken:
    """A streamer that notes when something came after the prompt, and how many tokens that was."""

    def __init__(self) -> None:
        self.puts, self.at, self.tokens = 0, 0.0, 0

    def put(self, value: Tensor) -> None:
        """The prompt, or a column of tokens [B]."""
        self.puts += 1
        if self.puts == 2:
            self.at, self.tokens = perf_counter(), value.numel()

    def end(self) -> None:
        """Nothing more to note."""


class Forwards:
    """Forwards of a target, and the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.clock = Clock(self.seconds, device)

    @property
    def between(self) -> float:
        """Seconds from the end of the first forward to the beginning of the last one that no forward took."""
        return self.seconds["between"]

    def begins(self, *_: Any) -> None:
        """A hook before a forward."""
        self.clock.lap("between" if self.count else "before")

    def ends(self, *_: Any) -> None:
        """A hook behind one."""
        self.count += 1
        self.clock.lap("forward")


@contextmanager
def watched(target: Any) -> Iterator[Forwards]:
    """Counts and times the forwards of ``target`` inside; the times are there afterwards."""
    found = Forwards(target.get_input_embeddings().weight.device)
    hooks = (target.register_forward_pre_hook(found.begins), target.register_forward_hook(found.ends))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found.clock.stop()
