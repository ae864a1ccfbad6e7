"""``headstart bench``: figures from known times, the order of runs, verdicts, refusals, and the command on a toy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from headstart.heads import FAMILIES
from headstart.infer import bench as measuring
from headstart.infer.bench import BUG, DRAWS, EQUAL, LOSSY, Contestant, Prompt, batches, measure, rotated, spread
from headstart.infer.figures import ALL, PLAIN, Figures, Run, figures, median_interval, summary
from headstart.infer.report import Report
from headstart.infer.speculator import Speculator
from headstart.scripts import suites
from headstart.scripts.cli import app
from tests.byte_tokenizer import byte_tokenizer
from tests.toys import c64, chain, llama

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def run_of(batch: int, name: str, seconds: float, **changes: Any) -> Run:
    run = Run(
        batch=batch,
        contestant=name,
        task="a",
        prompts=(f"p{batch}",),
        turn=0,
        seconds=seconds,
        first_token=seconds / 10,
        tokens=100,
        passes=100 if name == PLAIN else 40,
        forwards=41,
        looping=(False,),
        split={},
        verdicts=(EQUAL,),
    )
    return run._replace(**changes)


def prompts(*sizes: tuple[str, int]) -> list[Prompt]:
    """For each (task, count) that many prompts of growing length."""
    return [Prompt(f"{task}{i}", task, torch.arange(3, 6 + i)) for task, count in sizes for i in range(count)]


# figures


def test_a_ratio_is_tokens_per_second_over_plain_tokens_per_second() -> None:
    runs = [run_of(i, PLAIN, 4.0) for i in range(3)]
    runs += [run_of(0, "fast", 2.0), run_of(1, "fast", 1.0), run_of(2, "fast", 4.0, tokens=50, passes=20)]
    found = figures(runs, "fast")
    assert found is not None
    assert found.speedup == 2.0  # of 2, 4 and 0.5
    assert (found.low, found.high) == (0.5, 4.0) and found.coverage == 1 - 2 / 8
    assert found.speed == 50.0 and found.tokens_per_pass == 250 / 100
    assert found.first_token == pytest.approx(0.2)
    assert (
        figures(runs, PLAIN)._asdict() | {"verdicts": {}}
        == Figures(  # type: ignore[union-attr]
            3, 1.0, 1.0, 1.0, 0.75, 25.0, 1.0, 0.4, 0.0, {}
        )._asdict()
    )


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


# prompts


def test_a_limit_is_spread_over_tasks_and_within_them() -> None:
    picked = spread(prompts(("a", 10), ("b", 10), ("c", 1)), 6)
    assert [p.name for p in picked] == ["a1", "b2", "c0", "a5", "b7", "a8"]
    assert len(spread(picked, 99)) == len(spread(picked)) == 6


def test_a_batch_holds_one_task_and_the_tasks_come_in_turn() -> None:
    made = batches(prompts(("a", 5), ("b", 2)), 2)
    assert [[p.name for p in batch] for batch in made] == [["a0", "a1"], ["b0", "b1"], ["a2", "a3"], ["a4"]]


def test_each_is_first_equally_often() -> None:
    orders = [rotated("abc", number) for number in range(6)]
    assert orders[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]] and orders[3:] == orders[:3]


# measuring


def says(*tokens: int) -> Callable[..., Tensor]:
    """A way of decoding that writes these tokens, whatever the prompt and the target."""

    def call(ids: Tensor, *, streamer: Any, **_: Any) -> Tensor:
        new = torch.tensor(tokens)
        for part in (ids, new[:1], new[1:]):
            streamer.put(part)
        return torch.cat([ids, new[None]], dim=1)

    return call


def test_order_counts_and_verdicts_of_greedy_runs() -> None:
    model = llama().double()
    fast = Speculator(model, "prompt-lookup")
    lookup = measuring.stock(model, lookup=True, assistant=llama().double())
    plain_text = model.generate(torch.arange(3, 6)[None], **GREEDY)[0, 3:].tolist()
    wrong = Contestant("wrong", says(*plain_text[:5], plain_text[5] + 1))
    short = Contestant("short", says(*plain_text[:5]))
    contestants = [*lookup, Contestant.ours("fast", fast), wrong, short]
    work = batches(prompts(("a", 3)), 1)
    measuring.warm_up(model, contestants, work[0], GREEDY)
    runs = list(measure(model, contestants, work[:2], GREEDY, seed=0))
    assert [found[0].contestant for found in runs] == [PLAIN, "transformers prompt-lookup"]
    first = {run.contestant: run for run in runs[0]}
    assert [run.turn for run in runs[1]] == [0, 1, 2, 3, 4, 5] and runs[1][-1].contestant == PLAIN
    plain, assisted, ours = first[PLAIN], first["transformers assisted"], first["fast"]
    assert plain.tokens == plain.passes == plain.forwards == 12
    assert assisted.tokens == 12 and assisted.passes == assisted.forwards < 12  # drafts are the target's own
    assert [run.passes for run in runs[1] if run.contestant == "fast"] == [fast.report.passes]
    assert ours.passes <= 12 and ours.forwards >= ours.passes and ours.split["verify"] > 0
    assert all(0 < run.first_token < run.seconds for run in first.values())
    kinds = {name: run.verdicts for name, run in first.items()}
    assert kinds == dict.fromkeys(list(first)[:4], (EQUAL,)) | {"wrong": (BUG,), "short": (BUG,)}
    assert "at token 5" in first["wrong"].remarks[0] and first["wrong"].remarks[0].startswith("a0: ")
    assert "goes on" in first["short"].remarks[0] and ours.remarks == ()
    assert model._forward_hooks == {}


def test_a_near_tie_is_told_from_a_bug() -> None:
    model = llama()
    with torch.no_grad():
        prompt = torch.arange(3, 8)
        best = int(model(prompt[None]).logits[0, -1].argmax())
        model.lm_head.weight[[10, 11]] = model.lm_head.weight[best] * 1.5  # the two best, and equal
    kind, said = measuring.verdict(model, prompt, torch.tensor([10, 5]), torch.tensor([11, 5]), sampled=False)
    assert kind == "near tie" and "token 0" in said
    assert measuring.verdict(model, prompt, torch.tensor([10]), torch.tensor([12]), sampled=False)[0] == BUG


def test_sampled_and_lossy_texts_that_differ_are_no_bugs() -> None:
    one, other = torch.tensor([4, 5]), torch.tensor([4, 6])
    assert measuring.verdict(None, one, one, one, sampled=True) == (EQUAL, "")
    assert measuring.verdict(None, one, one, other, sampled=True) == (DRAWS, "")
    assert measuring.verdict(None, one, one, other, sampled=False, lossless=False) == (LOSSY, "")


def test_a_target_that_loops_is_seen_to_loop() -> None:
    model = chain({0: 1, 1: 2, 2: 0}, size=64)
    contestants = [Contestant(PLAIN, model.generate), Contestant.ours("fast", Speculator(model, "prompt-lookup"))]
    work = [[Prompt("loop", "a", torch.tensor([0, 1, 2]))], [Prompt("short", "a", torch.tensor([0]))]]
    runs = [run for found in measure(model, contestants, work, GREEDY, seed=0) for run in found]
    assert [run.looping for run in runs] == [(True,)] * 4
    counting = c64()
    straight = [Contestant(PLAIN, counting.generate)]
    assert not next(iter(measure(counting, straight, work, GREEDY, seed=0)))[0].looping[0]


def test_every_call_gets_the_same_seed() -> None:
    model = llama().double()
    contestants = [Contestant(PLAIN, model.generate), Contestant.ours("fast", Speculator(model, "token-recycling"))]
    options = GREEDY | {"do_sample": True, "temperature": 1.0, "top_k": 0}
    runs = [run for found in measure(model, contestants, batches(prompts(("a", 3)), 1), options, 5) for run in found]
    assert [run.verdicts for run in runs] == [(EQUAL,)] * 6


def test_a_batch_of_three_is_compared_row_by_row_and_a_refusal_is_reported() -> None:
    model = llama(eos_token_id=list(range(100, 140))).double()
    contestants = measuring.stock(model, lookup=True)
    contestants.append(Contestant.ours("fast", Speculator(model, "prompt-lookup")))
    work = batches(prompts(("a", 3)), 3)
    measuring.warm_up(model, contestants, work[0], GREEDY)
    assert "batch_size = 1" in contestants[1].refused and not contestants[2].refused
    (runs,) = measure(model, contestants, work, GREEDY, seed=0)
    plain, fast = runs
    assert plain.contestant == PLAIN and fast.contestant == "fast"
    assert fast.verdicts == (EQUAL,) * 3 and fast.prompts == ("a0", "a1", "a2")
    assert plain.tokens == plain.passes == fast.tokens == fast_tokens(contestants[2]) < 36  # rows end on their own


def fast_tokens(contestant: Contestant) -> int:
    assert contestant.fast is not None
    return contestant.fast.report.tokens


def test_one_of_ours_or_plain_that_refuses_stops_before_anything_is_measured() -> None:
    def no(*_: Any, **__: Any) -> Tensor:
        raise ValueError("not this")

    model = c64()
    broken = Contestant("mine", no, Speculator(model, "prompt-lookup"))
    for contestants in ([Contestant(PLAIN, model.generate), broken], [Contestant(PLAIN, no)]):
        with pytest.raises(ValueError, match="cannot decode this: not this"):
            measuring.warm_up(model, contestants, prompts(("a", 1)), GREEDY)


# suites


def test_a_named_suite_is_a_file_in_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test_200.jsonl").write_text("")
    assert suites.find_suite("gsm8k", tmp_path) == tmp_path / "gsm8k_test_200.jsonl"
    assert suites.find_suite("mine.jsonl", None) == Path("mine.jsonl")
    with pytest.raises(ValueError, match=r"HEADSTART_DATA"):
        suites.find_suite("gsm8k", None)
    with pytest.raises(ValueError, match=r"no mt_bench\.jsonl in .*--data"):
        suites.find_suite("mt_bench", tmp_path)
    with pytest.raises(ValueError, match="spec_bench, mt_bench, humaneval, gsm8k"):
        suites.find_suite("spec-bench", tmp_path)


def test_rows_give_their_first_user_turn_and_their_group(tmp_path: Path) -> None:
    system = {"role": "system", "content": "S"}
    user = [{"role": "user", "content": text} for text in "ab"]
    rows = [
        {"id": "1", "task": "x/y", "messages": [system, *user]},
        {"question_id": 2, "category": "z", "turns": ["c"]},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "d"}])))
    found = suites.read_suite(file)
    assert [(task, [m["content"] for m in messages]) for _, task, messages in found] == [
        ("x", ["S", "a"]),
        ("z", ["c"]),
        ("own", ["d"]),
    ]
    file.write_text(json.dumps(rows[0]))
    assert suites.read_suite(file)[0][1] == "x/y"
    file.write_text('{"messages": []}')
    with pytest.raises(ValueError, match="holds no prompts"):
        suites.read_suite(file)


# the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that spells a text, heads for it, a random target, a draft model, and a suite of two tasks."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = byte_tokenizer()
    ids = tokenizer("🚀é, on and on", add_special_tokens=False)["input_ids"]
    spells = chain(dict(zip(ids, [*ids[1:], tokenizer.eos_token_id], strict=True)), eos=tokenizer.eos_token_id)
    for name, model in (
        ("target", spells),
        ("random", llama(eos_token_id=None)),
        ("draft", llama(num_hidden_layers=1)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    FAMILIES["medusa"].from_target(spells).save_pretrained(folder / "heads")
    rows = [{"id": f"p{i}", "task": f"t{i % 2}", "prompt": text} for i, text in enumerate(["🚀", "é", "🚀é, o", "n"])]
    (folder / "mt_bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def call(folder: Path, *args: str, target: str = "target", suite: str = "mt_bench") -> tuple[int, str, str]:
    options = ["bench", "--suite", suite, "--target", str(folder / target), "--raw", "--max-new-tokens", "9", *args]
    done = CliRunner().invoke(app, options, env={"HEADSTART_DATA": str(folder)})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 1, done.stdout, str(done.exception)
    return done.exit_code, done.stdout, done.stderr


def test_the_command_end_to_end(folder: Path) -> None:
    saved, heads = folder / "figures.json", str(folder / "heads")
    args = ["--heads", heads, "--drafter", "heads+prompt-lookup", "--baseline", "prompt-lookup", "--save", str(saved)]
    code, out, err = call(folder, *args)
    assert code == 0, err
    assert "greedy" in out and "heads+prompt-lookup" in out and "4 equal" in out and "2 equal" in out
    assert "4/4 batches" in err
    figures = json.loads(saved.read_text())
    assert figures["version"] == 1 and figures["complete"] is True
    wanted = {
        "suite",
        "target",
        "dtype",
        "device",
        "attention",
        "torch",
        "transformers",
        "threads",
        "decoding",
        "nodes",
    }
    assert wanted | {"rule", "batch_size", "seed", "max_new_tokens", "prompts"} <= set(figures["protocol"])
    names = [PLAIN, "transformers prompt-lookup", "medusa", "heads+prompt-lookup"]
    assert [c["name"] for c in figures["contestants"]] == names
    assert [c["ours"] for c in figures["contestants"]] == [False, False, True, True]
    assert len(figures["runs"]) == 16 and set(figures["runs"][0]) == set(Run._fields)
    assert set(figures["figures"]) == set(names) and set(figures["figures"]["medusa"]) == {ALL, "t0", "t1"}
    assert set(figures["figures"]["medusa"][ALL]) == set(Figures._fields)
    assert figures["figures_without_loops"]["medusa"][ALL]["runs"] == 4
    assert all(run["verdicts"] == [EQUAL] for run in figures["runs"])
    assert sorted(run["turn"] for run in figures["runs"]) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_batches_sampling_and_a_draft_model(folder: Path) -> None:
    args = ["--draft-model", str(folder / "draft"), "--batch-size", "2", "--temperature", "0.7"]
    code, out, err = call(folder, *args, target="random", suite=str(folder / "mt_bench.jsonl"))
    assert code == 0, err
    assert "temperature 0.7" in out and "refused:" in out and "draft-model" in out and "prompts 4" in out


def test_two_heads_have_two_names(folder: Path) -> None:
    heads = str(folder / "heads")
    code, out, err = call(folder, "--heads", heads, "--heads", heads, "--limit", "1")
    assert code == 0, err
    assert "medusa heads #2" in out


def test_a_wrong_text_ends_in_an_error_after_the_file_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(self: Speculator, ids: Tensor, *, streamer: Any, **_: Any) -> Tensor:
        self.report = Report(tokens=2, passes=1)
        return says(70, 71)(ids, streamer=streamer)

    monkeypatch.setattr(Speculator, "generate", worse)
    saved = folder / "wrong.json"
    code, out, err = call(folder, "--drafter", "prompt-lookup", "--limit", "1", "--save", str(saved))
    assert code == 1 and "more than rounding" in err and "p" in err
    assert "1 bug" in out and json.loads(saved.read_text())["complete"] is True


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [(KeyboardInterrupt(), 130, "interrupted after 1 of 4"), (RuntimeError("full"), 1, "full")],
)
def test_what_was_measured_before_an_interruption_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException, status: int, said: str
) -> None:
    whole = measure

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        yield next(iter(whole(*args, **kwargs)))
        raise ends

    monkeypatch.setattr(measuring, "measure", interrupted)
    saved = folder / "part.json"
    code, out, err = call(folder, "--drafter", "prompt-lookup", "--save", str(saved))
    assert code == status and said in err and "1 equal" in out
    figures = json.loads(saved.read_text())
    assert figures["complete"] is False and len(figures["runs"]) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "nothing to compare"),
        (["--drafter", "medusa"], "known are prompt-lookup, token-recycling"),
        (["--drafter", "prompt-lookup+"], "unknown drafter ''"),
        (["--drafter", "heads+prompt-lookup"], "needs --heads"),
        (["--drafter", "draft-model"], "needs --draft-model"),
        (["--baseline", "vllm"], "known are plain, prompt-lookup, assisted"),
        (["--baseline", "assisted"], "--draft-model"),
        (["--drafter", "prompt-lookup", "--rule", "magic"], "known are match"),
        (["--drafter", "prompt-lookup", "--nodes", "0"], "0; expected 1 or more"),
        (["--drafter", "prompt-lookup", "--limit", "-3"], "-3; expected 1 or more"),
        (["--drafter", "prompt-lookup", "--batch-size", "0"], "0; expected 1 or more"),
        (["--drafter", "prompt-lookup", "--temperature", "nan"], "expected 0"),
        (["--drafter", "prompt-lookup", "--dtype", "int8"], "bfloat16"),
        (["--drafter", "prompt-lookup", "--save", "no/such/folder/x.json"], "make it first"),
        (["--suite", "humaneval", "--drafter", "prompt-lookup"], "no humaneval.jsonl in"),
        (["--suite", "missing.jsonl", "--drafter", "prompt-lookup"], "no such file"),
        (["--heads", "no/such/heads"], "no/such/heads"),
    ],
)
def test_bad_input_is_refused_before_the_model_loads(
    folder: Path, args: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("headstart.infer.embedded.load_target", never)
    code, _, err = call(folder, *args)
    assert code != 0
    assert said in " ".join(err.replace("│", " ").split())


def test_prompts_that_cannot_be_answered_are_counted(folder: Path) -> None:
    code, _, err = call(folder, "--drafter", "prompt-lookup", "--max-new-tokens", "256")
    assert code == 1 and "4 of 4 prompts left out" in err and "lower --max-new-tokens" in err
