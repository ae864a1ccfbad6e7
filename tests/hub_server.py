"""A Hub on loopback for the real ``huggingface_hub`` client: repositories, commits, LFS, resolve, and faults on demand.

What it answers follows the client's own code (huggingface_hub 1 and 2): create, validate-yaml, preupload, LFS batch and
upload, commit as ndjson, model info, tree, commits, resolve with ETag and X-Repo-Commit. Nothing of it is kept on disk.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

OWNER, READER = "hf_OwnerOwnerOwnerOwnerOwnerOwnerOwner", "hf_ReaderReaderReaderReaderReaderReader"
LFS = (".safetensors", ".png", ".bin", ".pt")
DROP = 0  # the "status" of a fault that cuts the connection instead of answering


@dataclass
class Commit:
    oid: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repo:
    private: bool
    commits: list[Commit]

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision in ("main", "HEAD"):
            return self.head
        return next((c for c in self.commits if c.oid == revision), None)


@dataclass
class Fault:
    """What goes wrong with requests whose "METHOD path" matches; ``times`` of them."""

    request: str
    status: int
    times: int = 1
    after: bool = False  # the request is carried out, and only its answer is lost


@dataclass
class Hub:
    """The state behind the server. ``users`` are tokens and the namespace each may write to, "" = none."""

    users: dict[str, str] = field(default_factory=lambda: {OWNER: "user", READER: ""})
    repos: dict[str, Repo] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda request: None
    lock: threading.Lock = field(default_factory=threading.Lock)
    endpoint: str = ""

    def __enter__(self) -> Hub:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, files: dict[str, bytes], title: str, private: bool = True) -> str:
        """A commit that changes ``files``; the repository is made where it is missing. Returns the commit's id."""
        repo = self.repos.setdefault(name, Repo(private, []))
        before = repo.head.files if repo.commits else {}
        told = json.dumps([title, len(repo.commits), name]) + "".join(map(git_hash, files.values()))
        repo.commits.append(Commit(hashlib.sha1(told.encode()).hexdigest(), title, before | files))
        return repo.head.oid

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.request, request):
                    fault.times -= 1
                    return fault
        return None


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(request)
        self.hub.before(request)
        fault = self.hub.fault(request)
        if fault is not None and not fault.after:
            return self.fail(fault)
        try:
            with self.hub.lock:
                status, headers, data = self.route(path, body)
        except Refused as refused:
            told = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            status, headers, data = refused.status, told, json.dumps({"error": refused.message}).encode()
        return self.answer(status, headers, data) if fault is None else self.fail(fault)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def fail(self, fault: Fault) -> None:
        if fault.status == DROP:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.answer(fault.status, {}, b"<html>not now</html>")

    def answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # who asks, and for what -----------------------------------------------------------------------------------------

    def user(self) -> str | None:
        """The namespace of the token, None without one. Refuses tokens nobody has."""
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if not given:
            return None
        if given not in self.hub.users:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.hub.users[given]

    def repo(self, name: str, write: bool = False) -> Repo:
        """The repository, if it is there and the token may read or write it."""
        user, repo = self.user(), self.hub.repos.get(name)
        if repo is None or (repo.private and user is None):
            raise Refused(404 if user is not None else 401, "Repository not found", "RepoNotFound")
        if write and user != name.split("/")[0]:
            raise Refused(403, "You don't have the rights to write to this repository")
        return repo

    def route(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        for method, pattern, answer in ROUTES:
            if self.command in method.split() and (found := re.fullmatch(pattern, path)):
                given = answer(self, body, *found.groups())
                return given if isinstance(given, tuple) else (200, {}, json.dumps(given).encode())
        raise Refused(404, f"no such page: {path}")

    def create(self, body: bytes) -> Any:
        asked, user = json.loads(body), self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        owner = asked.get("organization") or user
        name = f"{owner}/{asked['name']}"
        if owner != user:
            raise Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        told = {"url": f"{self.hub.endpoint}/{name}"}
        if name in self.hub.repos:
            return 409, {}, json.dumps(told | {"error": "You already created this model repo"}).encode()
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit", private)
        return told

    def check_card(self, body: bytes) -> Any:
        text = json.loads(body)["content"]
        parts = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        if parts is None or not isinstance(yaml.safe_load(parts[1]), dict):
            return 400, {}, json.dumps({"errors": [{"message": "no metadata"}], "warnings": []}).encode()
        return {"errors": [], "warnings": []}

    def preupload(self, body: bytes, name: str, revision: str) -> Any:
        held = self.repo(name, write=True).head.files
        files = []
        for one in json.loads(body)["files"]:
            path, mode = one["path"], "lfs" if one["path"].endswith(LFS) else "regular"
            oid = None
            if path in held:
                oid = hashlib.sha256(held[path]).hexdigest() if mode == "lfs" else git_hash(held[path])
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    def lfs_batch(self, body: bytes, name: str) -> Any:
        self.repo(name, write=True)
        objects = []
        for one in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}", "header": {}}}
            objects.append(one if one["oid"] in self.hub.lfs else one | {"actions": upload})
        return {"transfer": "basic", "objects": objects}

    def lfs_upload(self, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content is not what was announced")
        self.hub.lfs[oid] = body
        return {}

    def commit(self, body: bytes, name: str, revision: str) -> Any:
        repo = self.repo(name, write=True)
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit", repo.head.oid) != repo.head.oid:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.lfs:
                    raise Refused(400, "LFS pointer pointed to a file that does not exist")
                files[value["path"]] = self.hub.lfs[value["oid"]]
        oid = self.hub.add(name, files, header["summary"])
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}"}

    def info(self, _: bytes, name: str, revision: str = "main") -> Any:
        repo = self.repo(name)
        commit = self.found(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return {"_id": name, "id": name, "private": repo.private, "sha": commit.oid, "siblings": siblings, "tags": []}

    def tree(self, _: bytes, name: str, revision: str) -> Any:
        files = self.found(self.repo(name), revision).files
        return [{"type": "file", "path": p, "size": len(d), "oid": git_hash(d)} for p, d in sorted(files.items())]

    def history(self, _: bytes, name: str, revision: str) -> Any:
        made = {"date": "2026-01-01T00:00:00.000Z", "authors": [], "message": ""}
        return [made | {"id": c.oid, "title": c.title} for c in reversed(self.repo(name).commits)]

    def resolve(self, _: bytes, name: str, revision: str, path: str) -> Any:
        commit = self.found(self.repo(name), revision)
        if path not in commit.files:
            told = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit.oid}
            return 404, told, b""
        data = commit.files[path]
        etag = hashlib.sha256(data).hexdigest() if path.endswith(LFS) else git_hash(data)
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "none"}, data

    def found(self, repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit


NAME = r"([^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.check_card),
    ("POST", f"/api/models/{NAME}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/([^/]+)", Handler.commit),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", "/lfs/([0-9a-f]+)", Handler.lfs_upload),
    ("GET", f"/api/models/{NAME}", Handler.info),
    ("GET", f"/api/models/{NAME}/revision/([^/]+)", Handler.info),
    ("GET", f"/api/models/{NAME}/tree/([^/]+)", Handler.tree),
    ("GET", f"/api/models/{NAME}/commits/([^/]+)", Handler.history),
    ("GET HEAD", f"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]
