"""What is found in files before they are uploaded, and what is let pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.train.leaks import check_texts, complaints, secrets_here


@pytest.mark.parametrize(
    "text",
    [
        '{"hub": {"auth_token": "SECRET1"}, "x_api_key": "SECRET2"}',  # FC-122
        "wandb:\n  api_key: 0123456789abcdef",
        "password = hunter22",
        "see hf_abcdefghijklmnopqrstuvwxyz",
        "sk-abcdefghijklmnopqrstuvwxyz0123",
        "-----BEGIN RSA PRIVATE KEY-----",
        '{"train": ["/home/ann/data/chats.jsonl"]}',
        "out: ~/runs/one",
        "made from /nfs/ann/chats, /lustre/x and ~ann/y",
        "a copy of ~ann/data/chats",
        "see file:///home/ann/notes",
        '{"path": "/gpfs/project/x"}',
        "on /Volumes/disk/x",
        r'{"path": "C:\\Users\\ann\\heads"}',
        str(Path.cwd() / "heads"),
    ],
)
def test_secrets_and_places_are_found(text: str) -> None:
    found = list(complaints("config.json", text.encode()))
    assert found
    assert all(line.startswith("config.json:") for line in found)
    assert not any(secret in " ".join(found) for secret in ("SECRET1", "SECRET2", "hunter22", "hf_abc", "sk-abc"))


@pytest.mark.parametrize(
    "text",
    [
        '{"pad_token_id": 2, "max_new_tokens": 5, "pad_token": "<pad>", "eos_token": "</s>"}',  # FC-122
        "token: null\nauth_token: ***",
        '{"first_token": 0.6218827894990682, "last_token": 4.1e-05}',  # times, as in a benchmark's file
        "1.523 tokens per pass; the bonus token is counted",
        "https://huggingface.co/user/data/tree/main and user/repo",
        r"about ~3/4 of it; a switch /no_think; a pattern \\d+/\\w+; POST /v1/chat/completions",
        '{"target_fingerprint": "0123456789abcdef0123456789abcdef"}',
    ],
)
def test_harmless_names_and_addresses_pass(text: str) -> None:
    assert list(complaints("config.json", text.encode())) == []


def test_known_secrets_are_found_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_API_KEY", "quite-unlike-a-key")
    monkeypatch.setenv("HF_TOKEN", "not-shaped-like-one")
    monkeypatch.setenv("PWD", str(Path.cwd()))
    known = secrets_here()
    assert set(known) >= {"quite-unlike-a-key", "not-shaped-like-one"} and str(Path.cwd()) not in known
    for secret in known:
        with pytest.raises(ValueError, match=r"notes\.md:2: a token or key") as caught:
            check_texts({"notes.md": f"a\nb{secret}c".encode()}, known)
        assert secret not in str(caught.value)


def test_every_file_and_line_is_named() -> None:
    files = {"a.json": json.dumps({"api_key": "SECRET"}).encode(), "b.md": b"x\n/home/ann/y", "c.txt": b"\xff\xfe"}
    with pytest.raises(ValueError, match="take it out") as caught:
        check_texts(files)
    for line in ("a.json:1: the value of api_key", "b.md:2: a place on this machine, /home/ann/y", "c.txt: not text"):
        assert line in str(caught.value)
