"""The feature cache: what it gives back, what survives a kill or a broken disk, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from headstart.heads import FAMILIES
from headstart.train import cache as module
from headstart.train.batches import Stream, collate, epoch_order
from headstart.train.cache import FeatureCache, row_key
from headstart.train.features import Features, online
from headstart.train.loop import train
from headstart.train.masking import Masked
from headstart.train.meter import Progress
from headstart.train.recipe_file import load_recipe
from headstart.train.schedule import Plan
from tests.test_loop import DEFAULTS, broken, weights
from tests.toys import llama

ROOT = str(Path(__file__).parent.parent)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def some_rows(count: int = 6, shortest: int = 8, seed: int = 7) -> list[Masked]:
    """Rows of different lengths: sorted by length, they fall into the same micro-batches in every epoch."""
    g = torch.Generator().manual_seed(seed)
    lengths = range(shortest, shortest + count)
    return [Masked(torch.randint(3, 320, (n,), generator=g).tolist(), [i >= 4 for i in range(n)]) for n in lengths]


def counted(target: Any) -> list[int]:
    """Grows by one with every forward of the target."""
    forwards: list[int] = []
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    return forwards


def run(
    folder: Path | None,
    out: Path,
    rows: list[Masked],
    target: Any = None,
    family: str = "medusa",
    layers: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[dict[str, float]], int]:
    """Two epochs of micro-batches of 2; returns the heads' weights, what was told, forwards of the target."""
    target = (target or llama()).requires_grad_(False)
    forwards, told = counted(target), list[Progress]()
    heads = FAMILIES[family].from_target(target)
    stream = Stream(rows, 2, 0)
    plan = Plan(**(DEFAULTS | {"steps": 2 * stream.per_epoch, "weights": (1.0, 0.8, 0.6, 0.5)[: heads.trained_depths]}))
    wants = heads.config.features
    if folder is None:
        train(Accelerator(cpu=True), target, heads, stream, plan, out, "d", tell=told.append)
    else:
        with FeatureCache.open(folder, target, {*wants, *layers}, dtype) as cache:
            cache.expect(row.ids for row in rows)
            features = Features(target, wants, cache=cache)
            train(Accelerator(cpu=True), target, heads, stream, plan, out, "d", tell=told.append, cached=features)
    return weights(heads), [p.values for p in told], len(forwards)


def filled(folder: Path, rows: list[Masked], target: Any = None, **options: Any) -> None:
    """A cache of ``rows`` computed in one micro-batch."""
    target = target or llama()
    with FeatureCache.open(folder, target, options.pop("layers", ()), **options) as cache:
        Features(target, [cache.layers[-1]], cache=cache)(collate(rows, range(len(rows))))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("features-*.safetensors"))


