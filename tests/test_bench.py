"""Measuring: the order of runs, counts, verdicts, refusals, the first token; suites of prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import FAMILIES
from headstart.infer import bench as measuring
from headstart.infer.bench import (
    BUG,
    DRAWS,
    EQUAL,
    LOSSY,
    Contestant,
    Job,
    Prompt,
    batches,
    first_token_jobs,
    jobs,
    measure,
    own_parameters,
    rotated,
    spread,
)
from headstart.infer.figures import ALL, FIRST, PLAIN, Run, summary
from headstart.infer.speculator import Speculator
from headstart.infer.target import Target
from headstart.infer.tree import DraftTree
from headstart.scripts import suites
from tests.drafters import adversary, oracle
from tests.toys import c64, chain, llama

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def greedy_jobs(work: list[list[Prompt]], **options: Any) -> list[Job]:
    return jobs(work, {"greedy": GREEDY | options})


def prompts(*sizes: tuple[str, int]) -> list[Prompt]:
    """For each (task, count) that many prompts of growing length."""
    return [Prompt(f"{task}{i}", task, torch.arange(3, 6 + i)) for task, count in sizes for i in range(count)]


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
    work = greedy_jobs(batches(prompts(("a", 3)), 1))
    measuring.warm_up(model, contestants, work)
    runs = list(measure(model, contestants, work[:2], seed=0))
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
    runs = [run for found in measure(model, contestants, greedy_jobs(work), seed=0) for run in found]
    assert [run.looping for run in runs] == [(True,)] * 4
    counting = c64()
    straight = [Contestant(PLAIN, counting.generate)]
    assert not next(iter(measure(counting, straight, greedy_jobs(work), seed=0)))[0].looping[0]


def test_every_call_gets_the_same_seed() -> None:
    model = llama().double()
    contestants = [Contestant(PLAIN, model.generate), Contestant.ours("fast", Speculator(model, "token-recycling"))]
    work = greedy_jobs(batches(prompts(("a", 3)), 1), do_sample=True, temperature=1.0, top_k=0)
    runs = [run for found in measure(model, contestants, work, 5) for run in found]
    assert [run.verdicts for run in runs] == [(EQUAL,)] * 6


def test_a_batch_of_three_is_compared_row_by_row_and_a_refusal_is_reported() -> None:
    model = llama(eos_token_id=list(range(100, 140))).double()
    contestants = measuring.stock(model, lookup=True)
    contestants.append(Contestant.ours("fast", Speculator(model, "prompt-lookup")))
    work = greedy_jobs(batches(prompts(("a", 3)), 3))
    measuring.warm_up(model, contestants, work)
    assert "batch_size = 1" in contestants[1].refused and not contestants[2].refused
    (runs,) = measure(model, contestants, work, seed=0)
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
            measuring.warm_up(model, contestants, greedy_jobs([prompts(("a", 1))]))


# field cases


def test_guesses_after_the_end_count_for_nothing() -> None:
    """FC-139: C64 with end token 8 after prompt 5, an oracle that guesses five tokens."""
    model = c64(eos=8)
    contestants = [Contestant(PLAIN, model.generate), Contestant.ours("oracle", Speculator(model, oracle(model, 5)))]
    (runs,) = measure(model, contestants, greedy_jobs([[Prompt("p", "a", torch.tensor([5]))]]), seed=0)
    plain, fast = runs
    assert plain.tokens == fast.tokens == 3 and plain.passes == 3
    assert fast.passes + sum(depth.kept for depth in fast.depths) == 3
    assert fast.tokens / fast.passes <= 3


def test_slower_is_shown_as_slower_and_the_warm_up_counts_nowhere() -> None:
    """FC-142: T0 with a foe, then with the oracle: the same tokens in both arms, and what each needed for them."""
    model = llama().double()
    cold = [True]

    def foe(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2 if cold else 0.0)
        cold.clear()
        return contestants[1].fast.generate(*args, **kwargs)  # type: ignore[union-attr]

    contestants = [Contestant(PLAIN, model.generate), Contestant.ours("foe", Speculator(model, adversary(model)))]
    contestants[1].call = foe
    contestants.append(Contestant.ours("oracle", Speculator(model, oracle(model), nodes=64)))
    work = greedy_jobs(batches(prompts(("a", 3)), 1))
    measuring.warm_up(model, contestants, work)
    assert cold == []  # the slow first call is over, and only what comes now is measured
    runs = [run for found in measure(model, contestants, work, seed=0) for run in found]
    assert len(runs) == 9
    table = summary(runs)
    foe_found, found = table["foe"][ALL], table["oracle"][ALL]
    assert foe_found.speedup < 1 and foe_found.high < 1 and foe_found.verdicts == {EQUAL: 3}
    assert foe_found.tokens == foe_found.plain_tokens == found.tokens == found.plain_tokens == 36
    assert foe_found.tokens_per_pass == 1.0 and foe_found.accepted_by_depth[0] == 0.0
    assert foe_found.forwards >= 36 > found.forwards and found.tokens_per_pass > 2
    assert all(value.draft and value.verify and value.split["prefill"] > 0 for value in (foe_found, found))


def test_a_verifier_that_changes_a_token_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own passes do not excuse it: what they differ by from steps is no rounding."""
    model, whole = llama(), Target.verify
    contestants = [Contestant(PLAIN, model.generate), Contestant.ours("oracle", Speculator(model, oracle(model)))]

    def crooked(self: Target, tree: DraftTree) -> Any:
        found = whole(self, tree)
        found.logits[:, 1:] = found.logits[:, 1:].roll(1, -1)
        return found

    monkeypatch.setattr(Target, "verify", crooked)
    (runs,) = measure(model, contestants, greedy_jobs(batches(prompts(("a", 1)), 1)), seed=0)
    assert runs[0].verdicts == (EQUAL,) and runs[1].verdicts == (BUG,)
    assert "a bug" in runs[1].remarks[0] and "more than rounding" in runs[1].remarks[0]


