"""The journal of a benchmark: every job that is done, on disk at once, so that an interrupted benchmark goes on."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.infer.figures import Run

AFTER = ".journal"  # of the name of the file that figures are saved in


class Journal:
    """A file of lines: first the settings, then the runs of one job each. ``runs`` are those that are there."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Begins the file ``path``, or goes on where it ends; a last line that was cut off is dropped, and its job
        done again. Raises ValueError where the file is of other ``settings``, or no journal."""
        self.path = path
        self.runs: list[Run] = []
        settings = json.loads(json.dumps(settings))
        raw = path.read_bytes() if path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        goes_on = bool(whole) and self._read(whole.decode().split("\n")[:-1], settings)
        self._file = path.open("ab")
        self._file.truncate(len(whole) if goes_on else 0)
        if not goes_on:
            self._write(settings)

    @property
    def done(self) -> set[tuple[str, int]]:
        """Decoding and number of the jobs that need not be done again."""
        return {(run.decoding, run.batch) for run in self.runs}

    def add(self, runs: "Sequence[Run]") -> None:
        """Keeps the runs of one job; they are on disk when this returns."""
        self._write([run._asdict() for run in runs])
        self.runs += runs

    def close(self, *, remove: bool) -> None:
        """Lets go of the file; ``remove`` where what it held is saved elsewhere."""
        self._file.close()
        if remove:
            self.path.unlink()

    def _write(self, what: Any) -> None:
        self._file.write(json.dumps(what, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, lines: list[str], settings: dict[str, Any]) -> bool:
        """Whether there is anything to go on with."""
        from headstart.infer.figures import Run

        try:
            found, *jobs = (json.loads(line) for line in lines)
            self.runs = [Run.restored(row) for job in jobs for row in job]
            keys = dict.fromkeys([*settings, *found])
            other = [
                f"{k} {found.get(k)} there, {settings.get(k)} here" for k in keys if found.get(k) != settings.get(k)
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            said = f"{self.path} is no journal of this version of the benchmark ({error})"
            raise ValueError(f"{said}: remove it, or save elsewhere with --save") from error
        if other and self.runs:
            raise ValueError(
                f"{self.path} holds {len(self.done)} jobs of a benchmark with other settings ({'; '.join(other)}): ask "
                "for the same again to go on with it, save elsewhere with --save, or remove it to begin anew"
            )
        return not other


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, so that ``path`` is the old one or the new one at any instant."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
