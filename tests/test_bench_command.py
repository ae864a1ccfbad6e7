"""``headstart bench`` as a command on a toy: what it shows and saves, how it goes on, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from headstart.heads import FAMILIES
from headstart.infer import bench as measuring
from headstart.infer.bench import EQUAL, measure
from headstart.infer.drafters import DRAFTERS
from headstart.infer.figures import ALL, PLAIN, Saved
from headstart.infer.prepack import supported
from headstart.infer.report import Report
from headstart.infer.speculator import Speculator
from headstart.scripts.bench_report import remarks
from headstart.scripts.cli import app
from headstart.scripts.contestants import speculators
from tests.byte_tokenizer import byte_tokenizer
from tests.drafters import ScriptedSource, adversary
from tests.test_bench import says
from tests.toys import chain, llama

SHORT = ("--max-new-tokens", "9", "--first-token")
LOOKUP = ("--drafter", "prompt-lookup")


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


def call(
    folder: Path, *args: str, target: str = "target", suite: str = "mt_bench", first: str = "0"
) -> tuple[int, str, str]:
    options = ["bench", "--suite", suite, "--target", str(folder / target), "--raw", *SHORT, first, *args]
    done = CliRunner().invoke(app, options, env={"HEADSTART_DATA": str(folder)})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 1, done.stdout, str(done.exception)
    return done.exit_code, done.stdout, done.stderr


# elsewhere prepacking is refused by name: there is nothing to measure
@pytest.mark.skipif(not supported(), reason="this CPU does not multiply bfloat16 by oneDNN")
def test_prepacked_contestants_and_trees_as_plans(folder: Path) -> None:
    saved = folder / "packed.json"
    args = ["--drafter", "lookahead", "--drafter", "prompt-lookup", "--plan", "5x2", "--plan", "fixed", "--prepack"]
    args += ["--baseline", "prepacked", "--dtype", "bfloat16", "--nodes", "7", "--save", str(saved), "--no-plots"]
    code, out, err = call(folder, *args, target="random")
    assert code == 0 and "prepack yes" in out, err
    found = json.loads(saved.read_text())
    guessing = [f"{source}, {plan}" for source in ("lookahead", "prompt-lookup") for plan in ("5x2", "fixed")]
    assert [c["name"] for c in found["contestants"]] == [PLAIN, "plain, prepacked", *guessing]
    depths = {name: len(of[ALL]["accepted_by_depth"]) for name, of in found["figures"]["greedy"].items()}
    assert depths["lookahead, 5x2"] <= 2 and depths["prompt-lookup, 5x2"] <= 2
    for options, said in (
        (["--prepack", "--dtype", "float32"], "it is for bfloat16 weights on a CPU"),
        (["--baseline", "prepacked", "--device", "cuda"], "it is for bfloat16 weights on a CPU"),
        (["--plan", "0x2"], "nodes x depth as in 8x2"),
    ):
        code, out, err = call(folder, *LOOKUP, *options)
        assert code == 2 and said in " ".join(err.replace("│", " ").split()), err


def test_the_command_end_to_end(folder: Path) -> None:
    saved = folder / "figures.json"
    args = ["--heads", str(folder / "heads"), "--drafter", "heads+prompt-lookup", "--baseline", "prompt-lookup"]
    args += ["--temperature", "0", "--temperature", "0.7", "--limit", "2", "--save", str(saved)]
    code, out, err = call(folder, *args, first="300")
    assert code == 0, err
    assert "heads+prompt-lookup" in out and "2 equal" in out and "1 equal" in out
    assert "first token after 248 tokens instead of 300: the target knows 256 positions" in err
    assert "measuring" not in err  # the bar is for terminals
    found = json.loads(saved.read_text())
    assert found["version"] == 2 and found["complete"] is True and found["protocol"]["first_token"] == "248"
    names = [PLAIN, "transformers prompt-lookup", "medusa", "heads+prompt-lookup"]
    assert [c["name"] for c in found["contestants"]] == names
    assert [c["ours"] for c in found["contestants"]] == [False, False, True, True]
    own = 4 * (320 * 320 + 320)  # four heads of one layer
    assert [c["parameters"] for c in found["contestants"]] == [None, None, own, own]
    assert list(found["figures"]) == list(found["figures_without_loops"]) == ["greedy", "temperature 0.7"]
    for decoding, table in found["figures"].items():
        assert list(table) == names and list(table["medusa"]) == [ALL, "t0", "t1"]
        assert table["medusa"][ALL]["runs"] == 2 and table["medusa"][ALL]["verdicts"] == {EQUAL: 2}
        assert found["figures_without_loops"][decoding]["medusa"][ALL]["runs"] == 2
    assert len(found["runs"]) == 4 * (2 + 2 + 3)  # contestants; prompts at two temperatures and first tokens
    assert all(run["verdicts"] == [EQUAL] for run in found["runs"])
    assert sorted(run["turn"] for run in found["runs"]) == [turn for turn in range(4) for _ in range(7)]
    assert set(found["first_token"]["medusa"]) == {"248"} and found["first_token"]["medusa"]["248"]["runs"] == 3
    assert saved.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "figures.json.journal").exists()


def conforms(value: Any, kind: Any, where: str = "file") -> None:
    """Asserts that a value read from JSON is of a type: no key too few, none too many."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kind = next((part for part in parts if part is type(value) or (part is float and type(value) is int)), None)
        assert kind is not None, f"{where} is {value!r}, expected one of {parts}"
        return
    fields = get_type_hints(kind) if is_typeddict(kind) or hasattr(kind, "_fields") else None
    if fields is not None and isinstance(value, dict):
        assert set(value) == set(fields), f"{where} has {sorted(set(value) ^ set(fields))} too many or too few"
        for key, part in fields.items():
            conforms(value[key], part, f"{where}.{key}")
    elif fields is not None:  # a tuple with names inside another one
        assert len(value) == len(fields), where
        for one, (key, part) in zip(value, fields.items(), strict=True):
            conforms(one, part, f"{where}.{key}")
    elif origin in (dict, Mapping):
        assert type(value) is dict, f"{where} is {value!r}, expected an object"
        for key, one in value.items():
            conforms(one, parts[1], f"{where}.{key}")
    elif origin in (list, tuple):
        assert type(value) is list, f"{where} is {value!r}, expected a list"
        for at, one in enumerate(value):
            conforms(one, parts[0], f"{where}[{at}]")
    else:
        assert type(value) is kind or (kind is float and type(value) is int), f"{where} is {value!r}, expected {kind}"