def test_the_rows_here_meet_in_the_same_micro_batches_every_epoch() -> None:
    """What the equality to the bit below stands on."""
    lengths = [len(row.ids) for row in some_rows()]
    assert sorted(epoch_order(lengths, 2, 0, 0)) == sorted(epoch_order(lengths, 2, 0, 1))
    assert epoch_order(lengths, 2, 0, 0) != epoch_order(lengths, 2, 0, 2)  # their order differs


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("eagle3", torch.bfloat16)]
)
def test_online_filling_and_filled_train_the_same_to_the_bit(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    rows, found = some_rows(), []
    for name, folder in (("online", None), ("filling", tmp_path / "f"), ("filled", tmp_path / "f")):
        found.append(run(folder, tmp_path / name, rows, llama().to(dtype), family))
    (online_weights, online_told, forwards), filling, again = found
    assert len([values for values in online_told if "loss" in values]) == 6
    assert filling[1] == online_told and again[1] == online_told  # losses, accuracies, gradient norms
    assert torch.equal(filling[0], online_weights) and torch.equal(again[0], online_weights)
    assert (forwards, filling[2], again[2]) == (6, 3, 0)


def test_a_batch_from_disk_is_the_batch_online(tmp_path: Path) -> None:
    """Every tensor, padding included, in the order the heads want; only the layers asked for are read."""
    target, rows = llama(), some_rows(3)
    tokens = collate(rows, [2, 0, 1])
    with FeatureCache.open(tmp_path, target, [3, 1]) as cache:
        computed = Features(target, [3, 1], cache=cache)(tokens)
        buffered = Features(target, [3, 1], cache=cache)(tokens)
    read = Features(target, [3, 1], cache=FeatureCache.open(tmp_path, target, [1, 3]))(tokens)
    expected = online(target, tokens, [3, 1])
    for got in (computed, buffered, read):
        assert got.bad == [] and all(torch.equal(a, b) for a, b in zip(got.batch, expected.batch, strict=True))


def test_bytes_are_as_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2% a token, over several shards, index included."""
    monkeypatch.setattr(module, "SHARD_BYTES", 400_000)
    target, rows = llama(), some_rows(40, shortest=100)
    tokens = sum(len(row.ids) for row in rows)
    with FeatureCache.open(tmp_path, target, [1, 3]) as cache:
        assert cache.bytes_per_token == 3 * 64 * 4
        told = cache.expect(row.ids for row in rows)
        assert f"{tokens} tokens, {tokens * cache.bytes_per_token / 1e6:.2f} MB for hidden states [1, 3, 4]" in told
        features = Features(target, [4], cache=cache)
        for first in range(0, 40, 4):
            features(collate(rows, range(first, first + 4)))
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(shards(tmp_path)) > 3
    assert used == pytest.approx(tokens * cache.bytes_per_token, rel=0.02)
    assert "0.00 MB of it is computed" in FeatureCache.open(tmp_path, target, []).expect(row.ids for row in rows)


def test_the_time_it_takes_is_told_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By micro-batches of the run itself, which are kept: the estimate costs no forward."""
    target, rows = llama(), some_rows(8, shortest=10)
    forwards, at = counted(target), iter(range(100))
    monkeypatch.setattr("headstart.train.features.monotonic", lambda: next(at))  # a second a micro-batch
    micro_batches = [collate(rows, [i]) for i in range(8)]
    with FeatureCache.open(tmp_path, target, []) as cache:
        features = Features(target, [4], cache=cache)
        features(micro_batches[0])  # there already
        cache.expect(row.ids for row in rows)
        told = features.foresee(iter(micro_batches))
        # rows of 11, 12 and 13 tokens were computed, the last two counted; 14 to 17 are ahead
        assert told == "feature cache: 12 tokens/s, 5 s of forwards ahead for one process"
        assert len(forwards) == 4
        for tokens in micro_batches:
            features(tokens)
        assert len(forwards) == 8 and cache.missing == 0
        assert features.foresee(iter(micro_batches)) == ""


def test_a_folder_is_made_before_anything_and_the_second_epoch_needs_no_forward(tmp_path: Path) -> None:
    """FC-019: four rows, two epochs, a folder that is not there; then one that cannot be."""
    rows, folder = some_rows(4), tmp_path / "new" / "deep" / "folder"
    assert run(folder, tmp_path / "out", rows)[2] == 2  # two micro-batches, once each
    (tmp_path / "file").write_text("")
    target = llama()
    forwards = counted(target)
    with pytest.raises(OSError, match=r"cannot write into the feature cache .*file/folder: .*data.cache=null"):
        FeatureCache.open(tmp_path / "file" / "folder", target, [])
    assert not forwards


def test_two_families_and_another_order_share_one_cache(tmp_path: Path) -> None:
    """Rows are known by their tokens: places, masks and labels may differ."""
    rows = some_rows()
    filling = run(tmp_path / "f", tmp_path / "a", rows, layers=(0, 1, 2, 3))
    turned = [Masked(row.ids, [i >= 6 for i in range(len(row.ids))]) for row in reversed(rows)]
    eagle = run(tmp_path / "f", tmp_path / "b", turned, family="eagle3")
    assert (filling[2], eagle[2]) == (3, 0)
    assert torch.equal(eagle[0], run(None, tmp_path / "c", turned, family="eagle3")[0])


def test_bfloat16_halves_a_float32_target_says_so_and_repeats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first pass sees what the disk gives back later, so a run over a cold and a warm cache is the same one."""
    rows = some_rows()
    exact = run(tmp_path / "exact", tmp_path / "a", rows)
    with caplog.at_level("INFO"):
        cold = run(tmp_path / "half", tmp_path / "b", rows, dtype=torch.bfloat16)
    assert caplog.text.count("kept in bfloat16, the target computes in float32") == 1
    warm = run(tmp_path / "half", tmp_path / "c", rows, dtype=torch.bfloat16)
    assert cold[1] == warm[1] and torch.equal(cold[0], warm[0]) and warm[2] == 0
    assert cold[1] != exact[1]
    torch.testing.assert_close(cold[0], exact[0], atol=2e-2, rtol=0)
    whole, half = (shards(tmp_path / name)[0].stat().st_size for name in ("exact", "half"))
    assert half == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.parametrize("hit", [0, 5])  # the shortest row, and the longest: it gives the batch its width
def test_a_row_with_nan_is_kept_as_bad_and_named(tmp_path: Path, hit: int) -> None:
    """FC-043."""
    rows = some_rows()
    online_run = run(None, tmp_path / "o", rows, broken(llama(), {rows[hit].ids[0]}))
    for name in ("a", "b"):
        got = run(tmp_path / "f", tmp_path / name, rows, broken(llama(), {rows[hit].ids[0]}))
        assert got[1] == online_run[1] and torch.equal(got[0], online_run[0])
        assert sum(values["bad_rows"] for values in got[1]) == 2
    with FeatureCache.open(tmp_path / "f", llama(), []) as cache:
        found = Features(llama(), [4], cache=cache)(collate(rows, [hit, 2]))
    assert found.bad == [hit] and not found.batch.supervised[0].any() and not found.batch.last[0].any()


def test_values_that_are_not_finite_never_reach_the_disk(tmp_path: Path) -> None:
    with FeatureCache.open(tmp_path, llama(), []) as cache:
        cache.add(["k"], [torch.full((3, 1, 64), float("inf"))], [False])
    row = (FeatureCache.open(tmp_path, llama(), []).read(["k"], [4]) or [])[0]
    assert row.bad and not row.last.any() and row.last.shape == (3, 64)


@pytest.mark.parametrize("harm", ["bytes", "cut", "gone", "index"])
def test_a_damaged_shard_is_named_and_its_rows_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    rows, folder = some_rows(), tmp_path / "f"
    good = run(folder, tmp_path / "a", rows)
    shard = shards(folder)[0]
    data = shard.read_bytes()
    if harm == "bytes":
        shard.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])  # one bit of one number
    elif harm == "cut":
        shard.write_bytes(data[: len(data) // 2])
    elif harm == "gone":
        shard.unlink()
    else:
        shard.with_suffix(".json").write_text('{"bytes": 1')
    again = run(folder, tmp_path / "b", rows)
    assert f"the feature shard {shard} is damaged" in caplog.text and "computed again" in caplog.text
    assert again[1] == good[1] and again[2] == 3
    assert [path.name for path in shards(folder)] != [shard.name] and len(shards(folder)) == 1
    caplog.clear()
    assert run(folder, tmp_path / "c", rows)[2] == 0 and "damaged" not in caplog.text


KILLED = """
import os, signal, sys
from pathlib import Path
from headstart.train import cache as module
from headstart.train.batches import collate
from headstart.train.cache import FeatureCache
from headstart.train.features import Features
from tests.test_feature_cache import llama, some_rows

at, write, seen = int(sys.argv[2]), module._write, []

def slow(path, data):
    seen.append(path)
    if len(seen) == at + 2:  # the manifest, then {at} files that are whole
        path.with_name(f".{path.name}.partial").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, data)

