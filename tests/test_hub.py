"""Heads as repositories: what is uploaded, and what a cut or refused push changes; the client is the real one."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headstart.heads import FAMILIES, load_heads
from headstart.infer.speculator import Speculator
from headstart.scripts import cli
from headstart.train import hub as heads_hub
from headstart.train.recipe_file import load_recipe
from tests.heads_folder import FILES, NAME, loopback
from tests.hub_server import DROP, OWNER, READER, Fault, Hub
from tests.toys import llama


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with loopback(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def found(trained: Path) -> heads_hub.Staged:
    """What is to be uploaded of heads that a test leaves as they are."""
    return heads_hub.staged(trained, NAME)


def push(folder: Path, **options: Any) -> heads_hub.Pushed:
    """As the command does."""
    return heads_hub.push(heads_hub.staged(folder, NAME, **options), NAME)


# what is uploaded -----------------------------------------------------------------------------------------------------


def test_what_is_pushed_loads_with_the_same_bytes_from_one_commit(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("something was unpickled"))  # FC-064
    done = push(folder, license="apache-2.0")
    repo = hub.repos[NAME]
    assert repo.private and done.private and done.changed
    assert [commit.title for commit in repo.commits] == ["initial commit", "medusa heads for toy"]
    assert done.url.endswith(repo.head.oid)
    assert repo.head.files.keys() == FILES | {".gitattributes"}
    for path in FILES - {"README.md", "custom_generate/generate.py"}:
        assert repo.head.files[path] == (folder / path).read_bytes(), path
    loaded, mine = load_heads(NAME), load_heads(str(folder))
    assert loaded.config.to_dict() | {"_name_or_path": ""} == mine.config.to_dict() | {"_name_or_path": ""}
    assert loaded.state_dict().keys() == mine.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], x) for name, x in mine.state_dict().items())


def test_code_and_requirements_name_the_repository_and_the_release(folder: Path, hub: Hub) -> None:
    push(folder)
    code = hub.repos[NAME].head.files["custom_generate/generate.py"].decode()
    assert f'REPO = "{NAME}"' in code and len(code.splitlines()) < 25
    needs = hub.repos[NAME].head.files["custom_generate/requirements.txt"].decode().split()
    major, minor = map(int, heads_hub.version("headstart-llm").split(".")[:2])
    assert needs == [f"headstart-llm>={major}.{minor}", f"headstart-llm<{major}.{minor + 1}"]
    assert "REPO = None" in (folder / "custom_generate" / "generate.py").read_text()


def test_a_second_push_changes_nothing_and_deletes_no_foreign_file(folder: Path, hub: Hub) -> None:
    """FC-061, its last part."""
    push(folder)
    hub.add(NAME, {"notes.md": b"of a friend"}, "a note")
    count = len(hub.repos[NAME].commits)
    done = push(folder)
    assert not done.changed and len(hub.repos[NAME].commits) == count
    (folder / "log.jsonl").write_text("")
    assert push(folder).changed
    assert hub.repos[NAME].head.files["notes.md"] == b"of a friend"


def test_no_pickle_is_uploaded(folder: Path, hub: Hub) -> None:
    """FC-064."""
    for name in ("state.pt", "training_args.bin", "plots/x.pkl"):
        (folder / name).write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match="pickles") as caught:
        heads_hub.staged(folder, NAME)
    assert all(name in str(caught.value) for name in ("state.pt", "training_args.bin", "plots/x.pkl"))
    assert hub.requests == []


def test_no_secret_and_no_place_is_uploaded(folder: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    """FC-122: secrets of a configuration are named by file and key, and their values are not repeated."""
    told = json.loads((folder / "config.json").read_text())
    told |= {"hub": {"auth_token": "SECRET1"}, "x_api_key": "SECRET2", "pad_token_id": 2, "max_new_tokens": 5}
    (folder / "config.json").write_text(json.dumps(told, indent=1))
    (folder / "notes.md").write_text("data from /home/ann/chats\n")
    (folder / "mine.txt").write_text(f"x {OWNER}")
    with pytest.raises(ValueError, match="take it out") as caught:
        heads_hub.staged(folder, NAME)
    for part in ("the value of auth_token", "the value of x_api_key", "notes.md:1: a place", "mine.txt:1: a token"):
        assert part in str(caught.value)
    assert "SECRET" not in str(caught.value) and OWNER not in str(caught.value)
    assert "pad_token" not in str(caught.value) and "max_new_tokens" not in str(caught.value)
    assert hub.requests == []


def test_a_recipe_with_secrets_is_refused_without_repeating_them(tmp_path: Path) -> None:
    """FC-122: a recipe has no place for them."""
    (tmp_path / "r.yaml").write_text(
        "target: smollm2\nout: o\ndata: {train: [r.yaml]}\nhub: {auth_token: SECRET1}\nx_api_key: SECRET2\n"
    )
    with pytest.raises(ValueError, match="hub: unknown key") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("note", ["/home/ann/run", "hf_" + "a" * 30])
def test_the_header_of_the_weights_is_looked_at(folder: Path, note: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "note": note})
    with pytest.raises(ValueError, match=r"model\.safetensors:1: a (place|token)"):
        heads_hub.staged(folder, NAME)


def test_files_that_do_not_belong_stay_here(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("{}")
    (folder / "notes.docx").write_bytes(b"PK")
    found = heads_hub.staged(folder, NAME)
    assert {item.path for item in found.items} == FILES
    assert found.left_out == ["notes.docx: not a file of a heads folder"]


@pytest.mark.parametrize("name", ["heads", "a/b/c", "user/..", "user/a b"])
def test_names_that_are_none_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no repository id"):
        heads_hub.staged(folder, name)


def test_a_folder_without_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no heads"):
        heads_hub.staged(tmp_path, NAME)


# what goes wrong on the way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["POST /api/models/.*/commit/", "PUT /lfs/", "POST /api/models/.*/preupload/"])
def test_a_cut_connection_leaves_the_repository_as_it_was_and_the_next_push_completes(
    found: heads_hub.Staged, hub: Hub, where: str
) -> None:
    """FC-061."""
    hub.add(NAME, {"README.md": b"before"}, "before")
    hub.faults.append(Fault(where, DROP, times=10**6))
    with pytest.raises(OSError, match="the connection to the Hub broke") as caught:
        heads_hub.push(found, NAME)
    assert "\n" not in str(caught.value)
    assert [commit.title for commit in hub.repos[NAME].commits] == ["before"]
    assert hub.repos[NAME].head.files == {"README.md": b"before"}
    hub.faults.clear()
    assert heads_hub.push(found, NAME).changed
    assert len(hub.repos[NAME].commits) == 2 and hub.repos[NAME].head.files.keys() >= FILES


@pytest.mark.parametrize(
    ("where", "status"),
    [
        ("POST /api/repos/create", DROP),
        ("GET /api/models/user", 500),
        ("POST /api/validate-yaml", 503),  # an answer the client takes for JSON
        ("POST /api/models/.*/preupload/", DROP),
        ("POST .*objects/batch", 502),
        ("PUT /lfs/", DROP),
        ("POST /api/models/.*/commit/", DROP),
        ("POST /api/models/.*/commit/", 503),
    ],
)
def test_what_passes_is_tried_again(found: heads_hub.Staged, hub: Hub, where: str, status: int) -> None:
    hub.faults.append(Fault(where, status, times=2))
    assert heads_hub.push(found, NAME).changed
    assert len(hub.repos[NAME].commits) == 2 and hub.faults[0].times == 0


def test_a_commit_whose_answer_was_lost_is_made_once(found: heads_hub.Staged, hub: Hub) -> None:
    hub.faults.append(Fault("/commit/", DROP, after=True))
    done = heads_hub.push(found, NAME)
    assert done.changed and done.url.endswith(hub.repos[NAME].head.oid)
    assert [commit.title for commit in hub.repos[NAME].commits] == ["initial commit", "medusa heads for toy"]


def test_a_second_file_that_fails_uploads_nothing_twice(found: heads_hub.Staged, hub: Hub) -> None:
    """FC-061: what was stored before a failure is not sent again."""
    hub.faults.append(Fault("POST /api/models/.*/commit/", 503, times=1))
    heads_hub.push(found, NAME)
    sent = [request for request in hub.requests if request.startswith("PUT /lfs/")]
    assert len(sent) == len(set(sent)) == 3  # the weights and two plots


REFUSALS = {
    401: "the Hub does not know this token (401): log in",
    403: "this token may not write to user/my-heads (403)",
    404: "the Hub has no user/my-heads, or hides it from this token (404)",
    409: "somebody else is changing user/my-heads at this moment (409)",
    412: "somebody else changed user/my-heads meanwhile (412)",
    413: "the Hub refused to change user/my-heads (413)",
    503: "the Hub refused to change user/my-heads (503)",
}


@pytest.mark.parametrize("status", REFUSALS)
def test_refusals_are_one_sentence_each(found: heads_hub.Staged, hub: Hub, status: int) -> None:
    hub.faults.append(Fault("/commit/", status, times=10**6))
    with pytest.raises(OSError, match=re.escape(REFUSALS[status])) as caught:
        heads_hub.push(found, NAME)
    assert type(caught.value) is OSError and "\n" not in str(caught.value)
    tries = sum("/commit/" in request for request in hub.requests)
    assert tries == (heads_hub.TRIES if status == 503 else 1)
    assert len(hub.repos[NAME].commits) == 1


def test_the_hubs_own_refusals_are_worded_too(
    found: heads_hub.Staged, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match=r"does not know this token \(401\)"):
        heads_hub.push(found, NAME)
    with pytest.raises(OSError, match=r"does not know this token \(401\)"):
        heads_hub.push(found, NAME, token="hf_NobodyNobodyNobodyNobodyNobodyNobody")
    with pytest.raises(OSError, match=r"may not write to user/my-heads \(403\)"):
        heads_hub.push(found, NAME, token=READER)
    assert NAME not in hub.repos


def test_a_commit_in_between_is_not_overwritten(found: heads_hub.Staged, hub: Hub) -> None:
    def meddle(request: str) -> None:
        if "/commit/" in request:
            hub.add(NAME, {"README.md": b"of somebody"}, "in between")

    hub.before = meddle
    with pytest.raises(OSError, match=r"somebody else changed user/my-heads meanwhile \(412\)"):
        heads_hub.push(found, NAME)
    assert hub.repos[NAME].head.files["README.md"] == b"of somebody"


def test_who_may_see_it_is_never_changed_unasked(found: heads_hub.Staged, hub: Hub) -> None:
    hub.add(NAME, {}, "there", private=False)
    with pytest.raises(ValueError, match="exists and is public, private was asked for"):
        heads_hub.push(found, NAME, private=True)
    assert len(hub.repos[NAME].commits) == 1
    done = heads_hub.push(found, NAME)
    assert not done.private and not hub.repos[NAME].private
    del hub.repos[NAME]
    assert not heads_hub.push(found, NAME, private=False).private


# loading --------------------------------------------------------------------------------------------------------------


def test_a_speculator_takes_repositories_revisions_and_tokens(folder: Path, hub: Hub, monkeypatch: Any) -> None:
    """What is decoded is the target's own text, with the heads of the revision that was asked for."""
    push(folder)
    first = hub.repos[NAME].head.oid
    FAMILIES["medusa"].from_target(llama(), num_draft_heads=2).save_pretrained(folder)
    push(folder)
    monkeypatch.delenv("HF_TOKEN")
    target, ids = llama().double(), torch.tensor([[1, 40, 50, 60, 70]])
    depths = {}
    for revision in (first, None):
        fast = Speculator.from_pretrained(NAME, target, revision=revision, token=OWNER)
        depths[revision] = fast.depth
        found = fast.generate(ids, max_new_tokens=12, do_sample=False)
        assert found.tolist() == target.generate(ids, max_new_tokens=12, do_sample=False).tolist()
    assert depths == {first: 3, None: 2}


