"""Training end to end on toys: labels, accumulation, bad rows, intervals, resume, repeatability."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from headstart.heads import FAMILIES, DraftHeads, Tie
from headstart.train import checkpoint
from headstart.train.batches import Stream, collate
from headstart.train.evaluate import evaluate
from headstart.train.features import online
from headstart.train.loop import BAD_LIMIT, train
from headstart.train.masking import Masked
from headstart.train.meter import Progress
from headstart.train.schedule import Plan, learning_rate
from tests.families import KINDS, disturbed, documents
from tests.toys import c64, llama

DEFAULTS: dict[str, Any] = {
    "steps": 4,
    "lr": 1e-3,
    "warmup": 0.0,
    "schedule": "constant",
    "weight_decay": 0.0,
    "betas": (0.9, 0.95),
    "clip": 1e9,
    "accumulation": 1,
    "divergence": "soft_ce",
    "weights": (1.0, 0.8, 0.6, 0.5),
    "log_every": 1,
    "evaluate_every": 0,
    "save_every": 0,
    "keep": 2,
}


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the life of a process; every test begins without one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def micro_rows(count: int = 8, length: int = 12) -> list[Masked]:
    g = torch.Generator().manual_seed(7)
    return [
        Masked(torch.randint(3, 320, (length,), generator=g).tolist(), [i >= 4 for i in range(length)])
        for _ in range(count)
    ]


def micro_train(
    out: Path, rows: list[Masked] | None = None, target: Any = None, batch_size: int = 2, **changes: Any
) -> Any:
    """Four steps on T0; returns the heads and what was told."""
    told: list[Progress] = []
    names = ("evaluate", "resume", "digest", "seed", "heads", "accelerator", "tell")
    options = {k: changes.pop(k) for k in names if k in changes}
    target = (target or llama()).requires_grad_(False)
    heads = options.pop("heads", None) or FAMILIES["medusa"].from_target(target)
    plan = Plan(**(DEFAULTS | changes))
    stream = Stream(micro_rows() if rows is None else rows, batch_size, options.pop("seed", 0))
    accelerator = options.pop("accelerator", None) or Accelerator(cpu=True)
    listen = options.pop("tell", lambda progress: None)

    def tell(progress: Progress) -> None:
        told.append(progress)
        listen(progress)

    train(accelerator, target, heads, stream, plan, out, options.pop("digest", "d"), tell=tell, **options)
    return heads, told


def weights(heads: DraftHeads) -> Tensor:
    return torch.cat([p.detach().flatten() for p in heads.parameters()])


def test_on_a_counting_target_medusa_reaches_heads_plus_one(tmp_path: Path) -> None:
    """A label shifted by one cannot pass: C64 is only guessed by heads that look at the right distance."""
    target = c64().requires_grad_(False)
    rows = [Masked([(s + i) % 64 for i in range(24)], [i >= 4 for i in range(24)]) for s in range(0, 64, 2)]
    heads = FAMILIES["medusa"].from_target(target, num_draft_heads=4)
    plan = Plan(
        **(
            DEFAULTS
            | {"steps": 120, "lr": 3e-2, "schedule": "cosine", "clip": 1.0, "log_every": 40, "evaluate_every": 120}
        )
    )
    told: list[Progress] = []

    def measure(trained: DraftHeads) -> dict[str, float]:
        prompts = [torch.tensor([7, 8]), torch.tensor([40, 41])]
        return evaluate(target, trained, prompts, max_new_tokens=40, nodes=8).numbers()

    train(
        Accelerator(cpu=True),
        target,
        heads,
        Stream(rows, 8, 0),
        plan,
        tmp_path,
        "d",
        evaluate=measure,
        tell=told.append,
    )
    rates = [p.values["tokens_per_pass"] for p in told if "tokens_per_pass" in p.values]
    losses = [p.values["loss"] for p in told if "loss" in p.values]
    assert rates[0] < 1.5 and rates[-1] == 5.0
    assert (
        losses[0] > losses[-1] and [p.values[f"accuracy/{d}"] for p in told[-2:-1] for d in (1, 2, 3, 4)] == [1.0] * 4
    )


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    """FC-041: rows with 8 and 30 supervised tokens, batch 2 x 1 against 1 x 2."""
    rows = [
        Masked(list(range(3, 15)), [i >= 4 for i in range(12)]),
        Masked(list(range(3, 37)), [i >= 4 for i in range(34)]),
    ]
    together, _ = micro_train(tmp_path / "a", rows, batch_size=2, steps=1)
    apart, _ = micro_train(tmp_path / "b", rows, batch_size=1, steps=1, accumulation=2)
    start = FAMILIES["medusa"].from_target(llama())
    assert not torch.equal(weights(together), weights(start))
    torch.testing.assert_close(weights(together), weights(apart), atol=1e-6, rtol=1e-5)


def test_the_same_seed_gives_the_same_run_whatever_is_logged_or_evaluated(tmp_path: Path) -> None:
    """FC-046."""
    target = llama()

    def measure(trained: DraftHeads) -> dict[str, float]:
        return evaluate(target, trained, [torch.tensor([5, 6, 7])], max_new_tokens=8, nodes=8).numbers()

    first, told = micro_train(tmp_path / "a", steps=6)
    second, again = micro_train(tmp_path / "b", steps=6)
    third, _ = micro_train(tmp_path / "c", steps=6, log_every=4, evaluate_every=2, evaluate=measure, save_every=3)
    other, _ = micro_train(tmp_path / "d", steps=6, seed=1)
    assert [p.values for p in told] == [p.values for p in again]
    assert torch.equal(weights(first), weights(second)) and torch.equal(weights(first), weights(third))
    assert not torch.equal(weights(first), weights(other))


def test_optimizer_state_keeps_its_types(tmp_path: Path) -> None:
    """FC-052."""
    micro_train(tmp_path)
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None
    assert len(found.optimizer) == 8  # a weight and a bias for each head
    for state in found.optimizer.values():
        assert {k: v.dtype for k, v in state.items()} == dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.float32)


def masked_out(row: Masked) -> Masked:
    return Masked(row.ids, [False] * len(row.ids))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rows_without_labels_weigh_nothing(tmp_path: Path, accumulation: int) -> None:
    """FC-031: one masked row in a batch changes nothing; a masked window leaves weights and optimizer alone."""
    rows = micro_rows(2)
    mixed, told = micro_train(
        tmp_path / "a",
        [rows[0], masked_out(rows[1])],
        steps=1,
        accumulation=accumulation,
        batch_size=1 + (accumulation == 1),
    )
    alone, _ = micro_train(tmp_path / "b", [rows[0]], steps=1, batch_size=1)
    torch.testing.assert_close(weights(mixed), weights(alone), atol=1e-6, rtol=1e-5)
    many = [masked_out(r) for r in micro_rows(8)] + [micro_rows(9)[8]]
    skipping, told = micro_train(tmp_path / "c", many, steps=9, accumulation=accumulation, batch_size=1)
    once, _ = micro_train(tmp_path / "d", many[-1:], steps=1, batch_size=1)
    losses = [p.step for p in told if "loss" in p.values]
    assert len(losses) < 9 and sum(p.values.get("skipped_steps", 0) for p in told) == 9 - len(losses)
    if accumulation == 1:  # the one good window came once: optimizer and weights saw nothing else
        torch.testing.assert_close(weights(skipping), weights(once), atol=1e-6, rtol=1e-5)


def test_a_run_that_could_train_on_nothing_is_no_success(tmp_path: Path) -> None:
    """FC-044: never untrained heads saved as if they were trained."""
    with pytest.raises(ValueError, match="saved untrained"):
        micro_train(tmp_path, [masked_out(r) for r in micro_rows(2)], steps=2)
    assert checkpoint.complete(tmp_path) == []


def reference_gradient(rows: list[Masked], dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradient of the mean over all supervised predictions, depth weights included."""
    target = llama().requires_grad_(False)
    heads = FAMILIES["medusa"].from_target(target)
    batch = online(target, collate(rows, list(range(len(rows)))), [4]).batch
    losses = heads(batch, Tie.of(target), weights=DEFAULTS["weights"])
    (losses.total / losses.count.sum()).backward()
    return torch.cat([p.grad.flatten() for p in heads.parameters() if p.grad is not None])