module._write, module.SHARD_BYTES = slow, 1
with FeatureCache.open(Path(sys.argv[1]), llama(), []) as cache:
    for row in range(3):
        Features(llama(), [4], cache=cache)(collate(some_rows(), [row]))
"""


@pytest.mark.parametrize("whole", [2, 3])  # killed in the second shard; between it and its index
def test_a_killed_writer_leaves_a_cache_that_goes_on(tmp_path: Path, whole: int) -> None:
    """FC-049 for the cache: what is complete is used, leftovers are removed, the rest is computed."""
    done = spawn(KILLED, tmp_path, whole).wait(timeout=120)
    assert done == -signal.SIGKILL
    assert list(tmp_path.glob(".*.partial")) and len(shards(tmp_path)) == whole - 1
    target = llama()
    forwards = counted(target)
    with FeatureCache.open(tmp_path, target, []) as cache:
        assert not list(tmp_path.glob(".*.partial")) and len(shards(tmp_path)) == 1
        for row in range(3):
            Features(target, [4], cache=cache)(collate(some_rows(), [row]))
    assert len(forwards) == 2 and len(shards(tmp_path)) == 2


def spawn(code: str, *args: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, env=environment)


WRITER = """
import sys
from pathlib import Path
from time import monotonic, sleep
from headstart.train import cache as module
from headstart.train.batches import collate
from headstart.train.cache import FeatureCache
from headstart.train.features import Features
from tests.test_feature_cache import llama, some_rows

