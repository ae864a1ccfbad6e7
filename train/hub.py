"""Heads as a repository of the Hub: what is uploaded, what never is, and the one commit that carries it.

A heads folder and its repository hold the same files. README.md and custom_generate/ name the repository, so they are
written anew for each push; everything else goes up as it lies there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from headstart.heads import load_heads
from headstart.train.card import card, read_benchmark
from headstart.train.leaks import check_texts
from headstart.train.provenance import portable

README, CODE, REQUIREMENTS = "README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"
KEPT = {".json", ".jsonl", ".safetensors", ".yaml", ".yml", ".md", ".txt", ".png", ".svg"}
PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib"}  # running one runs what is in it
TRIES = 4  # of each request that the client does not repeat itself
PASSING = (408, 429, 500, 502, 503, 504)  # statuses that may be gone a little later
GENERATE = '''\
"""Decodes with the prediction heads of this repository: the text is the target's own, only sooner.

    target.generate(**inputs, custom_generate="{name}"{local}, trust_remote_code=True)

The heads are those of this file's own commit. All of it is in the package: pip install {needs}
"""

REPO = {repo}

try:
    from headstart.infer.custom_generate import run
except ImportError as missing:
    raise ImportError(f"decoding with these heads needs: pip install {needs} ({{missing}})") from missing


def generate(model, **arguments):
    """What ``model.generate(**arguments)`` returns; ``heads=`` names other heads, a folder or a Hub id."""
    return run(model, REPO, __file__, **arguments)
'''
T = TypeVar("T")


class Item(NamedTuple):
    """A file of the repository."""

    path: str  # there
    source: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def read(self) -> bytes:
        """The content."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()


class Staged(NamedTuple):
    """What a push would upload."""

    items: list[Item]
    left_out: list[str]  # files of the folder that stay here, with the reason
    title: str  # of the commit


class Pushed(NamedTuple):
    """What a push did."""

    url: str  # of the commit
    private: bool
    changed: bool  # False = the repository held all of it already


def add_card(folder: Path) -> None:
    """Writes the model card and custom_generate/ into a heads folder that is not on the Hub (yet)."""
    for item in _written(folder, None, None):
        (folder / item.path).parent.mkdir(exist_ok=True)
        (folder / item.path).write_bytes(item.read())


def staged(folder: Path, repo: str, *, license: str | None = None, secrets: Sequence[str] = ()) -> Staged:
    """The files that belong into ``repo``, checked; asks nobody on the network.

    ``secrets`` may stand in none of them. Raises ValueError where the heads are not whole, or for a pickle, a secret or
    a place on this machine in a file, naming all of them.
    """
    check_name(repo)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no heads: a folder with config.json and model.safetensors was expected")
    config = load_heads(str(folder)).config
    items = _written(folder, repo, license)
    left_out, pickles, taken = [], [], {item.path for item in items}
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder).as_posix()
        if file.is_dir() or path in taken or any(part.startswith((".", "__")) for part in path.split("/")):
            continue
        if file.suffix in PICKLES:
            pickles.append(path)
        elif file.suffix == ".md" and file.with_suffix(".json").is_file() and read_benchmark(file.with_suffix(".json")):
            left_out.append(f"{path}: its figures are in {file.with_suffix('.json').name}")
        elif file.suffix not in KEPT and file.name not in ("LICENSE", "NOTICE"):
            left_out.append(f"{path}: not a file of a heads folder")
        else:
            items.append(Item(path, _benchmark(file) or file))
    if pickles:
        raise ValueError(
            f"{folder} holds pickles, which are never uploaded: {', '.join(pickles)}. Heads are read from "
            "model.safetensors; move the others out of the folder"
        )
    check_texts({item.path: _text(item) for item in items}, secrets)
    title = f"{config.family} heads for {config.target_name or config.target_model_type}"
    return Staged(sorted(items), left_out, title)