@pytest.mark.parametrize(("accumulation", "batch_size"), [(1, 4), (2, 2), (4, 1)])
def test_the_gradient_is_that_of_the_mean_over_the_window(tmp_path: Path, accumulation: int, batch_size: int) -> None:
    """A loss scaled by batch, accumulation or process count shows in the norm, which Adam's first step hides."""
    rows = [*micro_rows(3), Masked(list(range(3, 37)), [i >= 4 for i in range(34)])]
    _, told = micro_train(tmp_path, rows, steps=1, accumulation=accumulation, batch_size=batch_size)
    assert told[0].values["gradient_norm"] == pytest.approx(float(reference_gradient(rows).norm()), rel=1e-4)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_precision_of_target_and_heads_trains_and_goes_on(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    """FC-052: heads stay float32, also after a resume in the middle."""
    target = llama().to(dtype).requires_grad_(False)
    plan = Plan(**(DEFAULTS | {"save_every": 2}))
    losses: list[float] = []

    def stop(progress: Progress) -> None:
        losses.append(progress.values["loss"])
        if progress.step == 3 and len(losses) == 3:
            raise InterruptedError

    for expected in ((InterruptedError,), ()):
        heads = FAMILIES["medusa"].from_target(target)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        try:
            train(accelerator, target, heads, Stream(micro_rows(), 2, 0), plan, tmp_path, "d", tell=stop)
        except expected:
            continue
    assert len(losses) == 5 and all(map(math.isfinite, losses))  # steps 1, 2, 3 and, resumed after 2, 3 and 4
    assert losses[3] == pytest.approx(losses[2], rel=1e-5)
    assert {p.dtype for p in heads.parameters()} == {torch.float32}


def broken(target: Any, rows: set[int] | None) -> Any:
    """A target whose hidden states hold NaN for texts that begin with one of these tokens (None = all)."""

    layer = target.model.layers[2]
    seen: dict[str, Tensor] = {}
    target.model.register_forward_pre_hook(lambda m, a, k: seen.update(ids=k["input_ids"]), with_kwargs=True)

    def spoil(module: Any, args: Any, output: Tensor) -> Tensor:
        hit = [rows is None or int(first) in rows for first in seen["ids"][:, 0]]
        spoiled = output.clone()
        spoiled[torch.tensor(hit), 3, 5] = float("nan")
        return spoiled

    layer.register_forward_hook(spoil)
    return target


def test_a_row_with_nan_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FC-043."""
    rows = micro_rows(8)
    target = broken(llama(), {rows[3].ids[0]})
    found = online(target, collate(rows, list(range(8))), [4])
    assert found.bad == [3]
    assert not found.batch.supervised[3].any() and torch.isfinite(found.batch.features).all()
    with caplog.at_level("WARNING"):
        heads, told = micro_train(tmp_path, rows, target, steps=4)
    assert torch.isfinite(weights(heads)).all()
    assert sum(p.values["bad_rows"] for p in told) == 1
    assert "rows [3] of the training set are left out" in caplog.text


def test_when_every_row_is_bad_the_run_stops_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        micro_train(tmp_path, target=broken(llama(), None), steps=40)


def test_modes_and_intervals(tmp_path: Path) -> None:
    """FC-035: heads train in training mode after an evaluation, the target never does; intervals count steps."""
    modes: list[tuple[bool, bool]] = []
    target = llama()

    class Watched(FAMILIES["medusa"]):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            modes.append((self.training, target.training))
            return super().forward(*args, **kwargs)

    heads = Watched.from_target(target)
    told: list[Progress] = []
    plan = Plan(**(DEFAULTS | {"steps": 8, "accumulation": 2, "evaluate_every": 2, "save_every": 4, "keep": 9}))

    def measure(trained: DraftHeads) -> dict[str, float]:
        evaluate(target, trained, [torch.tensor([5, 6, 7])], max_new_tokens=4, nodes=4)
        return {"measured": 1.0}

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train(
        accelerator, target, heads, Stream(micro_rows(), 2, 0), plan, tmp_path, "d", evaluate=measure, tell=told.append
    )
    assert modes == [(True, False)] * 16
    assert [p.step for p in told if "measured" in p.values] == [0, 2, 4, 6, 8]
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["step-000004", "step-000008"]


def test_remembered_features_train_the_same_heads_with_one_forward_a_row(tmp_path: Path) -> None:
    """Rows of different lengths, one of them bad, three epochs."""
    rows = [Masked(r.ids[: 6 + i], r.supervised[: 6 + i]) for i, r in enumerate(micro_rows(6))]
    found = []
    for remember in (False, True):
        forwards: list[int] = []
        target = broken(llama(), {rows[2].ids[0]})
        target.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))
        heads, told = micro_train(tmp_path / str(remember), rows, target, steps=9, remember=remember)
        found.append(weights(heads))
        assert len(forwards) == 9 if not remember else 3 <= len(forwards) < 9
        assert sum(p.values["bad_rows"] for p in told) == 3
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_learning_rate() -> None:
    plan = Plan(**(DEFAULTS | {"steps": 10, "lr": 1.0, "warmup": 0.2}))
    linear = Plan(**(DEFAULTS | {"steps": 10, "lr": 1.0, "warmup": 0.2, "schedule": "linear"}))
    cosine = Plan(**(DEFAULTS | {"steps": 10, "lr": 1.0, "warmup": 0.2, "schedule": "cosine"}))
    assert [learning_rate(s, plan) for s in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    assert [learning_rate(s, linear) for s in (2, 6, 10)] == [1.0, 0.5, 0.0]
    assert learning_rate(6, cosine) == pytest.approx(0.5) and learning_rate(10, cosine) == pytest.approx(0.0)


def test_features_of_a_padded_batch_are_those_of_each_row_alone() -> None:
    target = llama()
    rows = [Masked(list(range(3, 3 + n)), [True] * n) for n in (4, 9, 6)]
    batch = online(target, collate(rows, [0, 1, 2]), [2, 4]).batch
    for b, row in enumerate(rows):
        with torch.no_grad():
            hidden = target(torch.tensor([row.ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[2][0], hidden[4][0]], -1)
        torch.testing.assert_close(batch.features[b, : len(row.ids)], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(batch.last[b, : len(row.ids)], hidden[4][0], atol=1e-5, rtol=1e-5)


def toy_run(folder: Path, more: str) -> None:
    """A toy target, eight chats, a prompt, and a recipe r.yaml with ``more`` in it."""
    from tests.byte_tokenizer import byte_tokenizer

    llama().save_pretrained(folder / "toy")
    byte_tokenizer().save_pretrained(folder / "toy")
    chats = [{"id": f"r{i}", "prompt": f"say {i}", "answer": "abcdefgh" * 3} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(c) for c in chats))
    (folder / "held.jsonl").write_text(json.dumps({"id": "h", "messages": [{"role": "user", "content": "say 99"}]}))
    (folder / "r.yaml").write_text(
        f"target: {folder / 'toy'}\nout: {folder / 'out'}\n"
        "data: {train: [rows.jsonl], heldout: [held.jsonl]}\nheads: {draft_vocab_size: 64}\n"
        f"evaluate: {{max_new_tokens: 8}}\n{more}"
    )


def test_launching_with_accelerate_trains_saves_and_logs(tmp_path: Path) -> None:
    """The command as users type it, on a toy: heads, a log with falling loss, W&B offline, and evaluation lines."""
    toy_run(
        tmp_path,
        "optim: {epochs: 8, batch_size: 4, lr: 3e-3, precision: fp32}\nevery: {log: 4, evaluate: 8}\n"
        "wandb: {project: toys, mode: offline}\n",
    )
    command = [
        "accelerate",
        "launch",
        "--cpu",
        "--num_processes",
        "1",
        "-m",
        "headstart.train",
        str(tmp_path / "r.yaml"),
    ]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "WANDB_SILENT": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0]
    assert [line["step"] for line in log if "tokens_per_pass" in line] == [0, 8, 16]
    assert "draft vocabulary: 64 of 320" in done.stderr and "tokens per pass" in done.stderr
    from headstart.heads import load_heads

    assert load_heads(str(tmp_path / "out" / "heads")).config.target_name == "toy"
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*"))


def exploding(at: range) -> Any:
    """Medusa whose loss is infinite in these calls."""

    class Exploding(FAMILIES["medusa"]):  # type: ignore[misc]
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            losses = super().forward(*args, **kwargs)
            Exploding.calls += 1
            return losses._replace(total=losses.total * float("inf")) if Exploding.calls in at else losses

    return Exploding.from_target(llama().requires_grad_(False))


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    heads, told = micro_train(tmp_path, heads=exploding(range(2, 3)))
    assert torch.isfinite(weights(heads)).all()
    assert [p.values.get("skipped_steps") for p in told] == [None, 1.0, None, None]


def test_a_run_whose_gradients_stay_infinite_stops_with_the_reason(tmp_path: Path) -> None:
    """After the limit in a row: nineteen in a row, a good step and nineteen more do not end it."""
    with pytest.raises(ValueError, match=r"20 windows in a row .* the gradient is NaN or infinite: try"):
        micro_train(tmp_path / "a", heads=exploding(range(3, 99)), steps=BAD_LIMIT + 2)

    class Twice:
        def __contains__(self, call: int) -> bool:
            return call % BAD_LIMIT != 0

    _, told = micro_train(tmp_path / "b", heads=exploding(Twice()), steps=2 * BAD_LIMIT)  # type: ignore[arg-type]
    assert sum(p.values.get("skipped_steps", 0) for p in told) == 2 * BAD_LIMIT - 2


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle", "eagle3", "eagle3.1"])
@pytest.mark.parametrize("depths", [2, 3])
def test_activation_checkpointing_gives_the_same_gradient(name: str, depths: int) -> None:
    """FC-040: no error in backward, and less that is kept for it."""
    target = llama().requires_grad_(False)
    tie, found, kept = Tie.of(target), [], []
    for recompute in (False, True):
        heads = disturbed(KINDS[name].make(target, depths)).train()
        if recompute:
            heads.activation_checkpointing_enable()
        batch = documents(heads)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            total = heads(batch, tie, weights=[1.0] * depths).total
        total.backward()
        found.append(torch.cat([p.grad.flatten() for p in heads.parameters() if p.grad is not None]))
        kept.append(sum(saved))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-6)
    assert found[0].abs().max() > 0 and kept[1] < kept[0]


def test_recomputing_trains_the_same_heads(tmp_path: Path) -> None:
    plain, _ = micro_train(tmp_path / "a")
    again, _ = micro_train(tmp_path / "b", recompute=True)
    assert again.is_activation_checkpointing
    torch.testing.assert_close(weights(plain), weights(again), atol=1e-6, rtol=1e-6)


def test_a_compiled_loss_trains_the_same_heads(tmp_path: Path) -> None:
    """Through torch's compiler but for the last step to machine code; evaluation and checkpoints are as without it."""
    rows = [Masked(r.ids[: 6 + i], r.supervised[: 6 + i]) for i, r in enumerate(micro_rows(6))]
    eager, told = micro_train(tmp_path / "a", rows)
    torch._dynamo.reset()
    compiled, again = micro_train(tmp_path / "b", rows, backend="aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    torch.testing.assert_close(weights(eager), weights(compiled), atol=1e-5, rtol=1e-4)
    assert [p.values["loss"] for p in told] == pytest.approx([p.values["loss"] for p in again], rel=1e-5)


def test_a_window_that_does_not_come_out_even_is_the_same_window(tmp_path: Path) -> None:
    """Three batches a step on one process that has room for four, as where a run goes on with other processes."""
    three, told = micro_train(tmp_path / "a", accumulation=3)
    four, again = micro_train(tmp_path / "b", accumulation=4, window=3)
    torch.testing.assert_close(weights(three), weights(four), atol=1e-7, rtol=1e-6)
    assert [p.values["loss"] for p in told] == pytest.approx([p.values["loss"] for p in again], rel=1e-6)


def test_the_best_evaluation_between_two_saves_is_kept(tmp_path: Path) -> None:
    """FC-055: evaluated every 3, saved every 4, best at 6; what a run goes on from is the newest all the same."""
    scores = iter((9.0, 1.0, 3.0, 2.0, 1.5))  # at step 0 there is nothing to keep yet
    options: dict[str, Any] = {"steps": 12, "evaluate_every": 3, "save_every": 4}
    micro_train(tmp_path, evaluate=lambda heads: {"tokens_per_pass": next(scores)}, **options)
    best = checkpoint.best(tmp_path)
    assert best is not None and (best[0].name, best[1]) == ("step-000006", 3.0)
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["step-000006", "step-000008", "step-000012"]
    found = checkpoint.latest(tmp_path, "d")
    assert found is not None and found.step == 12


def test_an_accumulation_of_the_launcher_that_is_not_the_recipes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"accelerate accumulates 3 .* the recipe 1: remove it there"):
        micro_train(tmp_path, accelerator=Accelerator(cpu=True, gradient_accumulation_steps=3))
