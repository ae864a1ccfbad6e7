"""Counts that cannot be confused: conditional and cumulative acceptance, tokens per pass, stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.infer.report import Clock, Report, wait
from headstart.train.evaluate import loops_at_end


def test_conditional_and_cumulative_acceptance() -> None:
    """FC-146: depth 1 always right, depth 2 in every second pass, depth 3 whenever depth 2 is."""
    report = Report()
    for accepted in (3, 1) * 10:
        report.add(accepted, 3, stopped=False)
    assert report.accepted_given_parent == [1.0, 0.5, 1.0]
    assert report.accepted_by_depth == [1.0, 0.5, 0.5]
    assert report.mean_accepted == 2.0 and report.tokens_per_pass == 3.0


def test_a_stop_cuts_what_was_on_offer() -> None:
    """FC-139: guesses after the end neither count as accepted nor as refused."""
    report = Report()
    report.add(4, 4, stopped=False)
    report.add(1, 4, stopped=True)
    assert report.accepted_by_depth == [1.0, 1.0, 1.0, 1.0]
    assert report.tokens == 7


def test_an_empty_report_divides_by_nothing() -> None:
    report = Report()
    assert (report.tokens_per_pass, report.tokens_per_second, report.mean_accepted) == (0.0, 0.0, 0.0)
    assert report.accepted_by_depth == [] and "0 tokens" in str(report)


def test_a_lossy_rule_is_named_so() -> None:
    assert "lossless" in str(Report()) and "LOSSY" in str(Report(lossless=False))


def test_the_clock_charges_each_part() -> None:
    report = Report()
    clock = Clock(report.seconds, torch.device("cpu"))
    clock.lap("prefill")
    clock.lap("verify")
    clock.stop()
    assert report.seconds["prefill"] > 0 and report.seconds["verify"] > 0 and report.seconds["draft"] == 0
    assert report.total_seconds == pytest.approx(sum(report.seconds.values()))


class Device:
    """An accelerator that does its work after the host has gone on; its events know when it had done what came before
    them, and only once the host has waited for it."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def event(self, device: torch.device, enable_timing: bool) -> Any:
        assert device.type == "cuda" and enable_timing
        return Event(self)

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = self.device.now

    def elapsed_time(self, other: Event) -> float:
        assert self.device.waits, "asked before the device was done"
        return 1000 * (other.at - self.at)


def test_the_clock_charges_what_passed_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only asks for a pass and then waits in accepting: the pass is charged for its own time all the same, and
    the clock waits once, at the end."""
    device = Device()
    monkeypatch.setattr(torch, "Event", device.event)
    monkeypatch.setattr(torch.accelerator, "synchronize", device.synchronize)
    report = Report()
    clock = Clock(report.seconds, torch.device("cuda"))
    for part, seconds in (("prefill", 2.0), ("draft", 0.5), ("verify", 1.0), ("accept", 0.25), ("draft", 0.125)):
        device.now += seconds
        clock.lap(part)
    assert device.waits == 0 and report.total_seconds == 0.0
    clock.stop()
    expected = {"prefill": 2.0, "draft": 0.625, "plan": 0.0, "verify": 1.0, "accept": 0.25, "commit": 0.0}
    assert report.seconds == expected and device.waits == 1
    device.now += 1.0
    clock.lap("commit")
    clock.stop()
    assert report.seconds == expected | {"commit": 1.0}  # nothing is charged twice


def test_nobody_waits_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    wait(torch.device("cpu"))
    assert waited == []
    wait(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("ids", "looping"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], False),
        ([7, *[1, 2, 3] * 5], True),
        ([9] * 16, True),
        ([3, 4, 5, 9, 9, 9, 9], False),  # a short run of one token is punctuation, not a loop
        ([1, 2, 3, 1, 2, 3], False),
        ([], False),
    ],
)
def test_loops(ids: list[int], looping: bool) -> None:
    assert loops_at_end(ids) is looping