def test_weights_are_of_the_commit_of_their_config(folder: Path, hub: Hub) -> None:
    """Somebody pushes other heads between the two downloads."""
    push(folder)
    other = folder.parent / "other"
    FAMILIES["medusa"].from_target(llama(), num_draft_heads=2).save_pretrained(other)

    def meddle(request: str) -> None:
        if request.endswith("/model.safetensors") and len(hub.repos[NAME].commits) == 2:
            hub.add(NAME, {f.name: f.read_bytes() for f in other.iterdir()}, "in between")

    hub.before = meddle
    assert load_heads(NAME).config.num_draft_heads == 3
    hub.before = lambda request: None
    assert load_heads(NAME).config.num_draft_heads == 2


def test_heads_push_themselves_into_a_private_repository(folder: Path, hub: Hub) -> None:
    load_heads(str(folder)).push_to_hub("user/bare")
    assert hub.repos["user/bare"].private
    assert {"config.json", "model.safetensors"} <= hub.repos["user/bare"].head.files.keys()
    assert str(folder).encode() not in hub.repos["user/bare"].head.files["config.json"]
    assert load_heads("user/bare").config.num_draft_heads == 3


# the command ----------------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["push", *arguments])


def test_a_dry_run_lists_files_and_sizes_and_touches_no_network(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    done = invoke(str(folder), NAME, "--dry-run")
    assert done.exit_code == 0, done.output
    for path in FILES:
        assert path in done.output
    assert f"{(folder / 'model.safetensors').stat().st_size:,}" in done.output and "10 files" in done.output
    assert hub.requests == [] and before == {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_the_command_pushes_and_says_where(folder: Path, hub: Hub) -> None:
    done = invoke(str(folder), NAME, "--license", "apache-2.0", "--token", OWNER)
    assert done.exit_code == 0, done.output
    assert f"{hub.endpoint}/{NAME}/commit/{hub.repos[NAME].head.oid} (private)" in done.output
    assert OWNER not in done.output
    assert "holds all of it already" in invoke(str(folder), NAME, "--license", "apache-2.0").output
    assert b"license: apache-2.0" in hub.repos[NAME].head.files["README.md"]
    refused = invoke(str(folder), NAME, "--public")
    assert isinstance(refused.exception, ValueError) and "is private, public was asked for" in str(refused.exception)
