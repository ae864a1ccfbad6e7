"""Suites of prompts: where a named one lies, and what is read from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from headstart.infer.bench import Prompt

SUITES = {  # a suite's name, and what its file may be called in the data folder
    "spec_bench": ("spec_bench.jsonl",),
    "mt_bench": ("mt_bench.jsonl",),
    "humaneval": ("humaneval.jsonl",),
    "gsm8k": ("gsm8k.jsonl", "gsm8k_test_200.jsonl"),
}
Rows = list[tuple[str, str, list[dict[str, str]]]]  # name, task, messages up to the first user turn


def find_suite(suite: str, data: Path | None) -> Path:
    """The file of a suite: ``suite`` itself where it is one, else looked up by name in the folder ``data``."""
    if Path(suite).exists() or suite.endswith((".jsonl", ".json")):
        return Path(suite)
    if suite not in SUITES:
        raise ValueError(f"no suite {suite!r}: expected a JSON Lines file, or one of {', '.join(SUITES)}")
    files = " or ".join(SUITES[suite])
    if data is None:
        raise ValueError(f"the suite {suite} is a file {files}: say in which folder, with --data or HEADSTART_DATA")
    found = [data / name for name in SUITES[suite] if (data / name).is_file()]
    if not found:
        raise ValueError(f"no {files} in {data}: put the suite {suite} there, or name another folder with --data")
    return found[0]


def read_suite(path: Path) -> Rows:
    """The prompts of a suite with their tasks: by group, the part before a "/", where there are several groups."""
    from headstart.train.conversations import IDS, load_conversations
    from headstart.train.sources import read_rows

    loaded, report = load_conversations([path], trainable=False)
    if report.skipped:
        typer.echo(f"{path}: {report}", err=True)
    if not loaded:
        raise ValueError(f"{path} holds no prompts ({report}); expected rows such as {{'messages': [...]}}")
    tasks: dict[str, str] = {}
    for row in read_rows(path):
        name = next((str(row[key]) for key in IDS if row.get(key) is not None), None)
        tasks[str(name)] = str(row.get("task") or row.get("category") or path.stem)
    named = [(row.id, tasks.get(row.id, path.stem), row.messages) for row in loaded]
    groups = {task.split("/")[0] for _, task, _ in named}
    rows: Rows = []
    for name, task, messages in named:
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        rows.append((name, task.split("/")[0] if len(groups) > 1 else task, messages[: first + 1]))
    return rows


def tokenised(rows: Rows, model: Any, tokenizer: Any, raw: bool, new: int) -> "list[Prompt]":
    """The prompts as ids [P]; those without tokens or without room for ``new`` more are left out and counted."""
    import torch

    from headstart.infer.bench import Prompt
    from headstart.train.masking import prompt_ids

    room = (getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 60) - new
    prompts = []
    for name, task, messages in rows:
        text = raw or not tokenizer.chat_template
        ids = tokenizer(messages[-1]["content"])["input_ids"] if text else prompt_ids(messages, tokenizer)
        if 0 < len(ids) <= room:
            prompts.append(Prompt(name, task, torch.tensor(ids)))
    if len(prompts) < len(rows):
        left_out = f"{len(rows) - len(prompts)} of {len(rows)} prompts left out: empty, or longer than {room} tokens"
        if not prompts:
            raise ValueError(f"{left_out}, which leaves room for {new} new ones: lower --max-new-tokens")
        typer.echo(left_out, err=True)
    return prompts
