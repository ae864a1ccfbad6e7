"""Medusa-2: heads and a LoRA on the target learn together; what is written then is the adapted target's text."""

from __future__ import annotations

import copy
import json
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
from peft import PeftModel
from torch import Tensor

from headstart.heads import FAMILIES, DraftHeads, Tie, load_heads
from headstart.heads.adapter import digest, lora_tensors
from headstart.heads.losses import soft_cross_entropy
from headstart.infer.speculator import Speculator
from headstart.train import checkpoint, joint
from headstart.train.__main__ import run
from headstart.train.batches import Stream, collate
from headstart.train.evaluate import validate
from headstart.train.joint import Joint, before_and_after, join, perplexity, start_heads
from headstart.train.loop import Plan, Progress, train, weights_at
from headstart.train.masking import Masked
from headstart.train.recipe_file import load_recipe
from tests.byte_tokenizer import byte_tokenizer
from tests.test_loop import DEFAULTS, broken, masked_out, micro_rows
from tests.toys import gpt2, llama

WEIGHTS = (0.5, 0.4, 0.3, 0.2)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the life of a process; every test begins without one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def made(target: Any = None, family: str = "medusa", moved: bool = False, **lora: Any) -> Joint:
    """Fresh heads and a fresh LoRA on T0; ``moved`` gives both weights that do something."""
    target = (target or llama()).requires_grad_(False)
    heads = FAMILIES[family].from_target(target)
    model = join(target, heads, **({"rank": 4, "alpha": 8, "dropout": 0.0, "modules": None, "seed": 0} | lora))
    if moved:
        torch.manual_seed(3)
        with torch.no_grad():
            for p in [*model.adapter_parameters(), *heads.parameters()]:
                p.add_(0.05 * torch.randn_like(p))
    return model


def trained(out: Path, model: Joint, rows: list[Masked] | None = None, batch_size: int = 2, **changes: Any) -> Any:
    """Four steps; what was told. ``stop`` interrupts after that step was told of."""
    told: list[Progress] = []
    stop = changes.pop("stop", None)
    torch.manual_seed(changes.pop("seed", 0))

    def tell(progress: Progress) -> None:
        told.append(progress)
        if progress.step == stop:
            raise InterruptedError

    evaluate = changes.pop("evaluate", None)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=changes.get("accumulation", 1),
        mixed_precision=changes.pop("precision", "no"),
    )
    plan = Plan(**(DEFAULTS | {"scale": 0.1, "rise": "sine", "adapter_lr": 1e-2} | changes))
    stream = Stream(micro_rows() if rows is None else rows, batch_size, 0)
    train(accelerator, model.target, model, stream, plan, out, "d", tell=tell, evaluate=evaluate)
    return told


def learnt(model: Joint) -> Tensor:
    """All that is trained, in one row."""
    return torch.cat([p.detach().flatten() for p in [*model.heads.parameters(), *model.adapter_parameters()]])


def base_weights(model: Any) -> dict[str, Tensor]:
    """What stands below the adapter, by the names of the bare target."""
    return {
        name.replace("base_layer.", ""): p.detach()
        for name, p in model.get_base_model().named_parameters()
        if "lora_" not in name
    }


