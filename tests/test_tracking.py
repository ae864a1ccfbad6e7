"""What a run tells: lines, log.jsonl and drafts.jsonl, Weights & Biases read back from its record log, TensorBoard; and
what none of them is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from headstart.train.__main__ import main
from headstart.train.boards import Written, check_boards, coloured, marked
from headstart.train.evaluate import Draft
from headstart.train.meter import Progress
from headstart.train.recipe import Recipe
from headstart.train.recipe_file import load_recipe
from headstart.train.redact import names_secret, redacted
from headstart.train.tracking import Tracker, describe, in_words, peak_memory
from tests.byte_tokenizer import byte_tokenizer
from tests.toys import llama

CONFIG = {"hub": {"auth_token": "SECRET1"}, "x_api_key": "SECRET2", "pad_token_id": 2, "max_new_tokens": 5}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state for the life of a process; W&B writes beside its runs into the user's folders."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "t.yaml").write_text(f"target: toy\nout: {tmp_path / 'out'}\ndata: {{train: [rows.jsonl]}}\n")
    return load_recipe(tmp_path / "t.yaml", overrides)


def tracker(tmp_path: Path, *overrides: str) -> Tracker:
    loaded = recipe(tmp_path, *overrides)
    (tmp_path / "out").mkdir(exist_ok=True)
    return Tracker(loaded, tmp_path / "out", byte_tokenizer(), main=True)


def trained(step: int) -> Progress:
    """Numbers of a training step."""
    return Progress(step, {"tokens": 100.0, "bad_rows": 0.0, "loss": 1.0 / step, "lr": 1e-3})


def records(folder: Path) -> list[Any]:
    """The records of a finished run's .wandb file, which W&B's own process may still be writing."""
    (path,) = folder.glob("*.wandb")
    end = monotonic() + 30
    while True:
        found = parsed(path.read_bytes())
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        assert monotonic() < end, f"{path} has no end after {len(found)} records"
        sleep(0.05)


def parsed(data: bytes) -> list[Any]:
    """LevelDB's log format after a header of 7 bytes: blocks of 32768 bytes, parts with checksum, size and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, parts, found = 7, b"", list[Any]()
    assert data[:4] in (b":W&B", b"")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block is too short for another part
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4) and at <= len(data):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, entry by entry; of a value that is no number, its parts by their names with a dot."""
    entries = [r.history for r in records(folder) if r.WhichOneof("record_type") == "history"]
    return [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in entry.item} for entry in entries]


def settled(folder: Path) -> dict[str, Any]:
    """The config at the end."""
    found: dict[str, Any] = {}
    for record in records(folder):
        for config in (record.run.config, record.config):
            found |= {item.key: json.loads(item.value_json) for item in config.update if item.key}
    return found


def toy(tmp_path: Path) -> Path:
    """A recipe with everything switched on, its data in a folder that tells what made it."""
    llama().save_pretrained(tmp_path / "toy")
    byte_tokenizer().save_pretrained(tmp_path / "toy")
    (tmp_path / "rows").mkdir()
    chats = [{"id": f"r{i}", "prompt": f"say {i}", "answer": "abcdefgh" * 3} for i in range(8)]
    (tmp_path / "rows" / "answers.jsonl").write_text("\n".join(json.dumps(c) for c in chats))
    (tmp_path / "rows" / "provenance.json").write_text(json.dumps(CONFIG | {"model": "toy"}))
    asks = [{"id": f"h{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(90, 93)]
    (tmp_path / "held.jsonl").write_text("\n".join(json.dumps(c) for c in asks))
    (tmp_path / "r.yaml").write_text(
        f"target: {tmp_path / 'toy'}\nout: {tmp_path / 'out'}\n"
        "data: {train: [rows], heldout: [held.jsonl], validate_rows: 2}\n"
        "optim: {epochs: 3, batch_size: 4, lr: 3e-3, precision: fp32}\n"
        "every: {log: 2, evaluate: 4}\nevaluate: {max_new_tokens: 12, nodes: 8}\n"
        "wandb: {project: toys, mode: offline}\n"
    )
    return tmp_path / "r.yaml"


def test_an_offline_run_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And FC-122: of the data's provenance all but the secrets, in every file that the run wrote."""
    assert main([str(toy(tmp_path))]) == 0
    (folder,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    entries = history(folder)
    steps = [entry for entry in entries if "lr" in entry]
    assert [entry["step"] for entry in steps] == [2, 4, 6]
    assert set(steps[0]) >= {
        *("loss", "loss/1", "loss/4", "accuracy/1", "accuracy/4", "alpha/1", "alpha/4"),
        *("gradient_norm", "lr", "tokens_per_second", "memory_gb"),
    }
    assert all(entry["tokens_per_second"] > 0 and 0 < entry["memory_gb"] < 1000 for entry in steps)
    evaluations = [entry for entry in entries if "tokens_per_pass" in entry]
    assert [entry["step"] for entry in evaluations] == [0, 4, 6]
    assert all(1 <= entry["tokens_per_pass"] <= 5 and "accepted/1" in entry for entry in evaluations)
    assert set(evaluations[0]) >= {"validation/chain", "validation/alpha/1", "evaluation_seconds", "looping"}

    artifacts = [r.artifact for r in records(folder) if r.WhichOneof("record_type") == "artifact"]
    tables = [{e.path: Path(e.local_path) for e in a.manifest.contents} for a in artifacts if a.type == "run_table"]
    shown = json.loads(tables[-1]["drafts.table.json"].read_text())
    assert len(tables) == 3 and shown["columns"] == ["step", "prompt", "answer", "accepted"] and len(shown["data"]) == 3
    pages = [tables[-1][row[2]["path"]].read_text() for row in shown["data"]]
    assert any(row[3] > 0 for row in shown["data"])
    assert all(("color:green" in page) == (row[3] > 0) for page, row in zip(pages, shown["data"], strict=True))

    config = settled(folder)
    assert config["optim"]["lr"] == 3e-3 and config["heads"]["family"] == "medusa"
    assert config["data"]["max_length"] == 512
    (source,) = config["provenance"]["data"]["sources"]
    assert source["name"] == "rows" and source["made_by"]["model"] == "toy"
    assert "torch" in config["provenance"]["made_by"]
    (model,) = [a for a in artifacts if a.type == "model"]
    assert model.name == "medusa-toy"
    assert {"heads/config.json", "heads/model.safetensors"} <= {entry.path for entry in model.manifest.contents}

    said = capsys.readouterr().err
    assert "tokens per pass" in said and "held-out answers: accuracy" in said and "\x1b" not in said
    written = [json.loads(line) for line in (tmp_path / "out" / "drafts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [0] * 3 + [4] * 3 + [6] * 3
    own = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(secret in data for data in own for secret in (b"SECRET1", b"SECRET2"))
    assert source["made_by"]["pad_token_id"] == 2 and source["made_by"]["max_new_tokens"] == 5
    assert any(b"auth_token" in data and b"max_new_tokens" in data for data in own)


def test_a_run_that_goes_on_is_the_same_run_and_loses_no_entry(tmp_path: Path) -> None:
    """FC-124: steps 1 to 7, an exception, on from 5 to 10: all of both parts is recorded, the newest entry too."""
    options = ("wandb={project: p, mode: offline}",)

    def seven_steps() -> None:
        with tracker(tmp_path, *options) as first:
            for step in range(1, 8):
                first.tell(trained(step))
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        seven_steps()
    checkpoint = tmp_path / "out" / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    (one,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    with tracker(tmp_path, *options) as second:
        for step in range(5, 11):
            second.tell(trained(step))
    (two,) = set((tmp_path / "out" / "wandb").glob("offline-run-*")) - {one}
    assert [entry["step"] for entry in history(one)] == list(range(1, 8))
    assert [entry["step"] for entry in history(two)] == list(range(5, 11))
    ids = [{r.run.run_id for r in records(part) if r.run.run_id} for part in (one, two)]
    assert ids[0] == ids[1] == {(tmp_path / "out" / "wandb-run").read_text().strip()}
    axes = [r.metric for r in records(two) if r.WhichOneof("record_type") == "metric"]
    assert {axis.step_metric for axis in axes if axis.glob_name == "*"} == {"step"}
    exits = [[r.exit.exit_code for r in records(part) if r.WhichOneof("record_type") == "exit"] for part in (one, two)]
    assert exits == [[1], [0]]


def test_a_run_that_begins_anew_is_another_run(tmp_path: Path) -> None:
    """The folder has an id, but no checkpoint to go on from."""
    found = []
    for _ in range(2):
        with tracker(tmp_path, "wandb={project: p, mode: offline}") as started:
            started.tell(trained(1))
        found.append((tmp_path / "out" / "wandb-run").read_text())
    assert found[0] != found[1]


def test_tensorboard_shows_the_same(tmp_path: Path) -> None:
    """Steps that are told again after a checkpoint replace the old ones."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drafts = [Draft([64 + b for b in b"hi"], [64 + b for b in b"<you>"], [True, True, True, False, False])]
    for steps in (range(1, 8), range(5, 11)):
        with tracker(tmp_path, "tensorboard=true") as told:
            told.facts(data={"rows": 3, "api_key": "SECRET1"})
            for step in steps:
                told.tell(trained(step))
            told.wrote(drafts)
            told.tell(Progress(steps[-1], {"tokens_per_pass": 2.5, "accepted/1": 0.5, "looping": 0.0}))
            told.heads(tmp_path / "out")
    seen = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert [event.step for event in seen.Scalars("loss")] == list(range(1, 11))
    assert seen.Scalars("tokens_per_pass")[-1].value == 2.5
    tags = {tag: seen.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in seen.Tags()["tensors"]}
    assert "<b>\\<yo</b>u\\>" in tags["drafts/text_summary"] and '"rows": 3' in tags["data/text_summary"]
    assert '"target": "toy"' in tags["recipe/text_summary"] and "SECRET1" not in tags["data/text_summary"]


def test_what_is_not_installed_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.train.boards.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"asks for wandb and tensorboard, .*pip install wandb tensorboard.*wandb=null"
    ):
        check_boards(recipe(tmp_path, "tensorboard=true", "wandb={project: p}"))
    check_boards(recipe(tmp_path))
    with pytest.raises(ValueError, match="not installed"):  # no target `toy` was looked for
        main([str(tmp_path / "t.yaml"), "tensorboard=true"])


def test_lines_where_nobody_looks_and_a_bar_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracker(tmp_path) as plain:
        plain.begin(4)
        plain.tell(trained(2))
    quiet = capsys.readouterr().err
    assert quiet.count("\n") == 1 and "loss 0.500" in quiet and "\x1b" not in quiet
    monkeypatch.setenv("FORCE_COLOR", "1")
    with tracker(tmp_path) as shown:
        shown.begin(4)
        shown.tell(trained(2))
        shown.tell(Progress(2, {"tokens_per_pass": 1.75, "looping": 0.0}))
    bar = capsys.readouterr().err
    assert "2/4" in bar and "loss 0.500  lr 1.0e-03  1.75 tokens per pass" in bar


def test_other_processes_say_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = recipe(tmp_path, "wandb={project: p, mode: offline}", "tensorboard=true")
    (tmp_path / "out").mkdir()
    with Tracker(loaded, tmp_path / "out", byte_tokenizer(), main=False) as silent:
        silent.begin(4)
        silent.facts(a=1)
        silent.wrote([Draft([70], [71], [False])])
        silent.tell(trained(1))
        silent.say("nothing")
    assert not list((tmp_path / "out").iterdir()) and capsys.readouterr().err == ""


def test_time_for_evaluations_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(at=0.0)
    monkeypatch.setattr("headstart.train.tracking.monotonic", lambda: now.at)
    with tracker(tmp_path) as told:
        told.begin(10)
        for now.at, seconds in ((50.0, 2.0), (100.0, 3.0)):
            told.tell(Progress(int(now.at), {"tokens_per_pass": 1.5, "looping": 0.0, "evaluation_seconds": seconds}))
        now.at = 110.0
        told.tell(Progress(110, {"tokens": 200.0, "loss": 1.0, "lr": 0.1}))
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line.get("evaluation_share") for line in lines] == [0.04, 0.05, None]
    assert lines[2]["tokens_per_second"] == 20.0 and [line["seconds"] for line in lines] == [50.0, 100.0, 110.0]


def test_describe() -> None:
    numbers = {"loss": 2.5, "accuracy/1": 0.5, "accuracy/2": 0.25, "alpha/1": 0.4, "target_kl": 0.0125, "lr": 1e-3}
    assert describe(7, numbers | {"tokens_per_second": 812.4, "skipped_steps": 2.0}) == (
        "step     7  loss 2.500  accuracy 0.500 0.250  alpha 0.400  target KL 0.0125  lr 1.00e-03  812 tokens/s  "
        "2 steps skipped"
    )
    held = {"validation/chain": 1.5, "validation/accuracy/1": 0.3, "validation/alpha/1": 0.2}
    assert describe(9, held) == "step     9  held-out answers: accuracy 0.300  alpha 0.200  chain 1.500"
    decoded = {"tokens_per_pass": 1.8, "accepted/1": 0.6, "accepted/2": 0.2, "looping": 0.125, "target_perplexity": 9.0}
    assert describe(9, decoded | {"evaluation_seconds": 4.0, "evaluation_share": 0.031}) == (
        "step     9  tokens per pass 1.800  accepted by depth 0.60 0.20  looping 12%  target perplexity 9.000  "
        "(4.0 s, evaluations 3% of the time)"
    )


def test_drafts_in_words_keep_characters_whole() -> None:
    """FC-028 for the table: a rocket of four tokens, three of them guessed."""
    data = "a🚀b".encode()
    draft = Draft([64 + ord("?")], [64 + b for b in data], [False, True, True, True, False, True])
    told = in_words(draft, byte_tokenizer())
    assert told == Written("?", [("a", False), ("🚀", True), ("b", True)], pytest.approx(4 / 6))
    assert coloured(told).endswith('>a<span style="color:green">🚀b</span></div>')
    odd = Written("", [("<i>*\n", True)], 1.0)
    assert "&lt;i&gt;*\n" in coloured(odd) and marked(odd) == "<b>\\<i\\>\\*↵</b>"
    assert in_words(Draft([70], [64 + 0xF0], [True]), byte_tokenizer()).pieces == [("\ufffd", True)]


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        *((name, "x", True) for name in ("token", "HF_TOKEN", "auth_token", "accessToken", "x-api-key", "apiKey")),
        *((name, "x", True) for name in ("db_password", "client_secret", "Authorization", "WANDB_API_KEY", "apikey")),
        *((name, "x", False) for name in ("pad_token", "eos_token", "image_token", "sort_key", "keys", "tokenizer")),
        *((name, 5, False) for name in ("max_new_tokens", "pad_token_id", "token", "bytes_per_token")),
    ],
)
def test_names_of_secrets(name: str, value: Any, secret: bool) -> None:
    """FC-122: neither too few nor too many."""
    assert names_secret(name, value) is secret


def test_secrets_are_starred_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh12345")
    monkeypatch.setenv("OTHER_TOKEN", "short")
    given = [CONFIG, ("https://me:pw@host/x?a@b", "key abcdefgh12345 there", "short", None, 3)]
    assert redacted(given) == [
        {"hub": {"auth_token": "***"}, "x_api_key": "***", "pad_token_id": 2, "max_new_tokens": 5},
        ["https://***@host/x?a@b", "key *** there", "short", None, 3],
    ]
    assert redacted({"password": None, "secrets": {"a": 1}}) == {"password": None, "secrets": "***"}


def test_memory_is_the_peak_of_this_process() -> None:
    status = Path("/proc/self/status")
    if not status.exists():  # elsewhere nothing else tells the peak to compare with
        pytest.skip("the peak is compared with what Linux says in /proc")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory()["memory_gb"] >= 0.95 * int(line.split()[1]) * 1024 / 1e9 > 0
