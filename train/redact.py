"""What may be written down of a configuration: everything but secrets, told by their names and by the environment."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of snake, kebab and camel case
SECRET = {"apikey", "authorization", "bearer", "credential", "credentials", "passwd", "password", "pwd", "secret"}
SECRET |= {"secrets", "accesstoken", "authtoken"}
OPENS = {"access", "api", "auth", "encryption", "private", "secret", "signing"}  # before "key"
SPECIAL = {"audio", "bos", "cls", "decoder", "end", "eos", "eot", "image", "mask", "pad", "sep", "special", "start"}
SPECIAL |= {"unk", "video"}  # before "token": a token of a vocabulary
USER = re.compile(r"(?<=://)[^/\s@]+@")  # name and password in an address
FOLDERS = ("PWD", "OLDPWD")
SHORTEST = 8  # characters of a secret in the environment; shorter values stand in other text by chance


def redacted(value: Any) -> Any:
    """``value`` (of mappings, lists and plain values) with secrets replaced: what hangs on a secret's name, user and
    password in addresses, and whatever the environment holds under a secret's name.

    Names are read word by word, so that `pad_token_id` and `max_new_tokens` stay, `auth_token` and `x_api_key` do not.
    """
    return _redacted(value, held_secrets())


def held_secrets() -> list[str]:
    """What the environment holds under a secret's name; the working folder, which a shell calls PWD, is none."""
    held = {name: text for name, text in os.environ.items() if len(text) >= SHORTEST and name not in FOLDERS}
    return [text for name, text in held.items() if names_secret(name, text)]


def names_secret(name: str, value: Any) -> bool:
    """Whether ``name`` is that of a secret; a token that is a number is one of a vocabulary."""
    words = [word.lower() for word in WORDS.findall(name)]
    if SECRET & set(words):
        return True
    before = words[-2] if len(words) > 1 else ""
    if words[-1:] == ["key"]:
        return before in OPENS
    return words[-1:] == ["token"] and before not in SPECIAL and isinstance(value, str)


def _redacted(value: Any, known: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if inner is not None and names_secret(str(key), inner) else _redacted(inner, known)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redacted(inner, known) for inner in value]
    if not isinstance(value, str):
        return value
    for secret in known:
        value = value.replace(secret, HIDDEN)
    return USER.sub(f"{HIDDEN}@", value)
