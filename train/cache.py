"""Features of a frozen target on disk, shared by every run with this target, these rows and this dtype.

    FOLDER/cache.json                      what the cache is of: target, dtypes, layers
    FOLDER/features-PID-xxxx.safetensors   rows one after the other: a tensor [tokens, Ht] for each layer
    FOLDER/features-PID-xxxx.json          which rows those are, size and checksum; written last

Every shard brings its own index, so writers share nothing but the folder's lock, and a shard is there whole or not at
all. A row is known by its token ids, not by its place: recipes may order and mix rows as they like. What a killed
process loses is its buffer, less than one shard.

Legend: t tokens of a row, L kept layers, F features, Ht target hidden size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from headstart.heads import Tie
from headstart.heads.tie import fingerprint
from headstart.infer.embedded import sync

logger = logging.getLogger(__name__)

FORMAT = 1
SHARD_BYTES = 256 << 20  # a shard is written when this much has come together, and at the end
MARGIN = 512 << 20  # bytes that must stay free on the disk when the cache is full
MANIFEST, LOCK, SHARD = "cache.json", ".lock", "features-"
Say = Callable[[str], None]


class Row(NamedTuple):
    """One row as the heads want it."""

    features: Tensor  # [t, F]
    last: Tensor  # [t, Ht]
    bad: bool  # had NaN or infinity in it: zeros, and not to be supervised


class FeatureCache:
    """Opened with ``open``; a context manager, since what is not yet a shard is written at the end."""

    def __init__(self, folder: Path, layers: Sequence[int], dtype: torch.dtype, hidden: int) -> None:
        self.folder, self.layers, self.dtype = folder, list(layers), dtype
        self.bytes_per_token = len(self.layers) * hidden * dtype.itemsize
        self._index: dict[str, tuple[str, int, int, bool]] = {}  # key -> shard, start, tokens, bad
        self._buffer: dict[str, tuple[Tensor, bool]] = {}  # key -> [t, L, Ht], bad
        self._checksums: dict[str, int | None] = {}  # of every shard seen; None = it was damaged
        self._mapped: dict[str, Any] = {}
        self._looked, self.missing = -1, 0  # tokens that ``expect`` did not find, less what came since

    @classmethod
    def open(
        cls, folder: Path, target: Any, layers: Iterable[int], dtype: torch.dtype | None = None, say: Say = logger.info
    ) -> FeatureCache:
        """The cache in ``folder``, made if it is not there. ``layers`` are hidden_states indices; the last hidden state
        is always kept. ``dtype`` None keeps what the target computes in, so that cached features are the online ones.

        Raises ValueError where the folder holds a cache of another target, another dtype or without these layers, and
        OSError where nothing can be written there.
        """
        tie = Tie.of(target)
        final = target.config.get_text_config(decoder=True).num_hidden_layers
        wanted = sorted({*layers, final})
        if wanted[0] < 0 or wanted[-1] > final:
            raise ValueError(f"cannot keep layers {wanted}: this target has hidden states 0 to {final}")
        computed, stored = _name(target.dtype), _name(dtype or target.dtype)
        facts = {"format": FORMAT, "output_matrix": fingerprint(tie), "weights": weights_digest(target)}
        facts |= {"target_dtype": computed, "kept_dtype": stored}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOCK).touch()
        except OSError as error:
            raise OSError(
                f"cannot write into the feature cache {folder}: {error}. Give another data.cache=FOLDER, or "
                "data.cache=null to train online"
            ) from error
        with FileLock(folder / LOCK):
            if (folder / MANIFEST).exists():
                kept = _agreed(folder, facts, wanted)
                _tidy(folder)
            else:
                kept = wanted
                _write(folder / MANIFEST, json.dumps(facts | {"layers": kept}, indent=1).encode())
                sync(folder)
        if stored != computed:
            say(f"features are kept in {stored}, the target computes in {computed}: online differs by rounding")
        cache = cls(folder, kept, getattr(torch, stored), tie.weight.shape[1])
        cache._scan()
        return cache

    def __enter__(self) -> FeatureCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()

    def __contains__(self, key: str) -> bool:
        return key in self._buffer or key in self._index

    def expect(self, rows: Iterable[Sequence[int]]) -> str:
        """What a run over ``rows`` (token ids) needs, in a line. Raises ValueError where the disk is too small."""
        lengths = {row_key(ids): len(ids) for ids in rows}
        tokens = sum(lengths.values())
        self.missing = sum(n for key, n in lengths.items() if key not in self)
        need, free = self.missing * self.bytes_per_token, shutil.disk_usage(self.folder).free
        if need and need + MARGIN > free:
            raise ValueError(
                f"the feature cache {self.folder} still needs {_size(need)} for {self.missing} tokens "
                f"({self.bytes_per_token} bytes each) and {_size(MARGIN)} to spare; it has {_size(free)} free. Take "
                "another disk, fewer data.cache_layers, data.cache_dtype=bfloat16, or data.cache=null to train online"
            )
        whole = _size(tokens * self.bytes_per_token)
        return (
            f"feature cache {self.folder}: {tokens} tokens, {whole} for hidden states {self.layers} in "
            f"{_name(self.dtype)}; {_size(need)} of it is computed in this run"
        )

    def read(self, keys: Sequence[str], wants: Sequence[int]) -> list[Row] | None:
        """The rows with features in the order of ``wants``, on the CPU in the kept dtype; None where one is missing.

        A shard that is not what was written is named and removed: its rows are missing then.
        """
        if not all(key in self for key in keys):
            self._scan()
        found = []
        for key in keys:
            if (row := self._row(key, wants)) is None:
                return None
            found.append(row)
        return found

    def add(self, keys: Sequence[str], rows: Sequence[Tensor], bad: Sequence[bool]) -> None:
        """Takes the rows [t, L, Ht] that are not known yet, L in the order of ``layers``.

        Rows that are ``bad``, or not finite in any kept layer, are kept as zeros and never supervised.
        """
        for key, row, broken in zip(keys, rows, bad, strict=True):
            if key not in self:
                states = row.detach().to("cpu", self.dtype)
                broken = broken or not bool(torch.isfinite(states).all())
                self._buffer[key] = (torch.zeros_like(states) if broken else states, broken)
                self.missing -= len(states)
        if sum(len(states) for states, _ in self._buffer.values()) * self.bytes_per_token >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """What was added becomes a shard: written beside, synced, renamed, its index last. Raises OSError."""
        with FileLock(self.folder / LOCK):
            self._scan()
            fresh = {key: row for key, row in self._buffer.items() if key not in self._index}  # not another writer's
            if fresh:
                name = f"{SHARD}{os.getpid()}-{os.urandom(4).hex()}"
                joined = torch.cat([states for states, _ in fresh.values()])  # [tokens, L, Ht]
                data = save({str(layer): joined[:, i].contiguous() for i, layer in enumerate(self.layers)})
                rows, start = {}, 0
                for key, (states, bad) in fresh.items():
                    rows[key] = (start, len(states), bad)
                    start += len(states)
                _write(self.folder / f"{name}.safetensors", data)
                facts = {"bytes": len(data), "crc32": zlib.crc32(data), "rows": rows}
                _write(self.folder / f"{name}.json", json.dumps(facts).encode())
                sync(self.folder)
            self._looked = -1
            self._scan()
        self._buffer = {}

    def _row(self, key: str, wants: Sequence[int]) -> Row | None:
        if key in self._buffer:
            states, bad = self._buffer[key]
            parts = {layer: states[:, self.layers.index(layer)] for layer in {*wants, self.layers[-1]}}
        else:
            name, start, length, bad = self._index.get(key, ("", 0, 0, False))
            if not name or (shard := self._shard(name)) is None:
                return None
            parts = {i: shard.get_slice(str(i))[start : start + length] for i in {*wants, self.layers[-1]}}
        return Row(torch.cat([parts[i] for i in wants], dim=-1), parts[self.layers[-1]], bad)

    def _shard(self, name: str) -> Any:
        """The mapped file, None where it is damaged; its checksum is taken once, when it is first opened."""
        if name not in self._mapped:
            path = self.folder / f"{name}.safetensors"
            try:
                whole = zlib.crc32(path.read_bytes()) == self._checksums[name]
            except OSError:
                whole = False
            if not whole:
                self._lose(name, "its checksum is not that of what was written")
                return None
            self._mapped[name] = safe_open(path, "pt")
        return self._mapped[name]

    def _scan(self) -> None:
        """Takes in the shards written since the last look, by whatever process."""
        changed = self.folder.stat().st_mtime_ns
        if changed == self._looked:
            return
        self._looked = changed
        for path in sorted(self.folder.glob(f"{SHARD}*.json")):
            name = path.stem
            if name in self._checksums:
                continue
            try:
                facts = json.loads(path.read_text())
                rows = {key: (name, *place) for key, place in facts["rows"].items()}
                whole = path.with_suffix(".safetensors").stat().st_size == facts["bytes"]
                self._checksums[name] = facts["crc32"]
            except (OSError, ValueError, KeyError, TypeError):
                whole = False
            if whole:
                self._index |= {key: place for key, place in rows.items() if key not in self._index}
            else:
                self._lose(name, "its index or its size is not what was written")

    def _lose(self, name: str, why: str) -> None:
        left = {key: place for key, place in self._index.items() if place[0] != name}
        lost, self._index, self._checksums[name] = len(self._index) - len(left), left, None
        told = f"the {lost} rows in it are" if lost else "what was in it is"
        shard = self.folder / f"{name}.safetensors"
        logger.warning("the feature shard %s is damaged (%s) and removed: %s computed again", shard, why, told)
        for path in (shard.with_suffix(".json"), shard):
            path.unlink(missing_ok=True)


def row_key(ids: Sequence[int]) -> str:
    """Digest of a row's token ids."""
    return hashlib.blake2b(torch.tensor(ids, dtype=torch.int64).numpy().tobytes(), digest_size=16).hexdigest()