# the first token


def test_first_tokens_are_timed_after_prompts_of_the_lengths_asked_for() -> None:
    made = first_token_jobs(prompts(("a", 3)), [5, 40], 2, GREEDY)
    assert [(job.decoding, job.number, job.batch[0].task, len(job.batch[0].ids)) for job in made] == [
        (FIRST, 0, "5", 5),
        (FIRST, 1, "40", 40),
        (FIRST, 2, "5", 5),
        (FIRST, 3, "40", 40),
    ]
    assert made[1].batch[0].ids[:10].tolist() == [3, 4, 5, 3, 4, 5, 6, 3, 4, 5]
    assert first_token_jobs(prompts(("a", 1)), [], 2, GREEDY) == []
    model = llama()
    contestants = [Contestant(PLAIN, model.generate), Contestant.ours("fast", Speculator(model, "prompt-lookup"))]
    runs = [run for found in measure(model, contestants, made, seed=0) for run in found]
    table = summary(runs)
    assert set(table["fast"]) == {ALL, "5", "40"} and table["fast"]["40"].runs == 2
    ratios = [plain.first_token / fast.first_token for plain, fast in zip(*both(runs), strict=True)]
    assert table["fast"]["5"].first_token_speedup == pytest.approx((ratios[0] + ratios[2]) / 2)


def both(runs: list[Run]) -> list[list[Run]]:
    return [sorted((r for r in runs if r.contestant == name), key=lambda r: r.batch) for name in (PLAIN, "fast")]


# weights


def test_own_parameters_are_those_of_what_guesses() -> None:
    model = llama()
    heads = FAMILIES["medusa"].from_target(model, num_draft_heads=2)
    count = sum(p.numel() for p in heads.parameters())
    small = llama(num_hidden_layers=1)
    assert count == 2 * (64 * 64 + 64)
    for source, own in ((heads, count), (["prompt-lookup", heads], count), ("prompt-lookup", 0)):
        assert own_parameters(Speculator(model, source).source) == own
    assert own_parameters(Speculator(model, small).source) == small.num_parameters()
    next(iter(heads.parameters())).requires_grad_(False)
    assert own_parameters(Speculator(model, heads).source) == count - next(iter(heads.parameters())).numel()


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