def same_weights(model: Any, target: Any) -> bool:
    found, expected = base_weights(model), dict(target.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


# the loss -----------------------------------------------------------------------------------------------------------


def hidden_states(model: Any, ids: list[int], adapted: bool) -> Tensor:
    """[T, H] after the final norm, of one row alone."""
    inputs = {"input_ids": torch.tensor([ids]), "output_hidden_states": True}
    if adapted:
        return model.target(**inputs).hidden_states[-1][0]  # type: ignore[no-any-return]
    with model.target.disable_adapter(), torch.no_grad():
        return model.target(**inputs).hidden_states[-1][0]  # type: ignore[no-any-return]


def reference(model: Joint, rows: list[Masked], tie: Tie) -> tuple[Tensor, Tensor]:
    """Row by row and token by token: the summed loss, and the summed KL in it."""
    total, kl = torch.zeros(()), torch.zeros(())
    for row in rows:
        adapted, original = (hidden_states(model, row.ids, on) for on in (True, False))
        for s in range(1, len(row.ids)):
            if not row.supervised[s]:
                continue
            p, q = (torch.log_softmax(tie.unembed(x[s - 1]), -1) for x in (original, adapted))
            kl = kl + (p.exp() * (p - q)).sum()
            for d, weight in enumerate(WEIGHTS):
                if s - 2 - d >= 0:
                    guess = tie.unembed(model.heads.blocks[d](adapted[s - 2 - d]))
                    total = total + weight * soft_cross_entropy(p.exp()[None], guess[None]).sum()
    return total + kl, kl


def test_the_loss_is_that_of_a_slow_reference_and_so_are_its_gradients() -> None:
    """Rows of different lengths, one of them without a label."""
    rows = [Masked(r.ids[:n], r.supervised[:n]) for r, n in zip(micro_rows(4), (12, 7, 10, 9), strict=True)]
    rows[2] = masked_out(rows[2])
    found, expected = (made(llama().double(), moved=True).double() for _ in range(2))
    tie = Tie.of(found.target)
    batch = found.original(collate(rows, [0, 1, 2, 3])).batch
    losses = found(batch, tie, weights=WEIGHTS)
    total, kl = reference(expected, rows, Tie.of(expected.target))
    torch.testing.assert_close(losses.total.double(), total.double(), rtol=1e-5, atol=1e-5)
    assert losses.target is not None
    torch.testing.assert_close(losses.target[0].double(), kl.detach().double(), rtol=1e-4, atol=1e-5)
    assert losses.target[1] == sum(sum(r.supervised) for r in rows) == found.count(batch.supervised, batch.document)
    losses.total.backward()
    total.backward()
    for (name, p), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (other.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_lora_and_every_head_and_nothing_else() -> None:
    model = made(moved=True)
    batch = model.original(collate(micro_rows(2), [0, 1])).batch
    model(batch, Tie.of(model.target), weights=WEIGHTS).total.backward()
    for name, p in model.named_parameters():
        ours = name.startswith("heads.") or "lora_" in name
        assert p.requires_grad == ours, name
        assert (p.grad is not None and bool(p.grad.abs().sum() > 0)) == ours, name
    assert not batch.last.requires_grad


def test_before_the_first_step_only_the_heads_pull_at_the_target() -> None:
    """A fresh LoRA changes nothing, so that KL is zero and at its least: the heads' gradient is the adapter's."""
    pulls = []
    for weights in ((0.0,) * 4, WEIGHTS):
        model = made()
        batch = model.original(collate(micro_rows(2), [0, 1])).batch
        losses = model(batch, Tie.of(model.target), weights=weights)
        losses.total.backward()
        assert losses.target[0].abs() < 1e-4
        pulls.append(sum(float(p.grad.norm()) for p in model.adapter_parameters()))
    assert pulls[0] < 1e-4 < 1e-2 < pulls[1]


def test_chunks_of_rows_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (joint.CHUNK_ELEMENTS, 320 * 3):
        monkeypatch.setattr(joint, "CHUNK_ELEMENTS", size)
        model = made(moved=True)
        batch = model.original(collate(micro_rows(2), [0, 1])).batch
        total = model(batch, Tie.of(model.target), weights=WEIGHTS).total
        total.backward()
        found.append(torch.cat([total.detach()[None], *(p.grad.flatten() for p in model.adapter_parameters())]))
        measured = perplexity(model.target, micro_rows(4))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    assert perplexity(model.target, micro_rows(4)) == pytest.approx(measured)


def test_the_weight_of_the_heads_rises_as_it_is_told_to() -> None:
    plans = {rise: Plan(**(DEFAULTS | {"steps": 4, "scale": 0.5, "rise": rise})) for rise in joint.RISES}
    assert [weights_at(s, plans["linear"])[0] for s in range(4)] == [0.125, 0.25, 0.375, 0.5]
    assert [weights_at(s, plans["constant"])[1] for s in (0, 3)] == [0.4, 0.4]
    assert [weights_at(s, plans["sine"])[0] for s in (1, 3)] == pytest.approx([0.5 * 0.5**0.5, 0.5])
    assert weights_at(0, plans["sine"])[0] > 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_learns_with_its_target(tmp_path: Path, family: str) -> None:
    model = made(family=family)
    start = learnt(model).clone()
    told = trained(tmp_path, model, steps=2, weights=DEFAULTS["weights"][: model.heads.trained_depths])
    assert not torch.equal(learnt(model), start) and torch.isfinite(learnt(model)).all()
    assert all(p.values["target_kl"] >= -1e-6 and p.values["loss"] > 0 for p in told)


# what is adapted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "model.embed_tokens"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_and_the_embedding_are_refused(name: str, tied: bool) -> None:
    with pytest.raises(ValueError, match=rf"names '{name}'.*choose among \['down_proj', .*'v_proj'\]"):
        made(llama(tie_word_embeddings=tied), modules=["q_proj", name])


def test_modules_a_target_lacks_are_named() -> None:
    with pytest.raises(ValueError, match=r"names 'qproj', which LlamaForCausalLM lacks; it has \['down_proj'"):
        made(modules=["qproj"])
    with pytest.raises(ValueError, match=r"names 'wte'.*choose among \['c_attn', 'c_fc', 'c_proj'\]"):
        made(gpt2(), modules=["c_attn", "wte"])


@pytest.mark.parametrize("target", [llama, gpt2, lambda: llama(tie_word_embeddings=True)])
def test_every_linear_layer_but_the_output_is_adapted_when_nothing_is_said(target: Any) -> None:
    model = made(target())
    names = {name.split(".lora_")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_" in name}
    layers = {"c_attn", "c_proj", "c_fc"}
    if target is not gpt2:
        layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == layers
    assert len({name for name, _ in model.named_parameters() if "lora_A" in name}) == 4 * (4 if target is gpt2 else 7)


def test_heads_of_another_target_are_refused() -> None:
    heads = FAMILIES["medusa"].from_target(llama(seed=1))
    with pytest.raises(ValueError, match=r"joint\.heads: .*other weights.*Name heads that were trained on this one"):
        join(llama(), heads, rank=4, alpha=8, dropout=0.0, modules=None, seed=0)


def test_a_folder_without_heads_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no heads; .*train them first"):
        start_heads(str(tmp_path))


# the loop -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    """With dropout in the adapter, so that the random state counts; stopped in the middle of an epoch."""
    options: dict[str, Any] = {"steps": 9, "schedule": "cosine", "save_every": 3}
    whole, half, resumed = (made(dropout=0.2) for _ in range(3))
    told = trained(tmp_path / "whole", whole, micro_rows(10), **options)
    with pytest.raises(InterruptedError):
        trained(tmp_path / "half", half, micro_rows(10), stop=5, **options)
    again = trained(tmp_path / "half", resumed, micro_rows(10), seed=99, **options)
    assert [p.step for p in again] == [4, 5, 6, 7, 8, 9]
    assert torch.equal(learnt(whole), learnt(resumed))
    assert [p.values for p in told[3:]] == [p.values for p in again]
    folder = checkpoint.complete(tmp_path / "half")[-1]
    assert {f.name for f in folder.iterdir()} == {"adapter", "heads", "state.json", "state.pt"}
    assert load_heads(str(folder / "heads")).config.adapter == digest(*lora_tensors(resumed.target).values())


def test_the_target_is_in_eval_mode_and_only_the_adapter_drops() -> None:
    model = made(gpt2(), dropout=0.5).train()
    modes = {name: m.training for name, m in model.target.named_modules()}
    assert {on for name, on in modes.items() if "lora_dropout" in name} == {True}
    assert not any(on for name, on in modes.items() if "lora_dropout" not in name)
    assert model.heads.training
    assert not any(m.training for m in model.eval().modules())


def test_evaluation_and_its_intervals_change_nothing_that_is_learnt(tmp_path: Path) -> None:
    """Measured with the adapter's dropout off, in the middle of training with it on."""
    plain, watched = made(dropout=0.2), made(dropout=0.2)
    modes: list[bool] = []

    def measure(heads: DraftHeads) -> dict[str, float]:
        modes.append(any(m.training for m in watched.modules()))
        return {"perplexity": perplexity(watched.target, micro_rows(2))}

    trained(tmp_path / "a", plain)
    trained(tmp_path / "b", watched, evaluate=measure, evaluate_every=2, save_every=1)
    assert modes == [False] * 3 and torch.equal(learnt(plain), learnt(watched))


def test_the_adapter_learns_at_its_own_rate(tmp_path: Path) -> None:
    """Adam's first step moves every weight that has a gradient by the rate itself."""
    model = made(moved=True)
    start = [p.detach().clone() for p in (*model.heads.parameters(), *model.adapter_parameters())]
    trained(tmp_path, model, steps=1, lr=1e-3, adapter_lr=4e-3, scale=1.0)
    both = zip((*model.heads.parameters(), *model.adapter_parameters()), start, strict=True)
    moved = [float((p.detach() - q).abs().max()) for p, q in both]
    heads = len(list(model.heads.parameters()))
    assert moved[:heads] == pytest.approx([1e-3] * heads, rel=0.02)
    assert moved[heads:] == pytest.approx([4e-3] * (len(moved) - heads), rel=0.02)


@pytest.mark.parametrize(("accumulation", "batch_size"), [(2, 2), (4, 1)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path, accumulation: int, batch_size: int) -> None:
    """Also over micro-batches without a label."""
    rows = [*micro_rows(2), masked_out(micro_rows(3)[2]), Masked(list(range(3, 37)), [i >= 4 for i in range(34)])]
    norms = []
    for name, changes in (("a", {"batch_size": 4}), ("b", {"accumulation": accumulation, "batch_size": batch_size})):
        told = trained(tmp_path / name, made(moved=True), rows, steps=1, **changes)
        norms.append((told[0].values["gradient_norm"], told[0].values["target_kl"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_row_with_nan_is_left_out_and_reaches_no_gradient(tmp_path: Path) -> None:
    rows = micro_rows(4)
    model = made(broken(llama(), {rows[3].ids[0]}))
    told = trained(tmp_path, model, rows, steps=2)
    assert sum(p.values["bad_rows"] for p in told) == 1 and not any("skipped_steps" in p.values for p in told)
    assert torch.isfinite(learnt(model)).all()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_bfloat16_target_learns_in_a_float32_adapter(tmp_path: Path, precision: str) -> None:
    model = made(llama().bfloat16())
    told = trained(tmp_path, model, precision=precision)
    assert {p.dtype for p in (*model.adapter_parameters(), *model.heads.parameters())} == {torch.float32}
    assert torch.isfinite(learnt(model)).all() and abs(told[0].values["target_kl"]) < 1e-4


def test_two_processes_give_the_run_of_one_with_twice_the_accumulation(tmp_path: Path) -> None:
    """Also where all rows of one rank are masked: its parameters still take part."""
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "tests.test_joint", str(tmp_path)]
    done = subprocess.run(launch, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(2)]
    assert torch.equal(ranks[0], ranks[1])
    single = made()
    trained(tmp_path / "one", single, two_rank_rows(), steps=2, accumulation=2)
    torch.testing.assert_close(ranks[0], learnt(single), atol=2e-6, rtol=1e-5)


def two_rank_rows() -> list[Masked]:
    """Rank 1 finds no label in its first batch."""
    rows = micro_rows(8)
    return [masked_out(r) if i in Stream(rows, 2, 0)[1].rows else r for i, r in enumerate(rows)]


def two_ranks(out: Path) -> None:
    """Run by two processes at once."""
    model = made()
    trained(out, model, two_rank_rows(), steps=2)
    torch.save(learnt(model), out / f"rank{torch.distributed.get_rank()}.pt")


# the target ---------------------------------------------------------------------------------------------------------


def test_perplexity_is_that_of_a_plain_forward() -> None:
    target, rows = llama(), [Masked(r.ids[: 6 + i], r.supervised[: 6 + i]) for i, r in enumerate(micro_rows(5))]
    lost, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            law = torch.log_softmax(target(torch.tensor([row.ids])).logits[0], -1)
        lost -= sum(float(law[s - 1, row.ids[s]]) for s in range(1, len(row.ids)) if row.supervised[s])
        count += sum(row.supervised)
    assert perplexity(target, rows, batch_size=2) == pytest.approx(float(torch.tensor(lost / count).exp()), rel=1e-4)
    model = made(moved=True)
    before, after = before_and_after(model, rows)
    assert before == pytest.approx(perplexity(llama(), rows)) and after == pytest.approx(perplexity(model.target, rows))
    assert before != pytest.approx(after, rel=1e-3)


def test_joint_training_makes_the_target_easier_to_guess(tmp_path: Path) -> None:
    """Overfitting four rows: as many further steps of the heads alone teach them less, as the features stay."""
    rows, target = micro_rows(4, 16), llama().requires_grad_(False)

    def alone(heads: DraftHeads, out: Path, lr: float) -> DraftHeads:
        AcceleratorState._reset_state(reset_partial_state=True)
        train(
            Accelerator(cpu=True),
            target,
            heads,
            Stream(rows, 4, 0),
            Plan(**(DEFAULTS | {"steps": 60, "lr": lr})),
            out,
            "d",
        )
        return heads

    heads = alone(FAMILIES["medusa"].from_target(target), tmp_path / "first", 3e-3)
    further = validate(target, alone(copy.deepcopy(heads), tmp_path / "further", 1e-3), rows)
    AcceleratorState._reset_state(reset_partial_state=True)
    model = join(target, heads, rank=8, alpha=16, dropout=0.0, modules=None, seed=0)
    told = trained(
        tmp_path / "joint", model, rows, 4, steps=60, lr=1e-3, adapter_lr=5e-3, scale=0.3, rise="linear", log_every=10
    )
    then = validate(model.eval().target, model.heads, rows)
    assert told[-1].values["loss"] < told[0].values["loss"] - 0.2
    assert sum(then.accuracy) > sum(further.accuracy) + 0.2
    assert told[-1].values["target_kl"] < 0.2


# the command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target, and heads that were trained on it first."""
    root = tmp_path_factory.mktemp("medusa2")
    llama(tie_word_embeddings=True).save_pretrained(root / "toy")
    byte_tokenizer().save_pretrained(root / "toy")
    chats = [{"id": f"r{i}", "prompt": f"say {i}", "answer": "abcdefgh" * 3} for i in range(8)]
    (root / "rows.jsonl").write_text("\n".join(json.dumps(c) for c in chats))
    (root / "held.jsonl").write_text(json.dumps({"id": "h", "messages": [{"role": "user", "content": "say 99"}]}))
    common = (
        f"target: {root / 'toy'}\ndata: {{train: [rows.jsonl], heldout: [held.jsonl]}}\n"
        "optim: {epochs: 4, batch_size: 4, lr: 3e-3, precision: fp32}\n"
        "every: {log: 2, evaluate: 4}\nevaluate: {max_new_tokens: 8}\n"
    )
    (root / "first.yaml").write_text(f"{common}out: {root / 'first'}\nheads: {{draft_vocab_size: 64}}\n")
    (root / "both.yaml").write_text(
        f"{common}out: {root / 'both'}\njoint: {{heads: {root / 'first' / 'heads'}, rank: 4, lr: 3e-2, scale: 1.0}}\n"
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    run(load_recipe(root / "first.yaml"))
    return root


@pytest.fixture(scope="module")
def result(folder: Path) -> tuple[Path, str]:
    """The out folder of the joint run, and what it said on the terminal."""
    import contextlib
    import io

    AcceleratorState._reset_state(reset_partial_state=True)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        heads = run(load_recipe(folder / "both.yaml"))
    assert heads == folder / "both" / "heads"
    return folder / "both", said.getvalue()


PROMPT = torch.tensor([[1, 40, 50, 60, 70]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


def toy(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "toy").eval()


def test_a_run_saves_both_and_tells_what_became_of_the_target(folder: Path, result: tuple[Path, str]) -> None:
    out, said = result
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    measured = [line["target_perplexity"] for line in log if "target_perplexity" in line]
    assert len(measured) == 3 and measured[-1] != measured[0]
    assert all("target_kl" in line for line in log if "loss" in line)
    assert f"8 rows it was trained on: {measured[0]:.3f} before, {measured[-1]:.3f} after" in said
    assert "lossless now means the text of the adapted target" in said and str(out / "adapter") in said
    assert {f.name for f in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert str(folder) not in (out / "adapter" / "adapter_config.json").read_text()
    heads = load_heads(str(out / "heads"))
    assert heads.config.adapter and heads.config.draft_vocab_size == 64
    before = load_heads(str(folder / "first" / "heads"))
    assert before.config.adapter is None and heads.config.target_fingerprint == before.config.target_fingerprint


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("sample", [False, True])
def test_what_is_decoded_is_the_adapted_targets_own_text(
    folder: Path, result: tuple[Path, str], merged: bool, sample: bool
) -> None:
    out, _ = result
    plain, target = toy(folder), PeftModel.from_pretrained(toy(folder), out / "adapter").eval()
    assert same_weights(target, plain)
    model = (target.merge_and_unload() if merged else target).double()
    options = GREEDY | {"do_sample": sample}
    texts = []
    for decode in (model.generate, Speculator(model, load_heads(str(out / "heads")).double()).generate):
        torch.manual_seed(5)
        texts.append(decode(input_ids=PROMPT, **options).tolist())
    assert texts[0] == texts[1]
    if not sample:
        assert texts[0] != plain.double().generate(input_ids=PROMPT, **options).tolist()


def test_heads_say_which_target_they_go_with(folder: Path, result: tuple[Path, str]) -> None:
    out, _ = result
    heads = load_heads(str(out / "heads"))
    carried = PeftModel.from_pretrained(toy(folder), out / "adapter").eval()
    assert Speculator(carried, heads).notes == []
    assert heads.check_target(carried) == heads.check_target(carried.bfloat16()) == []
    assert "carries none, unless it was merged" in Speculator(toy(folder), heads).notes[0]
    other = made(toy(folder)).target
    assert "carries another one" in heads.check_target(other)[0]
    assert load_heads(str(folder / "first" / "heads")).check_target(other) == []


def test_training_leaves_the_weights_below_the_adapter_alone(folder: Path, tmp_path: Path) -> None:
    model = made(toy(folder))
    trained(tmp_path, model)
    assert same_weights(model.target, toy(folder))
    with model.target.disable_adapter():
        text = model.target.generate(input_ids=PROMPT, **GREEDY)
    assert torch.equal(text, toy(folder).generate(PROMPT, **GREEDY))


def test_a_finished_run_is_not_trained_again_and_other_first_heads_are_another_run(
    folder: Path, result: tuple[Path, str], tmp_path: Path
) -> None:
    out, _ = result
    before = {f.name: f.read_bytes() for f in (out / "adapter").iterdir() if f.suffix == ".safetensors"}
    steps = len((out / "log.jsonl").read_text().splitlines())
    run(load_recipe(folder / "both.yaml"))
    assert before == {f.name: f.read_bytes() for f in (out / "adapter").iterdir() if f.suffix == ".safetensors"}
    assert len((out / "log.jsonl").read_text().splitlines()) == steps
    heads = load_heads(str(folder / "first" / "heads"))
    with torch.no_grad():
        next(heads.parameters()).add_(1.0)
    heads.save_pretrained(tmp_path / "others")
    with pytest.raises(ValueError, match="another recipe"):
        run(load_recipe(folder / "both.yaml", [f"joint.heads={tmp_path / 'others'}"]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.remember=true", r"data\.remember and data\.cache keep features of a frozen target"),
        ("data.cache=kept", r"data\.remember and data\.cache keep features of a frozen target"),
        ("optim.fit_batches=4", r"optim\.fit_batches would solve anew"),
        ("heads.num_draft_heads=3", r"the heads are those of joint\.heads.*drop section heads"),
        ("joint.ranks=4", r"joint\.ranks: unknown key; known here are \['alpha', 'dropout', 'heads'"),
        ("joint.schedule=cosine", r"'sine', 'linear' or 'constant'.*'cosine'"),
        ("joint={rank: 4}", r"joint\.heads: Field required"),
    ],
)
def test_recipes_that_ask_for_what_cannot_be_are_refused(folder: Path, override: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_recipe(folder / "both.yaml", [override])


def test_missing_first_heads_are_told_before_the_target_is_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train them first"):
        run(load_recipe(folder / "both.yaml", ["target=no/such", f"joint.heads={tmp_path}", f"out={tmp_path / 'o'}"]))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