def test_the_file_has_its_documented_schema(folder: Path) -> None:
    """Every key of ``Saved``, ``Figures`` and ``Run`` and no other, of the types they state."""
    saved = folder / "schema.json"
    code, _, err = call(
        *(folder, "--heads", str(folder / "heads"), "--save", str(saved), "--no-plots", "--limit", "2"), first="20"
    )
    assert code == 0, err
    found = json.loads(saved.read_text())
    conforms(found, Saved)
    assert (
        any(run["depths"] for run in found["runs"]) and found["figures"]["greedy"]["medusa"][ALL]["accepted_by_depth"]
    )
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
    wanted |= {"rule", "plan", "batch_size", "seed", "max_new_tokens", "prompts", "heads", "target_digest"}
    assert wanted <= set(found["protocol"])
    for wrong, said in (("fast", "speedup is 'fast'"), (None, "speedup is None")):
        found["figures"]["greedy"]["medusa"][ALL]["speedup"] = wrong
        with pytest.raises(AssertionError, match=said):
            conforms(found, Saved)
    del found["figures"]["greedy"]["medusa"][ALL]["speedup"]
    with pytest.raises(AssertionError, match=r"\['speedup'\] too many or too few"):
        conforms(found, Saved)


def test_a_chain_is_one_guess_a_depth(folder: Path) -> None:
    """And heads are called by the folder of their run; the protocol tells chains from trees."""
    saved = folder / "chain.json"
    code, _, err = call(folder, "--heads", str(folder / "heads"), "--chain", "--save", str(saved), "--no-plots")
    assert code == 0, err
    assert json.loads(saved.read_text())["protocol"]["chain"] is True
    target = llama(eos_token_id=None)
    heads = [(f"out/{name}/heads", FAMILIES["medusa"].from_target(target)) for name in ("one", "two")]
    for chained, nodes in ((True, 5), (False, 16)):  # four heads
        made = speculators(partial(Speculator, target, nodes=16), target, heads, None, None, ["fixed"], chained)
        assert [contestant.name for contestant in made] == ["medusa one", "medusa two"]
        made[0].call(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False)
        assert made[0].fast is not None
        report = made[0].fast.report
        assert report.nodes <= nodes * report.passes and report.nodes > (nodes - 4) * report.passes


