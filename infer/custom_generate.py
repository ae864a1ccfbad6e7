"""What the ``custom_generate/generate.py`` of a heads repository calls: decode with the heads that came with the file.

``target.generate(..., custom_generate="user/repo", trust_remote_code=True)`` makes transformers copy that file to

    .../transformers_modules/user/repo/COMMIT/custom_generate/generate.py

and call its ``generate(model, **arguments)`` with everything that ``generate`` was given. Weights are taken from the
commit in that path, so that code and heads are of one commit whatever ``revision`` was asked for.
"""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

from headstart.heads import DraftHeads, Tie
from headstart.infer.costs import plan_in
from headstart.infer.prepack import Prepacked
from headstart.infer.speculator import Speculator, heads_for
from headstart.infer.target import compute_dtype

OPTIONS = ("nodes", "depth", "rule", "plan", "walk", "compile", "prepack", "width", "branch", "siblings", "shape")
"""Keywords of ``Speculator`` that may stand among those of ``generate``."""
HUB = ("token", "cache_dir", "local_files_only")
"""Keywords that transformers has already used to find the code; the heads are found with them too."""

# The last heads of a target stay with it, so that a call reads no weights; they hold no reference to it, and go when it
# goes.
_LOADED: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], DraftHeads]] = weakref.WeakKeyDictionary()

_PACKED: weakref.WeakKeyDictionary[Any, Prepacked] = weakref.WeakKeyDictionary()  # holds them packed between calls


def run(model: Any, repo: str | None, file: str, *, heads: str | None = None, **arguments: Any) -> Any:
    """``model.generate(**arguments)``, sooner.

    ``repo`` is the Hub id that ``file``, a generate.py, was pushed to; None = it never was. ``heads``, a folder or Hub
    id, is used instead. ``arguments`` are those of ``generate`` with any of OPTIONS, and ``also``, names of drafters
    whose guesses are merged. Raises ValueError where no heads can be known, OSError where they cannot be had.
    """
    where = {name: arguments.pop(name, None) for name in HUB}
    asked = arguments.pop("revision", None)
    source, revision = (heads, asked) if heads is not None else home(repo, file)
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    also = arguments.pop("also", ())
    if options.get("plan") == "adaptive":
        options["plan"] = plan_in(source, revision, where["token"]) or "adaptive"
    loaded = _heads(model, source, revision, where)
    if options.get("prepack"):
        _PACKED[model] = Prepacked([model, loaded])
    return Speculator(model, [*also, loaded] if also else loaded, **options).generate(**arguments)


def home(repo: str | None, file: str) -> tuple[str, str]:
    """The Hub id and the commit that ``file`` is of. Raises ValueError where its path tells no commit."""
    commit = Path(file).parent.parent.name
    if repo is None or not re.fullmatch("[0-9a-f]{40}", commit):
        raise ValueError(
            "custom_generate was given a local folder, of which transformers copies the code and not the heads: give "
            'the folder once more, generate(..., custom_generate="FOLDER", heads="FOLDER", trust_remote_code=True)'
        )
    return repo, commit


def _heads(model: Any, source: str, revision: str | None, where: dict[str, Any]) -> DraftHeads:
    """Loaded once for a target, a revision and, in a folder, a state of its files."""
    weight = Tie.of(model).weight
    folder = Path(source)
    changed = tuple(f.stat().st_mtime_ns for f in sorted(folder.glob("*.*"))) if folder.is_dir() else ()
    key = (str(source), revision, weight.device, compute_dtype(model), changed)
    known = _LOADED.get(model)
    if known is None or known[0] != key:
        try:
            found = heads_for(model, str(source), revision=revision, **where)
        except OSError as error:
            at = f" at {revision}" if revision else ""
            raise OSError(
                f"the heads of {source}{at} cannot be had; a folder with config.json and model.safetensors was "
                f"expected, or a Hub id that this token may read: {error}"
            ) from error
        known = _LOADED[model] = (key, found)
    return known[1]