def push(
    found: Staged, repo: str, *, private: bool | None = None, token: str | None = None, pause: float = 1.0
) -> Pushed:
    """Uploads ``found`` in one commit: the repository shows all of it or is as it was.

    ``private`` None makes a new repository private and leaves one that is there as it is. What passes (a dropped
    connection, 5xx) is tried again after ``pause`` seconds, then twice and four times as many. Raises OSError with one
    sentence that says what to do, ValueError where the repository is not as ``private`` asks.
    """
    api = HfApi(library_name="headstart-llm", library_version=version("headstart-llm"), token=token)

    def persist(what: Callable[[], T]) -> T:
        return _persist(what, repo, pause)

    persist(lambda: api.create_repo(repo, private=private is not False, exist_ok=True))
    before = persist(lambda: api.model_info(repo))
    if private is not None and bool(before.private) != private:
        there, asked = ("private", "public") if before.private else ("public", "private")
        raise ValueError(f"{repo} exists and is {there}, {asked} was asked for: change that in its settings on the Hub")

    def commit() -> Any:
        # operations serve once; where only the answer of a try was lost, the next one finds every file there already
        additions = [CommitOperationAdd(path, source) for path, source in found.items]
        head = api.model_info(repo).sha
        return api.create_commit(repo, additions, commit_message=found.title, parent_commit=head)

    made = persist(commit)
    return Pushed(str(made.commit_url), bool(before.private), made.oid != before.sha)


def check_name(repo: str) -> None:
    """Raises ValueError for what cannot be the id of a repository."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no repository id, such as user/my-heads: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"{repo!r} is no repository id: expected two names, such as user/my-heads")


def _text(item: Item) -> bytes:
    """What of a file is text: all, the header of safetensors, or nothing of a picture."""
    if not item.path.endswith((".safetensors", ".png")):
        return item.read()
    if item.path.endswith(".png"):
        return b""
    assert isinstance(item.source, Path)
    with item.source.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _written(folder: Path, repo: str | None, license: str | None) -> list[Item]:
    """The files that name the repository."""
    needs = requirements()
    local = "" if repo else ', heads="FOLDER"'
    span = f"'{needs[0]},{needs[1].removeprefix('headstart-llm')}'"
    code = GENERATE.format(name=repo or "FOLDER", local=local, repo=f'"{repo}"' if repo else None, needs=span)
    texts = {README: card(folder, repo, license), CODE: code, REQUIREMENTS: "\n".join(needs) + "\n"}
    return [Item(path, text.encode()) for path, text in texts.items()]


def requirements() -> list[str]:
    """The releases of the package that can run a pushed custom_generate: from this one on, up to the next minor one."""
    major, minor = map(int, version("headstart-llm").split(".")[:2])
    return [f"headstart-llm>={major}.{minor}", f"headstart-llm<{major}.{minor + 1}"]


def _benchmark(file: Path) -> bytes | None:
    """A benchmark's file without its single runs and without places on this machine; None where ``file`` is none."""
    found = read_benchmark(file) if file.suffix == ".json" else None
    if found is None:
        return None
    heads = found["protocol"].get("heads")
    if heads:
        found["protocol"]["heads"] = "; ".join(Path(one).name for one in heads.split("; "))
    return (json.dumps(portable(found), indent=1) + "\n").encode()


def _persist(what: Callable[[], T], repo: str, pause: float) -> T:
    """``what()``, tried again where the reason may pass. Raises OSError in one sentence."""
    attempt = 0
    while True:
        try:
            return what()
        except (HTTPError, RuntimeError, json.JSONDecodeError) as error:
            cause = error.__cause__ if type(error) is RuntimeError else error  # how the client words a failed upload
            if not isinstance(cause, (HTTPError, json.JSONDecodeError)):
                raise
            status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
            attempt += 1
            if attempt == TRIES or (status is not None and status not in PASSING):
                raise OSError(_explain(status, repo, cause)) from error
        time.sleep(pause * 2 ** (attempt - 1))


def _explain(status: int | None, repo: str, error: BaseException) -> str:
    """What went wrong and what to do, in a sentence."""
    owner = repo.split("/")[0]
    known = {
        401: "the Hub does not know this token (401): log in with `hf auth login`, or give another one with --token",
        403: f"this token may not write to {repo} (403): give one that may write for {owner!r}",
        404: f"the Hub has no {repo}, or hides it from this token (404): look at the name, and at who {owner!r} is",
        409: f"somebody else is changing {repo} at this moment (409), nothing was uploaded over it: push again",
        412: f"somebody else changed {repo} meanwhile (412), nothing was uploaded over it: push again",
    }
    if status in known:
        return known[status]
    if status is None:
        return f"the connection to the Hub broke {TRIES} times ({type(error).__name__}): push {repo} again"
    said = getattr(error, "server_message", None) or str(error).splitlines()[0]
    return f"the Hub refused to change {repo} ({status}): {said}"
