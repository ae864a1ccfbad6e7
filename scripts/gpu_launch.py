"""The launch of `scripts/gpu-check`: a tiny EAGLE-3 run as one process of `accelerate launch` under FSDP2."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from time import perf_counter
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # says something definite
}
STEPS = 6
LIMIT = 120.0  # seconds
SHARDS = "torch.distributed.fsdp.fully_shard"  # what torch says, where it is asked to, of parameters that are sharded
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
RECIPE = """
target: {target}
out: {out}
heads: {{family: eagle3, num_draft_heads: 2, unroll: 2}}
data: {{train: [rows.jsonl], max_length: 128}}
optim: {{lr: 1.0e-3, batch_size: 4, max_steps: {steps}, precision: fp32}}
every: {{log: 1}}
"""


def fsdp_launch(folder: Path, device: str) -> dict[str, Any]:
    """Trains in a new ``folder``, and loads the heads again. Raises RuntimeError with the end of what the launcher said
    where it failed or did not train."""
    from headstart.heads import load_heads

    target, out = folder / "target", folder / "run"
    write_target(target)
    words = [" ".join(f"{i * k} times {k}" for k in range(1, 5)) for i in range(24)]
    rows = [{"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w[::-1]}]} for w in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = RECIPE.format(target=json.dumps(str(target)), out=json.dumps(str(out)), steps=STEPS)
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    began = perf_counter()
    with launcher(device) as (config, environment):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--num_processes", "1", "--main_process_port", "0", "-m", "headstart.train"]
        command += [str(folder / "recipe.yaml"), "resume=false"]
        said = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False
        )
    if said.returncode:
        raise RuntimeError(f"accelerate launch ended with {said.returncode}: {(said.stdout + said.stderr)[-2000:]}")
    if SHARDS not in said.stderr:
        raise RuntimeError(f"accelerate launch trained, but not under FSDP2: {said.stderr[-2000:]}")
    log = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    load_heads(str(out / "heads"))
    return {"config": config.name, "seconds": perf_counter() - began, "losses": losses}


def write_target(folder: Path) -> None:
    """A random Llama with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, vocab_size=len(vocab), pad_token_id=0, bos_token_id=1, eos_token_id=2)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def launcher(device: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """The configuration of FSDP2 for this ``device``, and the environment it wants."""
    on_cpu = device.startswith("cpu")
    environment = (
        os.environ
        | {"HF_HUB_OFFLINE": "1", "PYTORCH_API_USAGE_STDERR": "1"}
        | ({"ACCELERATE_USE_CPU": "true"} if on_cpu else {})
    )
    name = f"accelerate-{'cpu' if on_cpu else '8gpu'}-fsdp2.yaml"
    with as_file(files("headstart.recipes") / name) as config:
        yield config, environment