def weights_digest(target: Any) -> str:
    """Digest of 16 numbers of every parameter: tells targets apart that share their output matrix, as tuned ones do."""
    digest = hashlib.sha256()
    for weight in (w.detach() for w in target.parameters() if not w.is_meta):
        flat = weight.reshape(-1)
        digest.update(flat[:: max(1, flat.numel() // 16)][:16].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _agreed(folder: Path, facts: dict[str, Any], wanted: Sequence[int]) -> list[int]:
    """The layers of the cache in ``folder``. Raises ValueError where it is not of these ``facts`` and layers."""
    try:
        there = json.loads((folder / MANIFEST).read_text())
        layers = list(there["layers"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged ({error!r}): remove {folder}, or give another one") from None
    if other := [f"{k} {there.get(k)} there, {facts[k]} here" for k in facts if there.get(k) != facts[k]]:
        raise ValueError(
            f"the feature cache {folder} is of another kind: {'; '.join(other)}. "
            "Give another data.cache=FOLDER, or set dtype and data.cache_dtype as they were"
        )
    if lacking := sorted(set(wanted) - set(layers)):
        raise ValueError(
            f"the feature cache {folder} has hidden states {layers}, this run also wants {lacking}: remove it, or make "
            f"another with data.cache=OTHER_FOLDER data.cache_layers={sorted({*layers, *wanted})}"
        )
    return layers


def _tidy(folder: Path) -> None:
    """Removes what killed writers left behind; a living one would hold the lock."""
    shards = (path for path in folder.glob(f"{SHARD}*.safetensors") if not path.with_suffix(".json").exists())
    for path in (*folder.glob(".*.partial"), *shards):
        path.unlink()


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(data)
        sync(partial)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write the feature cache {path}: {error}. Or set data.cache=null") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
