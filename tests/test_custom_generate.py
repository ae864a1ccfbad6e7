"""``target.generate(..., custom_generate="user/repo")`` in stock transformers: the code and the heads of one commit."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headstart.heads import FAMILIES, load_heads
from headstart.infer import custom_generate, speculator
from headstart.infer.costs import keep
from headstart.infer.plan import Costs, Curve, Draft, Plan
from headstart.train import hub as heads_hub
from tests.hub_server import OWNER, Hub
from tests.toys import llama

NAME, COMMIT = "user/my-heads", "0123456789abcdef0123456789abcdef01234567"
PROMPT = torch.tensor([[1, 40, 50, 60, 70]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}

STOCK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, TextStreamer

folder, cases = sys.argv[1], json.loads(sys.argv[2])
target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
widths = []
target.register_forward_pre_hook(lambda m, a, k: widths.append(k["input_ids"].shape[1]), with_kwargs=True)
ids = torch.tensor([[1, 40, 50, 60, 70]])
for case in cases:
    torch.manual_seed(0)
    plain = target.generate(ids, **case["options"])
    widths.clear()
    torch.manual_seed(0)
    try:
        fast = target.generate(ids, **case["options"], **case["custom"], trust_remote_code=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        continue
    print(json.dumps({"plain": plain.tolist(), "fast": fast.tolist(), "widths": widths}))
"""


