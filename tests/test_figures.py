"""Figures from known times and counts: ratios, intervals, parts of a step, what they predict, loops, acceptance."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.infer.bench import BUG, EQUAL
from headstart.infer.figures import (
    ALL,
    FIRST,
    OTHER,
    PLAIN,
    Run,
    decodings,
    figures,
    halves,
    median_interval,
    pooled,
    prediction,
    summary,
)
from headstart.infer.report import PARTS, Depth, Report


def run_of(batch: int, name: str, seconds: float, **changes: Any) -> Run:
    plain = name == PLAIN
    run = Run(
        decoding="greedy",
        batch=batch,
        contestant=name,
        task="a",
        prompts=(f"p{batch}",),
        turn=0,
        seconds=seconds,
        first_token=seconds / 10,
        tokens=100,
        passes=100 if plain else 40,
        forwards=101 if plain else 41,
        steps=101 if plain else 40,
        verify_steps=0 if plain else 40,
        loop_tokens=99 if plain else 100,
        loop_seconds=seconds * 0.9,
        outside_seconds=0.0,
        depths=(),
        looping=(False,),
        split={},
        verdicts=(EQUAL,),
    )
    return run._replace(**changes)


def test_a_ratio_is_tokens_per_second_over_plain_tokens_per_second() -> None:
    runs = [run_of(i, PLAIN, 4.0) for i in range(3)]
    runs += [run_of(0, "fast", 2.0), run_of(1, "fast", 1.0), run_of(2, "fast", 4.0, tokens=50, passes=20)]
    found = figures(runs, "fast")
    assert found is not None
    assert found.speedup == 2.0  # of 2, 4 and 0.5
    assert (found.low, found.high) == (0.5, 4.0) and found.coverage == 1 - 2 / 8
    assert found.speed == 50.0 and found.tokens_per_pass == 250 / 100
    assert found.first_token == pytest.approx(0.2)
    assert (found.tokens, found.plain_tokens, found.forwards) == (250, 300, 123)
    assert found.first_token_speedup == 2.0 and found.split == {} and found.draft is None
    assert (found.predicted, found.measured) == (None, None)
    plain = figures(runs, PLAIN)
    assert plain is not None and (plain.speedup, plain.low, plain.high, plain.speed) == (1.0, 1.0, 1.0, 25.0)
    assert plain.plain_step == pytest.approx(0.036) and plain.loop_speedup == 1.0 and plain.tokens_per_pass == 1.0


def test_loops_of_either_text_are_left_out_when_asked() -> None:
    runs = [run_of(0, PLAIN, 4.0), run_of(1, PLAIN, 4.0, looping=(True,)), run_of(2, PLAIN, 4.0)]
    runs += [run_of(0, "fast", 2.0), run_of(1, "fast", 1.0), run_of(2, "fast", 0.5, looping=(True,), verdicts=(BUG,))]
    every, without = figures(runs, "fast"), figures(runs, "fast", loops=False)
    assert every is not None and without is not None
    assert every.speedup == 4.0 and every.looping == 1 / 3 and every.verdicts == {EQUAL: 2, BUG: 1}
    assert without.speedup == 2.0 and without.runs == 1 and without.looping == 0.0
    assert figures(runs[1:2] + runs[4:5], "fast", loops=False) is None


def test_figures_are_given_for_all_tasks_and_for_each() -> None:
    runs = [run_of(i, name, s, task=t) for i, t in enumerate("ab") for name, s in ((PLAIN, 4.0), ("fast", 1.0 + i))]
    table = summary(runs)
    assert list(table) == [PLAIN, "fast"] and list(table["fast"]) == [ALL, "a", "b"]
    assert [one.speedup for one in table["fast"].values()] == [3.0, 4.0, 2.0]


def test_a_contestant_without_a_plain_run_beside_it_has_no_figures() -> None:
    assert figures([run_of(0, "fast", 1.0)], "fast") is None


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [(1, 1, 0.0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609375), (20, 6, 0.9586), (100, 40, 0.9648)],
)
def test_the_interval_is_the_tabulated_one(count: int, rank: int, coverage: float) -> None:
    """Ranks as in tables of order-statistic intervals for the median (Conover 1999, sign test)."""
    values = [float(i) for i in range(count, 0, -1)]
    low, high, found = median_interval(values)
    assert (low, high) == (rank, count + 1 - rank)
    assert found == pytest.approx(coverage, abs=1e-4)


def test_the_interval_of_many_values_does_not_overflow() -> None:
    low, high, coverage = median_interval([float(i) for i in range(3000)])
    assert 1440 < low < 1460 and 1540 < high < 1560 and 0.95 <= coverage < 0.96


def ours(batch: int, loop: float, verify: float, draft: float, outside: float, **changes: Any) -> Run:
    """40 steps that give 100 tokens, one of them with the end of the prompt, in so many seconds a step."""
    split = {"prefill": 1.0, "draft": 40 * draft, "plan": 0.0, "verify": 39 * verify, "accept": 40 * outside}
    split |= {"commit": 0.0}
    own = {"verify_steps": 39, "loop_tokens": 97.5, "loop_seconds": loop, "outside_seconds": 40 * outside}
    return run_of(batch, "fast", loop + 2.0, split=split, **own | changes)


def test_the_parts_of_a_step_predict_the_speed_up_of_the_other_half() -> None:
    """2.5 tokens a step of 1.5 plain steps for the pass, 0.3 for drafting and 0.2 beside them, where batches 0, 2 were
    measured: 2.5 / 2. The loops of 1 and 3 were faster than that; prefill is in neither."""
    plain = [run_of(i, PLAIN, 50.0, loop_seconds=9.9) for i in range(4)]
    fast = [ours(i, 8.0, 0.15, 0.03, 0.02) if i % 2 == 0 else ours(i, 6.5, 0.1, 0.02, 0.02) for i in range(4)]
    found = figures([*plain, *fast], "fast")
    assert found is not None and found.plain_step == pytest.approx(0.099)
    assert found.predicted == pytest.approx((97.5 / 39) / (0.15 + 0.03 + 0.02) / (99 / 9.9))
    assert found.predicted == pytest.approx(1.25)
    assert found.measured == pytest.approx((97.5 / 6.5) / (99 / 9.9))
    assert found.measured == pytest.approx(1.5)
    assert found.loop_speedup == pytest.approx((4 * 97.5 / 29.0) / (99 / 9.9))
    assert prediction(list(zip(fast[1::2], plain[1::2], strict=True))) == pytest.approx(2.5 / 0.14 / 10)
    only = figures([plain[0], fast[0]], "fast")
    assert only is not None and (only.predicted, only.measured) == (None, None)  # there is no other half


def test_halves_have_as_many_batches_of_each_task_and_none_in_both() -> None:
    pairs = [(run_of(i, "fast", 1.0, task="abc"[i % 3]), run_of(i, PLAIN, 1.0)) for i in range(12)]
    fitted, left = halves(pairs)
    assert [run.batch for run, _ in fitted] == [0, 6, 1, 7, 2, 8] and [run.batch for run, _ in left] == [
        3,
        9,
        4,
        10,
        5,
        11,
    ]
    single = [run.task for run, _ in halves(pairs[:3])[0]]  # one batch a task: tasks take turns
    assert single == ["a", "c"]


def test_what_a_step_does_outside_of_both_models_has_a_share_and_a_price_a_token() -> None:
    """Of ours: choosing trees, accepting, committing; of plain decoding what passes between its forwards."""
    plain = [run_of(i, PLAIN, 12.0, loop_seconds=9.9, outside_seconds=0.99) for i in range(2)]
    fast = [ours(i, 8.0, 0.15, 0.04, 0.01) for i in range(2)]
    own, theirs = figures([*plain, *fast], "fast"), figures(plain, PLAIN)
    assert own is not None and theirs is not None
    assert own.outside == pytest.approx(0.4 / 8.0) and own.outside_token == pytest.approx(0.4 / 97.5)
    assert theirs.outside == pytest.approx(0.1) and theirs.outside_token == pytest.approx(0.01)


def test_the_parts_of_a_call_add_up_to_its_wall_time() -> None:
    split = {**dict.fromkeys(PARTS, 0.25), "draft": 40 * 0.05, "verify": 30 * 0.15}
    plain = run_of(0, PLAIN, 12.0, loop_seconds=10.0)
    found = figures([plain, run_of(0, "fast", 10.0, verify_steps=30, split=split)], "fast")
    assert found is not None
    assert (found.draft, found.verify, found.plain_step) == pytest.approx((0.05, 0.15, 0.1))
    assert list(found.split) == [*PARTS, OTHER] and sum(found.split.values()) == pytest.approx(1.0)
    assert found.split[OTHER] == pytest.approx((10.0 - sum(split.values())) / 10.0)


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    split = dict.fromkeys(PARTS, 0.1)
    plain = run_of(0, PLAIN, 1.0, tokens=1, passes=1, steps=1, loop_tokens=0, loop_seconds=0.0)
    fast = run_of(0, "fast", 1.0, steps=1, verify_steps=0, split=split, loop_tokens=0, loop_seconds=0.0)
    found = figures([plain, fast], "fast")
    assert found is not None and found.draft == 0.1
    assert (found.verify, found.plain_step, found.loop_speedup, found.outside) == (None, None, None, None)
    assert prediction([(fast, plain)]) is None


def test_acceptance_is_pooled_over_runs_and_both_kinds_are_named() -> None:
    """FC-146: depth 1 always right, depth 2 in every second pass, depth 3 whenever depth 2 is; the runs differ."""
    reports = [Report(), Report()]
    for at, kept in enumerate((3, 1, 3, 1, 3, 1)):
        reports[at // 4].add(kept, 3, stopped=False)
    runs = [run_of(i, name, 1.0, depths=tuple(reports[i].depths)) for name in (PLAIN, "fast") for i in range(2)]
    found = figures(runs, "fast")
    assert found is not None
    assert found.accepted_by_depth == [1.0, 0.5, 0.5] and found.accepted_given_parent == [1.0, 0.5, 1.0]
    assert pooled([(Depth(4, 4, 3),), (), (Depth(2, 2, 1), Depth(2, 1, 0))]) == [Depth(6, 6, 4), Depth(2, 1, 0)]


def test_decodings_are_apart_and_first_tokens_are_none() -> None:
    runs = [run_of(0, PLAIN, 1.0, decoding=name) for name in ("greedy", "temperature 1", FIRST)]
    assert decodings(runs) == ["greedy", "temperature 1"]


def test_a_run_comes_back_from_json() -> None:
    run = run_of(0, "fast", 0.1, depths=(Depth(3, 3, 1), Depth(3, 1, 0)), split={"draft": 1 / 3}, remarks=("here",))
    assert Run.restored(json.loads(json.dumps(run._asdict()))) == run
