"""Costs as they are measured, kept and found again; ``headstart tune`` on a toy target."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headstart.heads import FAMILIES
from headstart.infer import costs as costs_of
from headstart.infer.costs import FILE, cached_path, described, keep, key_of, plan_in, read_plan
from headstart.infer.measuring import _draft, _medians, measure
from headstart.infer.plan import Plan
from headstart.infer.planner import Adaptive
from headstart.infer.speculator import Speculator
from headstart.scripts.cli import app
from tests.byte_tokenizer import byte_tokenizer
from tests.drafters import SOURCES, smaller, untrained
from tests.test_lossless import prompt
from tests.test_plan import made
from tests.toys import chain, llama

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


class Ticks:
    """A clock that goes on by as much as each forward of the target is wide."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        self.hook = model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: Any, args: Any, kwargs: Any) -> None:
        rows, width = kwargs["input_ids"].shape
        self.now += rows * width + 0.001 * kwargs["position_ids"].max().item()

    def __call__(self) -> float:
        return self.now


# measuring -----------------------------------------------------------------------------------------------------------


def test_what_is_measured_is_one_pass(model: Any) -> None:
    """By a clock that counts rows times nodes: so much for each size, context and batch, and nothing beside it."""
    fast = Speculator(model, "prompt-lookup", nodes=9)
    ticks = Ticks(model)
    try:
        found = measure(fast, contexts=(20, 60), rows=(1, 2), repeats=2, clock=ticks)
    finally:
        ticks.hook.remove()
    assert found.sizes == (1, 2, 4, 6, 8, 9)
    assert [(curve.rows, curve.context) for curve in found.curves] == [(1, 20), (1, 60), (2, 20), (2, 60)]
    for curve in found.curves:
        assert curve.seconds == pytest.approx([curve.rows * size for size in found.sizes], abs=0.1)
    assert [draft.rows for draft in found.drafts] == [1, 2]
    assert found.drafts[0].seconds == (0.0,) * 11  # no forward of the target in it
    assert found.overhead > 0


def test_drafting_is_brought_to_the_pace_of_the_passes(model: Any) -> None:
    """By a clock that counts both models' forwards: where passes took half as long before, drafting would have too."""
    fast = Speculator(model, SOURCES["draft-model"](model), nodes=4, depth=3)
    ticks, small = Ticks(model), Ticks(fast.source.model)  # type: ignore[attr-defined]
    found = []
    try:
        for passes in (1.0, 0.5):
            before = {nodes: nodes * passes for nodes in (1, 2, 4)}
            found.append(_draft(fast, 1, 20, before, 2, lambda: ticks.now + small.now))
    finally:
        ticks.hook.remove()
        small.hook.remove()
    assert found[0][0] == 0.0 and found[0][1] > 0.9 and found[0] == sorted(found[0])
    assert [seconds / 2 for seconds in found[0]] == pytest.approx(found[1])