module.SHARD_BYTES, rows, target = 20_000, some_rows(40), llama()
folder, ready = Path(sys.argv[1]), Path(sys.argv[3])

def meet(what):  # each does its part before either goes on, however the two are scheduled
    (ready / (what + sys.argv[2])).touch()
    end = monotonic() + 60
    while len(list(ready.glob(what + "*"))) < 2 and monotonic() < end:
        sleep(0.001)

with FeatureCache.open(folder, target, [2]) as cache:
    meet("opened")
    for place, row in enumerate(list(range(40))[:: int(sys.argv[2])]):
        Features(target, [4], cache=cache)(collate(rows, [row]))
        if place == 9:
            cache.flush()
            meet("wrote")
"""


def test_two_processes_fill_one_cache_at_once(tmp_path: Path) -> None:
    """From both ends, so that they meet: every row is there and right, whoever wrote it."""
    (tmp_path / "ready").mkdir()
    writers = [spawn(WRITER, tmp_path / "f", step, tmp_path / "ready") for step in (1, -1)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    rows, target = some_rows(40), llama()
    forwards = counted(target)
    cache = FeatureCache.open(tmp_path / "f", target, [2])
    found = [Features(target, [2], cache=cache)(collate(rows, [i])) for i in range(40)]
    assert not forwards and len(shards(tmp_path / "f")) > 4
    assert len({path.name.split("-")[1] for path in shards(tmp_path / "f")}) == 2  # both processes wrote
    for i, got in enumerate(found):
        expected = online(target, collate(rows, [i]), [2]).batch
        assert torch.equal(got.batch.features, expected.features) and torch.equal(got.batch.last, expected.last)


def test_a_writer_sees_what_another_has_written_since(tmp_path: Path) -> None:
    target, tokens = llama(), collate(some_rows(), [0, 1])
    forwards = counted(target)
    with FeatureCache.open(tmp_path, target, []) as early, FeatureCache.open(tmp_path, target, []) as late:
        Features(target, [4], cache=late)(tokens)
        late.flush()
        Features(target, [4], cache=early)(tokens)
    assert len(forwards) == 1 and len(shards(tmp_path)) == 1


def test_rows_that_both_have_computed_are_written_once(tmp_path: Path) -> None:
    target, tokens = llama(), collate(some_rows(), [0, 1])
    with FeatureCache.open(tmp_path, target, []) as one, FeatureCache.open(tmp_path, target, []) as other:
        Features(target, [4], cache=one)(tokens)
        Features(target, [4], cache=other)(tokens)
    assert len(shards(tmp_path)) == 1 and row_key(some_rows()[0].ids) in one and row_key(some_rows()[0].ids) in other


def tuned() -> Any:
    """Another target with the same output matrix."""
    target = llama()
    with torch.no_grad():
        target.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    return target


@pytest.mark.parametrize(
    ("target", "layers", "dtype", "said"),
    [
        (lambda: llama(seed=1), [2], None, r"output_matrix \w+ there, \w+ here; weights \w+ there, \w+ here"),
        (tuned, [2], None, r"kind: weights \w+ there, \w+ here"),
        (lambda: llama().bfloat16(), [2], None, r"target_dtype float32 there, bfloat16 here"),
        (llama, [2], torch.bfloat16, r"kind: kept_dtype float32 there, bfloat16 here"),
        (llama, [3, 2, 1], None, r"\[2, 4\], this run also wants \[1, 3\].*cache_layers=\[1, 2, 3, 4\]"),
        (llama, [5], None, r"hidden states 0 to 4"),
    ],
)
def test_a_cache_of_something_else_is_refused_by_name(
    tmp_path: Path, target: Any, layers: list[int], dtype: torch.dtype | None, said: str
) -> None:
    filled(tmp_path, some_rows(2), layers=[2])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=said):
        FeatureCache.open(tmp_path, target(), layers, dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    FeatureCache.open(tmp_path, llama(), [])  # fewer layers are no reason


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is damaged"), ('{"format": 2, "layers": [4]}', r"format 2 there, 1 here")]
)
def test_a_manifest_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    filled(tmp_path, some_rows(2))
    (tmp_path / "cache.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        FeatureCache.open(tmp_path, llama(), [])


def test_a_disk_that_is_too_small_is_refused_before_any_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, target = some_rows(), llama()
    missing = sum(len(row.ids) for row in rows[2:])
    filled(tmp_path, rows[:2])
    cache = FeatureCache.open(tmp_path, target, [])
    need = missing * cache.bytes_per_token + module.MARGIN
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=need - 1))
    with pytest.raises(ValueError, match=rf"needs 0\.01 MB for {missing} tokens \(256 bytes each\).*data.cache=null"):
        cache.expect(row.ids for row in rows)
    cache.expect(row.ids for row in rows[:2])  # nothing is missing, so nothing is needed
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=need))
    cache.expect(row.ids for row in rows)


def test_a_disk_that_fills_up_stops_the_run_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a cache that silently stops growing."""

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    cache = FeatureCache.open(tmp_path, llama(), [])
    Features(llama(), [4], cache=cache)(collate(some_rows(), [0]))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"cannot write the feature cache .*No space left"):
        cache.flush()
    assert not list(tmp_path.glob(".*.partial"))


