"""Signals that a cluster sends before it takes a machine away: training ends at the next step, everything saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """A signal ended the training after ``step`` steps, all of which are on disk."""

    def __init__(self, step: int, name: str) -> None:
        super().__init__(f"{name} came: stopped after step {step}, which is saved")
        self.step = step


@contextmanager
def listening() -> Iterator[Callable[[Any], str]]:
    """Inside, the signals are noted and end nothing. Yields a function of the accelerator that tells, on every rank
    alike, which one came to any of them ("" = none).

    Outside of the main thread, where Python cannot listen, none ever comes.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    def asked(accelerator: Any) -> str:
        mark = torch.zeros(len(SIGNALS), dtype=torch.int64)
        for number in noted:
            mark[SIGNALS.index(number)] = 1
        every = accelerator.reduce(mark.to(accelerator.device), "sum")
        return next((s.name for s, count in zip(SIGNALS, every.tolist(), strict=True) if count), "")

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {s: signal.signal(s, note) for s in SIGNALS}
    try:
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
