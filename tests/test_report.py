"""Counts that cannot be confused: conditional and cumulative acceptance, tokens per pass, stops."""

from __future__ import annotations

import pytest

from headstart.infer.report import Clock, Report
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
    clock = Clock(report)
    clock.lap("prefill")
    clock.lap("verify")
    assert report.seconds["prefill"] > 0 and report.seconds["verify"] > 0 and report.seconds["draft"] == 0
    assert report.total_seconds == pytest.approx(sum(report.seconds.values()))


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
