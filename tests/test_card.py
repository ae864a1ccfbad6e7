"""What a run leaves in its heads folder, and the model card that is written from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.heads import FAMILIES, HeadsConfig, load_heads
from headstart.train.card import card
from headstart.train.hub import staged
from headstart.train.provenance import data_facts, portable, read_log, read_provenance
from headstart.train.recipe import Recipe
from tests.heads_folder import FILES, NAME
from tests.toys import llama

# what a run leaves behind ---------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_a_repository_holds(trained: Path) -> None:
    assert {f.relative_to(trained).as_posix() for f in trained.rglob("*") if f.is_file()} == FILES
    for file in trained.rglob("*"):
        if file.suffix in (".json", ".yaml", ".md", ".py", ".jsonl"):
            assert str(trained.parent.parent) not in file.read_text(), file
    config = load_heads(str(trained)).config
    assert config.target_name == "toy" and config.target_tokenizer


def test_the_written_recipe_is_the_run_with_names_for_places(trained: Path) -> None:
    told = yaml.safe_load((trained / "recipe.yaml").read_text())
    assert (told["target"], told["data"]["train"], told["data"]["heldout"]) == ("toy", ["answers"], ["held.jsonl"])
    assert told["optim"]["lr"] == 3e-3 and told["evaluate"]["nodes"] == 6
    assert not {"out", "wandb", "resume"} & told.keys()
    assert Recipe.model_validate(told | {"out": "elsewhere"}).optim.precision == "fp32"  # it can be run again


def test_provenance_says_what_was_trained_on(trained: Path) -> None:
    told = json.loads((trained / "provenance.json").read_text())
    source = told["data"]["sources"][0]
    assert (source["name"], source["license"]) == ("answers", "MIT")
    assert source["made_by"]["target"] == "toy"  # no path
    assert told["data"]["rows"] == 8 and 0 < told["data"]["supervised_tokens"] < told["data"]["tokens"]
    assert told["evaluation"] | {"device": "", "batch_size": 0} == {
        "prompts": 1, "files": ["held.jsonl"], "drafts": "tree", "nodes": 6, "depth": 3, "max_new_tokens": 8,
        "temperature": 0.0, "batch_size": 0, "dtype": "float32", "device": "",
    }  # fmt: skip


def test_a_log_of_a_run_that_went_on_holds_each_step_once(tmp_path: Path) -> None:
    lines = [{"step": 2, "loss": 3.0}, {"step": 4, "loss": 2.5}, {"step": 4, "tokens_per_pass": 1.1}]
    lines += [{"step": 4, "loss": 2.0}, {"step": 4, "tokens_per_pass": 1.2}, {"step": 6, "loss": 1.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "lo')
    found = read_log(tmp_path / "log.jsonl")
    assert [(line["step"], line.get("loss", line.get("tokens_per_pass"))) for line in found] == [
        (2, 3.0), (4, 2.0), (4, 1.2), (6, 1.0)
    ]  # fmt: skip


def test_a_log_of_a_run_that_went_back_knows_nothing_of_later_steps(tmp_path: Path) -> None:
    """As one that was begun anew in the folder of a longer one, or stopped short of where it had been."""
    lines = [{"step": 50, "loss": 9.0}, {"step": 300, "loss": 9.0}, {"step": 300, "tokens_per_pass": 9.0}]
    lines += [{"step": 100, "loss": 2.0}, {"step": 100, "tokens_per_pass": 1.2}, {"step": 150, "loss": 1.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_log(tmp_path / "log.jsonl") == [lines[0], *lines[3:]]


@pytest.mark.parametrize("content", ['{"target": "to', "[1]"])
def test_a_damaged_provenance_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=r"provenance\.json .*delete it"):
        read_provenance(tmp_path / "provenance.json")


def test_answers_named_by_their_file_bring_their_provenance_too(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"target": "toy"}))
    for name in ("answers.jsonl", "others.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "x", "answer": "y"}) + "\n")
    data = {"train": [str(tmp_path / "answers.jsonl"), str(tmp_path / "others.jsonl")]}
    recipe = Recipe.model_validate({"target": "toy", "out": "out", "data": data})
    found = {source["name"]: source.get("made_by") for source in data_facts(recipe, [])["sources"]}
    assert found == {"answers.jsonl": {"target": "toy"}, "others.jsonl": None}


def test_places_become_names_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "answers").mkdir(parents=True)
    kept = {"d": "MIT / Apache-2.0", "e": 3, "f": None}
    told = {"a": "/home/ann/x.jsonl", "b": ["out/answers", "org/model"], "c": r"C:\data\y"}
    assert portable({"licenses": {"/nfs/ann/x.jsonl": "MIT"}}) == {"licenses": {"x.jsonl": "MIT"}}
    assert portable(["file:///nfs/ann/x", "~ann/data/y"]) == ["x", "y"]
    assert portable(told | kept) == {"a": "x.jsonl", "b": ["answers", "org/model"], "c": "y"} | kept


def test_licences_are_found_by_name_and_by_place(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("{}\n")
    for key in ("chats.jsonl", str(file)):
        data = {"train": [str(file)], "licenses": {key: "MIT"}}
        recipe = Recipe.model_validate({"target": "toy", "out": "out", "data": data})
        assert data_facts(recipe, [])["sources"][0]["license"] == "MIT"


# the card -------------------------------------------------------------------------------------------------------------


def test_every_figure_of_the_card_is_the_logs(trained: Path) -> None:
    """The numbers of the section are compared as a set: what the run did not say is not there."""
    text = card(trained, NAME, "apache-2.0")
    line = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()][-1]
    assert "tokens_per_pass" in line and line["step"] == 8
    section = text.split("## Measured")[1].split("\n## ")[0]
    shares = [value for name, value in line.items() if name.startswith("accepted/")]
    row = next(row for row in section.splitlines() if row.startswith("| accepted"))
    assert row == "| accepted | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
    assert f"**{line['tokens_per_pass']:.3f} tokens per pass**" in section
    assert f"{line['looping']:.0%} of the answers end in a loop" in section
    for part in ("tree of 6 nodes, root included, depth 3, greedy", "float32", "bonus token is counted", "1 held-out"):
        assert part in " ".join(section.split()), part
    assert "## Benchmark" not in text and "speed-up" not in text.lower()  # nothing of the kind was measured


def test_a_card_that_tells_other_numbers_would_be_noticed(folder: Path) -> None:
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    log[-1] |= {"tokens_per_pass": 2.345, "accepted/1": 0.678}
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    text = card(folder)
    assert "**2.345 tokens per pass**" in text and "| accepted | 0.678 |" in text


def test_the_card_links_its_base_model_and_reads_as_metadata(folder: Path) -> None:
    config = HeadsConfig.from_pretrained(folder)
    parts = {}
    for name in ("smollm2", "org/model", "toy"):
        config.target_name = name
        config.save_pretrained(folder)
        text = card(folder, NAME, "apache-2.0")
        parts[name] = yaml.safe_load(text.split("---\n")[1])
        assert text.count("user/my-heads") >= 3 and "PATH/TO" not in text
    assert parts["smollm2"]["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert parts["org/model"]["base_model"] == "org/model" and "base_model" not in parts["toy"]
    assert parts["toy"]["license"] == "apache-2.0" and parts["toy"]["library_name"] == "transformers"
    assert {"headstart", "custom_generate", "speculative-decoding", "medusa"} <= set(parts["toy"]["tags"])
    assert "license" not in yaml.safe_load(card(folder).split("---\n")[1])
    assert 'heads="PATH/TO/THIS/FOLDER"' in card(folder)


def test_heads_without_a_run_have_a_card_without_figures(tmp_path: Path) -> None:
    FAMILIES["hydra"].from_target(llama()).save_pretrained(tmp_path)
    text = card(tmp_path)
    assert "# Hydra heads for a llama model" in text and "no serving engine" in text
    assert not re.search(r"tokens per pass|## (Measured|Training|Benchmark)", text)


def test_heads_that_go_with_an_adapter_say_so(tmp_path: Path) -> None:
    heads = FAMILIES["medusa"].from_target(llama())
    heads.config.adapter = "0123456789abcdef"
    heads.save_pretrained(tmp_path)
    text = card(tmp_path)
    assert "frozen" not in text and "together with an adapter on a llama model" in text
    assert "what the adapted target alone would have written" in text and "`0123456789abcdef`" in text


def benchmark(folder: Path, **changes: Any) -> dict[str, Any]:
    """A file as `headstart bench --save` writes it, measured by these heads."""
    from headstart.heads.adapter import digest
    from headstart.infer.figures import VERSION

    one = {"runs": 6, "speedup": 1.571, "low": 1.402, "high": 1.793, "tokens_per_pass": 1.864, "looping": 0.25}
    scopes = {"all tasks": one, "math": one | {"speedup": 1.913}, "chat": one | {"tokens_per_pass": 1.247}}
    protocol = {
        "suite": str(folder / "suite.jsonl"), "heads": f"{folder} {digest(load_heads(str(folder)).state_dict())}",
        "nodes": 8, "depth": None, "rule": "match", "decoding": "greedy", "dtype": "bfloat16", "attention": "sdpa",
        "prompts": 12, "batch_size": 1, "max_new_tokens": 40, "device": "a device", "threads": 2, "torch": "2.13",
        "transformers": "5.24",
    }  # fmt: skip
    return {
        "version": VERSION, "complete": True, "protocol": protocol, "contestants": [{"name": "medusa"}],
        "figures": {"greedy": {"medusa": scopes}}, "runs": [{"remarks": ["a text of somebody"]}],
    } | changes  # fmt: skip


def test_benchmarks_of_these_heads_are_on_the_card_with_their_protocol(folder: Path) -> None:
    (folder / "bench.json").write_text(json.dumps(benchmark(folder)))
    (folder / "bench.md").write_text(f"a page about {folder}")
    text = card(folder)
    rows = [line for line in text.split("## Benchmark: suite.jsonl")[1].splitlines() if line.startswith("| medusa")]
    assert rows[0] == "| medusa | all tasks | 1.86 | 1.57x | 1.40-1.79 | 6 | 25% |"
    assert rows[1].startswith("| medusa | math | 1.86 | 1.91x") and rows[2].startswith("| medusa | chat | 1.25 |")
    for part in (
        "trees of up to 8 nodes",
        "on a device",
        "bfloat16",
        "12 prompts in batches of 1",
        "bonus token is counted",
    ):
        assert part in text
    found = staged(folder, NAME)
    (bench,) = [item for item in found.items if item.path == "bench.json"]
    assert b"somebody" not in bench.read() and str(folder).encode() not in bench.read()
    assert "bench.md: its figures are in bench.json" in found.left_out


def test_benchmarks_of_other_heads_are_not_on_the_card(folder: Path) -> None:
    other = benchmark(folder)
    other["protocol"]["heads"] = "heads 0123456789abcdef"
    (folder / "bench.json").write_text(json.dumps(other))
    assert "## Benchmark" not in card(folder)
    (folder / "bench.json").write_text(json.dumps(benchmark(folder, version=99)))
    with pytest.raises(ValueError, match=r"version 99 .*measure again"):
        card(folder)
