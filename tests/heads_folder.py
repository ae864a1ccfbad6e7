"""A trained heads folder to push and to load, and the client of the Hub pointed at the one on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from accelerate.state import AcceleratorState
from huggingface_hub import constants

from headstart.train.__main__ import run
from headstart.train.recipe_file import load_recipe
from tests.byte_tokenizer import byte_tokenizer
from tests.hub_server import OWNER, Hub
from tests.toys import llama

NAME = "user/my-heads"
FILES = {
    *("config.json", "model.safetensors", "README.md", "recipe.yaml", "provenance.json", "log.jsonl"),
    *("plots/training.png", "plots/acceptance.png", "custom_generate/generate.py", "custom_generate/requirements.txt"),
}


@contextmanager
def loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub that this process's client talks to, logged in as its owner, without waiting between tries."""
    import transformers.utils.hub as transformers_hub

    huggingface_hub.close_session()
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(transformers_hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", OWNER)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield server
    huggingface_hub.close_session()


def small_run(root: Path) -> Path:
    """The heads folder of a whole small run, from the command's own entry."""
    llama().save_pretrained(root / "toy")
    byte_tokenizer().save_pretrained(root / "toy")
    (root / "answers").mkdir()
    chats = [{"id": f"r{i}", "prompt": f"say {i}", "answer": "abcdefgh" * 3} for i in range(8)]
    (root / "answers" / "answers.jsonl").write_text("\n".join(json.dumps(c) for c in chats))
    made_by = {"target": str(root / "toy"), "sampling": {"temperatures": [0.0, 0.8]}}
    (root / "answers" / "provenance.json").write_text(json.dumps(made_by))
    (root / "held.jsonl").write_text(json.dumps({"id": "h", "messages": [{"role": "user", "content": "say 99"}]}))
    (root / "recipe.yaml").write_text(
        f"target: {root / 'toy'}\nout: {root / 'out'}\nheads: {{num_draft_heads: 3, draft_vocab_size: 64}}\n"
        "data: {train: [answers], heldout: [held.jsonl], licenses: {answers: MIT}}\n"
        "optim: {epochs: 4, batch_size: 4, lr: 3e-3, precision: fp32}\n"
        "every: {log: 2, evaluate: 4}\nevaluate: {max_new_tokens: 8, nodes: 6}\n"
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    return run(load_recipe(root / "recipe.yaml"))