def test_the_page_has_a_row_a_source_with_what_it_costs(folder: Path) -> None:
    saved = folder / "page.json"
    code, _, err = call(folder, "--heads", str(folder / "heads"), "--save", str(saved), "--no-plots")
    assert code == 0, err
    page, found = saved.with_suffix(".md").read_text(), json.loads(saved.read_text())
    assert "- suite: mt_bench" in page and "| &emsp;t0 | 2 |" in page
    heading, row = (
        next(line for line in page.splitlines() if line.startswith(x)) for x in ("| guesses", "| medusa | 0.")
    )
    cells = dict(zip(heading.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    one = found["figures"]["greedy"]["medusa"][ALL]
    assert cells["own M"] == "0.41" and cells["draft ms"] == f"{1000 * one['draft']:.1f}"
    assert (
        cells["verify ms"] == f"{1000 * one['verify']:.1f}" and cells["plain ms"] == f"{1000 * one['plain_step']:.1f}"
    )
    assert cells["accepted by depth"] == " ".join(f"{share:.2f}" for share in one["accepted_by_depth"])
    assert cells["speed up"] == f"{one['speedup']:.2f}x" and cells["half predicted"] == f"{one['predicted']:.2f}x"
    assert cells["half measured"] == f"{one['measured']:.2f}x" and cells["outside %"] == f"{100 * one['outside']:.1f}"
    assert cells["outside ms/tok"] == f"{1000 * one['outside_token']:.2f}"
    assert cells["forwards"] == str(one["forwards"]) and cells["tokens"] == str(one["tokens"])
    assert len(cells["prefill/draft/plan/verify/accept/commit/other %"].split("/")) == 7
    theirs = found["figures"]["greedy"][PLAIN][ALL]
    assert 0 < theirs["outside"] < 1 and theirs["outside_token"] > 0 and theirs["predicted"] is None


def test_a_prediction_that_does_not_hold_is_named() -> None:
    ones = {"near": (2.0, 1.9), "far": (2.4, 2.0), "unknown": (None, None), "half known": (None, 2.0)}
    of = {n: {ALL: {"speedup": 1.5, "predicted": told, "measured": was}} for n, (told, was) in ones.items()}
    said = remarks({"figures": {"greedy": of}, "contestants": [], "runs": []})
    assert said == ["greedy: predicted off by more than 10%: far +20%"]


@dataclass(frozen=True)
class Foe(ScriptedSource):
    """Never right, by name."""

    make: Callable[[Any], Any] = lambda model: adversary(model).make(model)


def test_a_ratio_below_one_is_shown_as_such(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FC-142, as the command shows it."""
    monkeypatch.setitem(DRAFTERS, "foe", Foe)
    saved = folder / "foe.json"
    code, out, err = call(folder, "--drafter", "foe", "--save", str(saved), "--no-plots", target="random")
    assert code == 0, err
    one = json.loads(saved.read_text())["figures"]["greedy"]["foe"][ALL]
    assert one["speedup"] < 1 and one["tokens"] == one["plain_tokens"] == 36
    said = f"greedy: slower than plain generate: foe {one['speedup']:.2f}x"
    assert said in out and f"- {said}" in saved.with_suffix(".md").read_text()


def test_quick_is_short_and_yields_to_what_is_asked_for(folder: Path) -> None:
    rows = [{"id": str(i), "prompt": "🚀"} for i in range(40)]
    (folder / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["bench", "--suite", str(folder / "many.jsonl"), "--target", str(folder / "target"), "--raw", "--quick"]
    done = CliRunner().invoke(app, [*options, *LOOKUP, "--limit", "2"])
    assert done.exit_code == 0 and "prompts 2;" in done.stdout and "max_new_tokens 32;" in done.stdout
    assert "first_token 128;" in done.stdout


def test_plans_are_contestants_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    code, out, err = call(folder, *LOOKUP, "--plan", "fixed", "--plan", "adaptive", "--limit", "1")
    assert code == 0, err
    assert "prompt-lookup, fixed" in out and "prompt-lookup, adaptive" in out and "plan fixed, adaptive" in out


def test_batches_sampling_and_a_draft_model(folder: Path) -> None:
    args = ["--draft-model", str(folder / "draft"), "--batch-size", "2", "--temperature", "0.7"]
    code, out, err = call(folder, *args, target="random", suite=str(folder / "mt_bench.jsonl"))
    assert code == 0, err
    assert "temperature 0.7" in out and "refused:" in out and "draft-model" in out and "prompts 4" in out


def test_two_heads_have_two_names(folder: Path) -> None:
    heads = str(folder / "heads")
    code, out, err = call(folder, "--heads", heads, "--heads", heads, "--limit", "1")
    assert code == 0, err
    assert f"medusa {folder.name} #2" in out


def test_a_wrong_text_ends_in_an_error_after_the_file_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(self: Speculator, ids: Tensor, *, streamer: Any, **_: Any) -> Tensor:
        self.report = Report(tokens=2, passes=1)
        return says(70, 71)(ids, streamer=streamer)

    monkeypatch.setattr(Speculator, "generate", worse)
    saved = folder / "wrong.json"
    code, out, err = call(folder, *LOOKUP, "--limit", "1", "--save", str(saved), "--no-plots")
    assert code == 1 and "more than rounding" in err and "p" in err
    assert "1 bug" in out and json.loads(saved.read_text())["complete"] is True


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted after 1 of 4 jobs: give the same command again"),
        (RuntimeError("full"), 1, "full"),
    ],
)
def test_what_was_measured_before_an_interruption_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException, status: int, said: str
) -> None:
    whole = measure

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        yield next(iter(whole(*args, **kwargs)))
        raise ends

    done: list[int] = []  # jobs of each call that measured anything

    def counted(target: Any, contestants: Any, work: Any, seed: int) -> Iterator[Any]:
        done.append(len(work))
        return whole(target, contestants, work, seed)

    monkeypatch.setattr(measuring, "measure", interrupted)
    saved = folder / "part.json"
    code, out, err = call(folder, *LOOKUP, "--save", str(saved), "--no-plots")
    assert code == status and said in err and "1 equal" in out
    part, journal = json.loads(saved.read_text()), saved.with_name("part.json.journal")
    assert part["complete"] is False and len(part["runs"]) == 2 and len(journal.read_text().splitlines()) == 2
    monkeypatch.setattr(measuring, "measure", counted)
    code, _, err = call(folder, *LOOKUP, "--save", str(saved), "--no-plots", "--nodes", "4")
    assert code == 1 and "nodes 16 there, 4 here" in err and "remove it to begin anew" in err and done == []
    code, out, err = call(folder, *LOOKUP, "--save", str(saved), "--no-plots")
    assert code == 0 and "1 of 4 jobs are done already" in err and done == [3]
    found = json.loads(saved.read_text())
    assert found["complete"] is True and found["runs"][:2] == part["runs"] and len(found["runs"]) == 8
    assert "4 equal" in out and not journal.exists()


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
        ([*LOOKUP, "--rule", "magic"], "known are match"),
        ([*LOOKUP, "--nodes", "0"], "0; expected 1 or more"),
        ([*LOOKUP, "--limit", "-3"], "-3; expected 1 or more"),
        ([*LOOKUP, "--batch-size", "0"], "0; expected 1 or more"),
        ([*LOOKUP, "--temperature", "nan"], "expected 0"),
        ([*LOOKUP, "--dtype", "int8"], "bfloat16"),
        ([*LOOKUP, "--save", "no/such/folder/x.json"], "make it first"),
        ([*LOOKUP, "--save", "x.png"], "x.png is the JSON file"),
        ([*LOOKUP, "--plan", "best"], "known are fixed, adaptive"),
        ([*LOOKUP, "--first-token", "-1"], "expected numbers of tokens"),
        ([*LOOKUP, "--first-token", "5"], "or a single 0"),
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
