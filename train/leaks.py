"""What must not leave this machine with a file: tokens, keys, and places in its file system."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from huggingface_hub import get_token

from headstart.train.redact import held_secrets, names_secret

SETTING = re.compile(r"""(?<![\w-])["']?([\w-]+)["']?\s*[:=]\s*["']?([^\s"',}]{4,})""")
EMPTY = re.compile(r"null|none|true|false|-?\d+(\.\d*)?(e[+-]?\d+)?|<.*|\*+", re.IGNORECASE)
KEYS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bAKIA[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
ROOTS = "home root Users mnt media tmp var data work workspace scratch opt srv private Volumes content kaggle dbfs"
ROOTS += r" nfs net lustre gpfs beegfs ceph fsx efs raid storage export exports cluster project projects ssd\d* nvme\d*"
PLACES = re.compile(
    rf"(?:(?<![\w./:-])|(?<=file:)/*)(?:/(?:{'|'.join(ROOTS.split())})/|~(?:[A-Za-z_][\w.-]*)?/|[A-Za-z]:\\)"
    r"""[^\s"'`,)}\]]+"""
)


def check_texts(files: Mapping[str, bytes], secrets: Sequence[str] = ()) -> None:
    """Raises ValueError naming every file and line with a secret or a local path, without repeating a secret.

    ``files`` by path; all are taken for UTF-8 text. ``secrets`` are known ones, looked for as they are.
    """
    found = [complaint for path, data in files.items() for complaint in complaints(path, data, secrets)]
    if found:
        told = "\n  ".join(found)
        raise ValueError(f"these files hold what must not be uploaded; take it out and push again:\n  {told}")


def secrets_here() -> list[str]:
    """What the environment keeps under the name of a secret, and the token of the Hub's login."""
    saved = get_token()
    return [*held_secrets(), saved] if saved else held_secrets()


def complaints(path: str, data: bytes, secrets: Sequence[str] = ()) -> Iterator[str]:
    """What is wrong with one file, a line each."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        yield f"{path}: not text, though its name says so"
        return
    here = [str(place) for place in (Path.home(), Path.cwd()) if len(place.parts) > 2]
    for number, line in enumerate(text.splitlines(), 1):
        if any(secret in line for secret in secrets) or KEYS.search(line):
            yield f"{path}:{number}: a token or key"
        for name, value in SETTING.findall(line):
            if names_secret(name, value) and not EMPTY.fullmatch(value):
                yield f"{path}:{number}: the value of {name}"
        place = PLACES.search(line)
        known = place[0] if place else next((place for place in here if place in line), None)
        if known:
            yield f"{path}:{number}: a place on this machine, {known}"