def test_the_same_text_twice_in_a_batch_is_kept_once(tmp_path: Path) -> None:
    row = some_rows(1)[0]
    filled(tmp_path, [row, row])
    facts = json.loads(shards(tmp_path)[0].with_suffix(".json").read_text())
    assert facts["rows"] == {row_key(row.ids): [0, len(row.ids), False]}


def test_recipes_take_one_or_the_other(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("target: toy\nout: out\ndata:\n  train: [rows.jsonl]\n")
    with pytest.raises(ValueError, match="in memory or on disk, not both"):
        load_recipe(recipe, ["data.remember=true", "data.cache=features"])
    with pytest.raises(ValueError, match="not both"):
        Features(llama(), [4], remember=True, cache=FeatureCache.open(tmp_path / "f", llama(), []))
    with pytest.raises(ValueError, match="joint trains it"):
        load_recipe(recipe, ["joint={heads: out/heads}", "data.cache=features"])
    cached = load_recipe(recipe, ["data.cache=features", "data.cache_layers=[2, 3]"])
    assert cached.data.cache == "features" and cached.data.cache_layers == [2, 3]
    assert cached.digest() == load_recipe(recipe).digest()  # a run may go on with the cache, or without it


@pytest.mark.parametrize("packing", [False, True])
def test_a_recipe_fills_the_cache_and_trains_alike_without_forwards_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], packing: bool
) -> None:
    from headstart.train.__main__ import main
    from tests.byte_tokenizer import byte_tokenizer

    llama().save_pretrained(tmp_path / "toy")
    byte_tokenizer().save_pretrained(tmp_path / "toy")
    chats = [{"id": f"r{i}", "prompt": f"say {i}", "answer": "abcd" * (3 + i)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(c) for c in chats))
    (tmp_path / "r.yaml").write_text(
        f"target: {tmp_path / 'toy'}\nout: out\ndata: {{train: [rows.jsonl]}}\n"
        "optim: {epochs: 2, batch_size: 2, precision: fp32}\nevery: {log: 1}\n"
    )
    packs = ["data.packing=true", "data.max_length=128", "optim.epochs=4"] if packing else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    losses = []
    for name, cache in (("online", "null"), ("filling", "features"), ("filled", "features")):
        AcceleratorState._reset_state(reset_partial_state=True)
        main([str(tmp_path / "r.yaml"), f"out={name}", f"data.cache={cache}", "data.cache_layers=[2]", *packs])
        log = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in log if "loss" in line])
    assert len(losses[0]) == 4 and losses[1] == losses[0] and losses[2] == losses[0]
    said = " ".join(capsys.readouterr().err.split())
    assert "for hidden states [2, 4] in float32" in said and "0.00 MB of it is computed in this run" in said
    assert ("packing: 4 rows in 2 lines of at most 128 tokens" in said) is packing