def stock(folder: Path, cases: list[dict[str, Any]], home: Path, endpoint: str) -> list[Any]:
    """What a process says that knows transformers alone; its cache is ``home``."""
    assert "headstart" not in STOCK
    environment = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": OWNER, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    environment.pop("TRANSFORMERS_OFFLINE", None)
    command = [sys.executable, "-c", STOCK, str(folder), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def filled(folder: Path, depth: int) -> dict[str, bytes]:
    """The files of heads that guess ``depth`` deep, as a push to NAME uploads them."""
    FAMILIES["medusa"].from_target(llama().double(), num_draft_heads=depth).save_pretrained(folder)
    return {item.path: item.read() for item in heads_hub.staged(folder, NAME).items}


SAMPLED = {"do_sample": True, "max_new_tokens": 16, "temperature": 0.8, "top_k": 20}
FUTURE = "user/of-the-future"


class Told(NamedTuple):
    """What the stock process said of each case, and what it asked the Hub for."""

    cases: dict[str, Any]
    weights: list[str]  # requests for weights
    first: str  # the first commit of NAME, heads one deep; those of the last guess three tokens


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One process does all the cases: starting it takes longer than what it does."""
    root = tmp_path_factory.mktemp("stock")
    llama().save_pretrained(root / "toy")
    local = {"custom_generate": str(root / "a")}
    with Hub() as hub:
        one = filled(root / "a", 1)
        first = hub.add(NAME, one, "one deep")
        hub.add(NAME, filled(root / "b", 3), "three deep")
        hub.add(FUTURE, one | {"custom_generate/requirements.txt": b"headstart-llm>=99.0\n"}, "of the future")
        heads_hub.add_card(root / "a")
        cases = {
            "first of its target": {"options": GREEDY, "custom": {"custom_generate": NAME}},  # with the self-test
            "greedy": {"options": GREEDY, "custom": {"custom_generate": NAME}},
            "sampled": {"options": SAMPLED, "custom": {"custom_generate": NAME, "nodes": 5}},
            "revision": {"options": GREEDY, "custom": {"custom_generate": NAME, "revision": first}},
            "folder": {"options": GREEDY, "custom": local | {"heads": str(root / "a"), "nodes": 3}},
            "folder without heads": {"options": GREEDY, "custom": local},
            "future": {"options": GREEDY, "custom": {"custom_generate": FUTURE}},
        }
        answers = stock(root / "toy", list(cases.values()), root / "home", hub.endpoint)
        weights = [r for r in hub.requests if r.startswith("GET") and r.endswith("model.safetensors")]
    return Told(dict(zip(cases, answers, strict=True)), weights, first)


@pytest.mark.parametrize(("case", "nodes"), [("greedy", 16), ("sampled", 5), ("revision", 16), ("folder", 3)])
def test_a_process_without_an_import_of_ours_decodes_with_a_repository(told: Told, case: str, nodes: int) -> None:
    """Ids equal plain generate, drawn ones too; trees were verified, no larger than asked for."""
    found = told.cases[case]
    assert found.get("error") is None and found["fast"] == found["plain"]
    assert 1 < max(found["widths"][1:]) <= nodes


def test_code_and_weights_are_of_one_commit(told: Told) -> None:
    """Read once for each revision, and again for none of the calls that follow."""
    newest, asked = told.weights
    assert told.first in asked and told.first not in newest


def test_a_local_folder_says_that_it_needs_its_heads_too(told: Told) -> None:
    refused = told.cases["folder without heads"]["error"]
    assert refused.startswith("ValueError: custom_generate was given a local folder")
    assert 'heads="FOLDER"' in refused


def test_a_package_outside_the_range_is_named(told: Told) -> None:
    refused = told.cases["future"]["error"]
    assert refused.startswith("ImportError: ") and FUTURE in refused
    assert "headstart-llm>=99.0 (installed: " in refused


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = filled(tmp_path, 1)["custom_generate/generate.py"].decode()
    monkeypatch.setitem(sys.modules, "headstart.infer.custom_generate", None)
    with pytest.raises(ImportError, match=r"pip install 'headstart-llm>=\d+\.\d+,<\d+\.\d+'"):
        exec(compile(code, "generate.py", "exec"), {"__file__": "generate.py"})


# what the file calls, in this process ---------------------------------------------------------------------------------


def test_the_commit_is_that_of_the_files_own_path() -> None:
    file = f"/c/modules/transformers_modules/user/my_hyphen_heads/{COMMIT}/custom_generate/generate.py"
    assert custom_generate.home(NAME, file) == (NAME, COMMIT)
    local = "/c/modules/transformers_modules/heads/0123456789abcdef/custom_generate/generate.py"
    for repo, where in ((None, file), (NAME, local)):
        with pytest.raises(ValueError, match="once more"):
            custom_generate.home(repo, where)


def test_every_argument_of_generate_arrives(tmp_path: Path) -> None:
    """What transformers hands over raw: streamer, stop strings with their tokenizer, processors, nothing twice."""
    from tests.byte_tokenizer import byte_tokenizer

    class Ears:
        heard: list[int]

        def __init__(self) -> None:
            self.heard, self.ended = [], False

        def put(self, value: Any) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    target, tokenizer, ears = llama().double(), byte_tokenizer(), Ears()
    FAMILIES["medusa"].from_target(target).save_pretrained(tmp_path)
    whole = target.generate(PROMPT, **GREEDY, repetition_penalty=1.3)[0, PROMPT.shape[1] :].tolist()
    stop = tokenizer.decode(next(token for token in whole[3:] if 97 <= token - 64 <= 122))
    expected = target.generate(PROMPT, **GREEDY, stop_strings=[stop], tokenizer=tokenizer, repetition_penalty=1.3)
    assert expected.shape[1] < PROMPT.shape[1] + len(whole)
    arguments = dict.fromkeys(
        ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus",
         "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask")
    )  # fmt: skip
    found = custom_generate.run(
        target, None, "", heads=str(tmp_path), inputs=PROMPT, streamer=ears, stop_strings=[stop], tokenizer=tokenizer,
        repetition_penalty=1.3, also=["prompt-lookup"], nodes=9, token=None, revision=None, **GREEDY, **arguments,
    )  # fmt: skip
    assert found.tolist() == expected.tolist()
    assert ears.heard == found[0].tolist() and ears.ended


def test_a_plan_that_came_with_the_heads_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """plan="adaptive" takes the costs of the folder's plan.json."""
    target, given = llama().double(), []
    FAMILIES["medusa"].from_target(target).save_pretrained(tmp_path)
    costs = Costs((1, 64), (Curve(1, 128, (1.0, 2.0)),), (Draft(1, (0.0, 0.1, 0.2, 0.3, 0.4)),), 0.0)
    keep(Plan({"target": "another"}, costs), tmp_path / "plan.json")
    monkeypatch.setattr(speculator, "plan_for", lambda fast, plan: given.append(plan))
    found = custom_generate.run(target, None, "", heads=str(tmp_path), inputs=PROMPT, plan="adaptive", **GREEDY)
    assert found.tolist() == target.generate(PROMPT, **GREEDY).tolist()
    assert [plan.key for plan in given] == [{"target": "another"}]


def test_heads_are_read_once_for_a_target_and_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = llama().double(), []

    def counted(source: str, **where: Any) -> Any:
        read.append(source)
        return load_heads(source, **where)

    monkeypatch.setattr("headstart.infer.speculator.load_heads", counted)
    FAMILIES["medusa"].from_target(target).save_pretrained(tmp_path)
    for _ in range(2):
        custom_generate.run(target, None, "", heads=str(tmp_path), inputs=PROMPT, **GREEDY)
    assert len(read) == 1
    FAMILIES["medusa"].from_target(target, num_draft_heads=2).save_pretrained(tmp_path)  # trained on
    os.utime(tmp_path / "model.safetensors", (1, 1))
    custom_generate.run(target, None, "", heads=str(tmp_path), inputs=PROMPT, **GREEDY)
    assert len(read) == 2
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_heads_that_cannot_be_had_are_named_with_their_commit() -> None:
    file = f"/c/transformers_modules/user/my_hyphen_heads/{COMMIT}/custom_generate/generate.py"
    with pytest.raises(OSError, match=f"the heads of {NAME} at {COMMIT} cannot be had"):
        custom_generate.run(llama(), NAME, file, inputs=PROMPT, **GREEDY)


def test_an_argument_nobody_knows_is_refused_as_generate_does(tmp_path: Path) -> None:
    target = llama().double()
    FAMILIES["medusa"].from_target(target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="nodess"):
        custom_generate.run(target, None, "", heads=str(tmp_path), inputs=PROMPT, nodess=4, **GREEDY)