def test_what_is_beside_both_models_is_measured_with_a_planner_at_work(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that drafts in every step and asks before every level, whatever the guesses bring, and leaves nothing behind:
    its time is part of what is measured."""
    fast, asked, plain = Speculator(model, SOURCES["medusa"](model), nodes=6), [0, 0], []
    more, cut = Adaptive._more, Adaptive.cut

    def slow(self: Adaptive, tree: Any) -> Any:
        asked[0] += 1
        time.sleep(0.05)
        return cut(self, tree)

    def asking(self: Adaptive, path: Any, depth: int) -> bool:
        asked[1] += 1
        return more(self, path, depth)

    planning = fast.planning
    monkeypatch.setattr(Adaptive, "cut", slow)
    monkeypatch.setattr(Adaptive, "_more", asking)
    monkeypatch.setattr(Adaptive, "learn", lambda self, *_: plain.append(self.plain_steps))
    found = measure(fast, contexts=(8,), repeats=1)
    assert fast.planning is planning and asked[0] >= 10 and asked[1] >= 2 * asked[0] and set(plain) == {0}
    assert found.overhead >= 0.04  # but for the last step, there is room for guesses in all


@pytest.mark.parametrize("source", ["medusa", "eagle3", "draft-model-tree", "lookahead", "medusa-and-prompt-lookup"])
def test_every_source_can_be_measured(model: Any, source: str) -> None:
    fast = Speculator(model, SOURCES[source](model), nodes=6)
    state = torch.get_rng_state()
    found = measure(fast, contexts=(8, 10_000), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)  # draws no random number
    assert all(curve.context < 256 for curve in found.curves)  # the target has no more positions
    for rising in (*(curve.seconds for curve in found.curves), *(draft.seconds for draft in found.drafts)):
        assert list(rising) == sorted(rising) and rising[-1] > 0
    assert len(found.drafts[0].seconds) == fast.depth + 1
    longer = [curve for curve in found.curves if curve.context > 8]
    assert all(a >= b for a, b in zip(longer[0].seconds, found.curves[0].seconds, strict=True))


def test_repeats_take_turns_and_the_first_turn_counts_for_nothing() -> None:
    asked: list[str] = []

    def once(case: str) -> float:
        asked.append(case)
        return {"a": [99.0, 1.0, 5.0, 2.0], "b": [99.0, 7.0, 7.0, 8.0]}[case][asked.count(case) - 1]

    assert _medians(once, ["a", "b"], 3) == [2.0, 7.0]
    assert asked == ["a", "b", "b", "a", "a", "b", "b", "a"]


# keeping -------------------------------------------------------------------------------------------------------------


def test_the_first_adaptive_speculator_measures_and_the_next_one_reads(
    model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first = Speculator(model, "prompt-lookup", nodes=4, plan="adaptive")
    assert "measuring" in caplog.text
    assert first.report.tokens == 0 and first.report.plan == "fixed"  # measuring leaves no report behind
    files = list((cache / "plans").iterdir())
    assert [file.suffix for file in files] == [".json"] and files[0].stat().st_mode & 0o444 == 0o444
    monkeypatch.setattr(costs_of, "measure", lambda fast: pytest.fail("measured again"))
    again = Speculator(model, "prompt-lookup", nodes=4, plan="adaptive")
    assert again.planning.plan == first.planning.plan
    expected = model.generate(prompt(), **OPTIONS)
    assert again.generate(prompt(), **OPTIONS).tolist() == expected.tolist()
    assert again.report.plan == "adaptive" and again.report.as_dict()["plan"] == "adaptive"
    assert "greedy" in again.planning.learned


@pytest.mark.parametrize("broken", ["", "{", '{"version": 99}', "[1]", '{"version": 1, "key": {}}'])
def test_a_broken_or_foreign_file_is_measured_anew(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    fast = Speculator(model, "prompt-lookup", nodes=4)
    path = cached_path(key_of(fast))
    path.parent.mkdir(parents=True)
    path.write_text(broken)
    monkeypatch.setattr(costs_of, "measure", lambda fast: made(nodes=4))
    with caplog.at_level(logging.WARNING):
        found = Speculator(model, "prompt-lookup", nodes=4, plan="adaptive").planning.plan
    assert found is not None and found.costs == made(nodes=4) and read_plan(path) == found
    assert "left aside" in caplog.text


def test_larger_trees_than_were_measured_are_measured_anew(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(fast: Any) -> Any:
        asked.append(fast.nodes)
        return made(nodes=fast.nodes)

    monkeypatch.setattr(costs_of, "measure", measured)
    for nodes in (8, 4, 16):
        Speculator(model, "prompt-lookup", nodes=nodes, plan="adaptive")
    assert asked == [8, 16]


def test_a_plan_from_elsewhere_keeps_what_it_knows_of_the_guesses(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_of, "measure", lambda fast: made(nodes=8))
    fast = Speculator(model, "prompt-lookup", nodes=8)
    known = {"tokens": 2.5, "cost": 1.25, "steps": 40}
    given = Plan(key_of(fast) | {"machine": "another"}, made(slope=9.0), known)
    found = Speculator(model, "prompt-lookup", nodes=8, plan=given)
    assert found.planning.plan == Plan(key_of(fast), made(nodes=8), known)
    begun: Any = found.planning.begin("greedy", 1, False)
    assert begun.learned.speed == 2.0 and begun.learned.steps == 40
    own = given._replace(key=key_of(fast))
    assert Speculator(model, "prompt-lookup", nodes=8, plan=own).planning.plan is own


def test_an_interrupted_write_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plan = tmp_path / "folder" / FILE, Plan({"a": "b"}, made())
    keep(plan, path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        keep(plan._replace(key={}), path)
    assert read_plan(path) == plan and list(path.parent.iterdir()) == [path]


def test_keys_tell_apart_what_costs_differently(model: Any) -> None:
    keys = [key_of(Speculator(model, "prompt-lookup", nodes=4, **options)) for options in ({}, {"longest": 7})]
    other = llama(num_hidden_layers=2).double()
    keys += [key_of(Speculator(other, "prompt-lookup", nodes=4)), key_of(Speculator(llama(), "prompt-lookup", nodes=4))]
    keys.append(key_of(Speculator(model, "prompt-lookup", nodes=4, compile="eager")))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    assert key_of(Speculator(model, "prompt-lookup", nodes=16)) == keys[0]  # trees of any size share a file
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert key_of(Speculator(model, "prompt-lookup", nodes=4)) != keys[0]
    finally:
        torch.set_num_threads(before)


def test_sources_are_described_by_what_costs(model: Any) -> None:
    wide, narrow = (Speculator(model, untrained("medusa")(model), width=w).source for w in (8, 2))
    assert described(wide) != described(narrow) and "medusa" in described(wide) and "parameters" in described(wide)
    both = Speculator(model, ["prompt-lookup", untrained("medusa")(model)]).source
    assert described(wide) in described(both) and "prompt-lookup" in described(both)
    assert "draft-model" in described(Speculator(model, smaller(model)).source)


# the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that spells a text again and again, and heads for it."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = byte_tokenizer()
    ids = tokenizer("tune", add_special_tokens=False)["input_ids"]
    model = chain(dict(zip(ids, [*ids[1:], ids[0]], strict=True)))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    FAMILIES["medusa"].from_target(model).save_pretrained(folder / "heads")
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": "tune"}]} for i in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def run(folder: Path, *args: str) -> Any:
    options = ["tune", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    options += ["--nodes", "8", "--context", "16", "--repeats", "1", "--max-new-tokens", "12", *args]
    return CliRunner().invoke(app, options)


def test_tune_writes_a_plan_that_the_heads_are_loaded_with(folder: Path, cache: Path, monkeypatch: Any) -> None:
    done = run(folder, "--heads", str(folder / "heads"), "--rows", "1", "--rows", "2")
    assert done.exit_code == 0, (done.output, done.exception)
    for said in ("plain, ms", "drafting, 2 rows", "tokens per pass", "expected speed over plain steps", "written:"):
        assert said in done.output
    plan = plan_in(str(folder / "heads"))
    assert plan is not None and plan.learned is not None and read_plan(cached_path(plan.key)) == plan
    assert [curve.rows for curve in plan.costs.curves] == [1, 2] and plan.costs.sizes == (1, 2, 4, 6, 8)
    from headstart.infer.embedded import load_target

    target, _ = load_target(str(folder / "target"))
    monkeypatch.setattr(costs_of, "measure", lambda fast: pytest.fail("measured again"))
    for options in ({"plan": "adaptive"}, {"plan": plan}):
        fast = Speculator.from_pretrained(str(folder / "heads"), target, nodes=8, **options)
        assert fast.planning.plan == plan
        expected = target.generate(prompt() % 64, **OPTIONS, pad_token_id=0)
        assert fast.generate(prompt() % 64, **OPTIONS, pad_token_id=0).tolist() == expected.tolist()
        assert fast.report.plan == "adaptive"
    assert Speculator.from_pretrained(str(folder / "heads"), target).planning.plan is None


def test_growth_curves_are_shown_and_kept(folder: Path, tmp_path: Path) -> None:
    """A point for every batch size, context and tree; the plan holds the same figures."""
    kept = tmp_path / "curves.json"
    asked = ["--drafter", "prompt-lookup", "--curves", str(kept), "--context", "32", "--rows", "1", "--rows", "2"]
    done = run(folder, *asked)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "milliseconds a step and row" in done.output and f"written: {kept}" in done.output.replace("\n", "")
    found = json.loads(kept.read_text())
    places = [(p["rows"], p["context"], p["nodes"]) for p in found["points"]]
    assert places == [(b, c, n) for b in (1, 2) for c in (16, 32) for n in (1, 2, 4, 6, 8)]
    assert all(p["seconds_a_row"] == pytest.approx(p["seconds"] / p["rows"]) for p in found["points"])
    plan = read_plan(cached_path(found["key"]))
    assert plan is not None and plan.costs.overhead == found["overhead"]
    wide = [p["seconds"] - found["overhead"] for p in found["points"] if (p["rows"], p["context"]) == (2, 32)]
    assert wide == pytest.approx(list(plan.costs.curves[3].seconds))
    assert {d["depth"] for d in found["drafts"]} == set(range(len(plan.costs.drafts[0].seconds)))


def test_tune_without_heads_writes_into_the_cache(folder: Path, cache: Path) -> None:
    done = run(folder, "--drafter", "prompt-lookup")
    assert done.exit_code == 0, (done.output, done.exception)
    (file,) = (cache / "plans").iterdir()
    plan = read_plan(file)
    assert plan is not None and plan.best is None and "prompt-lookup" in plan.key["guesses"]


def test_no_name_of_a_machine_or_path_stands_in_a_plan(folder: Path) -> None:
    import platform

    done = run(folder, "--heads", str(folder / "heads"))
    assert done.exit_code == 0, (done.output, done.exception)
    text = (folder / "heads" / FILE).read_text()
    assert str(folder) not in text and str(Path.home()) not in text
    assert not platform.node() or platform.node() not in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "give --heads, or --drafter"),
        (["--drafter", "prompt-lookup", "--dtype", "int8"], "expected one of auto"),
        (["--drafter", "prompt-lookup", "--nodes", "1"], "2"),
        (["--drafter", "no-such"], "known are"),
        (["--drafter", "prompt-lookup", "--curves", "none/curves.json"], "none is no folder"),
        (["--drafter", "prompt-lookup", "--prompts", "none.jsonl"], "none.jsonl"),
    ],
)
def test_bad_options_are_refused_with_what_is_expected(folder: Path, args: list[str], said: str) -> None:
    done = run(folder, *args)
    assert done.exit_code != 0
    assert said in " ".join(f"{done.output} {done.exception}".replace("│", " ").split())


def test_heads_without_a_plan_carry_none(tmp_path: Path, model: Any) -> None:
    untrained("medusa")(model).save_pretrained(tmp_path)
    assert plan_in(str(tmp_path)) is None
    (tmp_path / FILE).write_text("{}")
    assert plan_in(str(tmp_path)) is None
