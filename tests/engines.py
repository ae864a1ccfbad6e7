"""What serving engines compute from an exported folder, in plain torch: written from their layouts, not from our code.

Each reads config.json and the tensors as its engine does, takes the target's features where its engine takes them (by
hooks on the decoder layers, not from ``hidden_states``), and drafts one greedy chain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu, softmax


def rms(x: Tensor, gains: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gains


def turned(x: Tensor, places: Tensor, base: float) -> Tensor:
    """[n, h, c] by rotary positions [n]: channel i is turned with channel i + c / 2."""
    half = x.shape[-1] // 2
    angle = places[:, None].to(x.dtype) * base ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Taps:
    """A target run once over ids [T]: the residual stream entering each layer, [n + 1] with what leaves the last one,
    and the last hidden state after the final norm."""

    def __init__(self, target: Any, ids: Tensor) -> None:
        self.entering: list[Tensor] = []
        decoder = target.model
        hooks = [layer.register_forward_pre_hook(self._tap, with_kwargs=True) for layer in decoder.layers]
        hooks.append(decoder.norm.register_forward_pre_hook(self._tap, with_kwargs=True))
        with torch.no_grad():
            self.last = decoder(ids[None]).last_hidden_state[0]
        for hook in hooks:
            hook.remove()

    def _tap(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entering.append((args[0] if args else kwargs["hidden_states"])[0].clone())


class Folder:
    """config.json and tensors in float64."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        file = next(folder.glob("*.safetensors"))
        self.tensors = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()
        }


class Layer:
    """One Llama layer with a cache, as the drafts of EAGLE run it."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, config: dict[str, Any]) -> None:
        self.tensors, self.prefix, self.config = tensors, prefix, config
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.places = torch.zeros(0, dtype=torch.int64)

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.tensors[f"{self.prefix}.{name}.weight"].T
        if self.config.get("attention_bias") and "self_attn" in name:
            out = out + self.tensors[f"{self.prefix}.{name}.bias"]
        return out

    def __call__(self, x: Tensor, residual: Tensor, places: Tensor) -> Tensor:
        """What attention reads [n, W], residual [n, H], positions [n] -> [n, H]; causal by position."""
        channels, base = self.config["head_dim"], self.config["rope_theta"]
        q = turned(self.linear("self_attn.q_proj", x).view(len(x), -1, channels), places, base)
        k = turned(self.linear("self_attn.k_proj", x).view(len(x), -1, channels), places, base)
        v = self.linear("self_attn.v_proj", x).view(len(x), -1, channels)
        self.keys = k if self.keys is None else torch.cat([self.keys, k])
        self.values = v if self.values is None else torch.cat([self.values, v])
        self.places = torch.cat([self.places, places])
        shared = q.shape[1] // k.shape[1]
        keys, values = (part.repeat_interleave(shared, 1) for part in (self.keys, self.values))
        scores = torch.einsum("nhc,mhc->hnm", q, keys) / math.sqrt(channels)
        scores = scores.masked_fill(self.places[None, None] > places[None, :, None], -math.inf)
        found = torch.einsum("hnm,mhc->nhc", softmax(scores, -1), values).flatten(1)
        hidden = residual + self.linear("self_attn.o_proj", found)
        gains = self.tensors[f"{self.prefix}.post_attention_layernorm.weight"]
        normed = rms(hidden, gains, self.config["rms_norm_eps"])
        gate, up = self.linear("mlp.gate_proj", normed), self.linear("mlp.up_proj", normed)
        return hidden + self.linear("mlp.down_proj", silu(gate) * up)


def eagle3(folder: Path, target: Any, ids: Tensor, depth: int, engine: str) -> list[int]:
    """vLLM (speculators format, or the flat one), SGLang, SafeAILab. ids [T + 1]: the last one is what was sampled."""
    files = Folder(folder)
    config, tensors = files.config, files.tensors
    described = config.get("transformer_layer_config", config)
    taps, layers = Taps(target, ids[:-1]), target.config.num_hidden_layers
    if engine == "vllm":
        if "transformer_layer_config" in config:
            assert described["num_aux_hidden_states"] == len(config["eagle_aux_hidden_state_layer_ids"])
        wanted = sorted(config["eagle_aux_hidden_state_layer_ids"])  # captured as the layers go by
    elif engine == "sglang":
        wanted = sorted(i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        assert max(wanted) < layers and not config.get("bias")
    else:
        wanted = [2, layers // 2, layers - 3]  # no choice in its code
    eps = described["rms_norm_eps"]
    streams = [taps.entering[i] for i in wanted]
    if config.get("fc_norm") and engine != "eagle":
        streams = [rms(stream, tensors[f"fc_norm.{i}.weight"], eps) for i, stream in enumerate(streams)]
    hidden = torch.cat(streams, -1) @ tensors["fc.weight"].T
    prefix = "layers.0" if "layers.0.hidden_norm.weight" in tensors else "midlayer"
    layer = Layer(tensors, prefix, described)
    embedding = target.get_input_embeddings().weight
    normed_residual = engine == "vllm" and config["norm_before_residual"]

    def step(hidden: Tensor, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        embedded = rms(embedding[tokens], tensors[f"{prefix}.input_layernorm.weight"], eps)
        normed = rms(hidden, tensors[f"{prefix}.hidden_norm.weight"], eps)
        out = layer(torch.cat([embedded, normed], -1), normed if normed_residual else hidden, places)
        final = rms(out, tensors["norm.weight"], eps)
        return final @ tensors["lm_head.weight"].T, final if config.get("norm_output") else out

    def told(draft: int) -> int:
        return draft + int(tensors["d2t"][draft]) if "d2t" in tensors else draft

    return chain(step, hidden, ids[1:], depth, told)


def eagle1(folder: Path, target: Any, ids: Tensor, depth: int, engine: str) -> list[int]:
    """vLLM builds fc without a bias, SGLang always with one, SafeAILab as the config says (absent: with)."""
    files = Folder(folder)
    config, tensors = files.config, files.tensors
    has_bias = {"vllm": False, "sglang": True, "eagle": config.get("bias", True)}[engine]
    assert ("fc.bias" in tensors) == has_bias
    layer = Layer(tensors, "layers.0", config)
    embedding = target.get_input_embeddings().weight  # raw: no scale of the target
    output = target.get_output_embeddings().weight

    def step(hidden: Tensor, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([embedding[tokens], hidden], -1) @ tensors["fc.weight"].T
        if has_bias:
            x = x + tensors["fc.bias"]
        out = layer(x, x, places)
        return out @ output.T, out

    return chain(step, Taps(target, ids[:-1]).last, ids[1:], depth, int)


def chain(
    step: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    hidden: Tensor,
    tokens: Tensor,
    depth: int,
    told: Callable[[int], int],
) -> list[int]:
    """One pass over the text, then token by token on the draft's own output."""
    places = torch.arange(len(tokens))
    logits, hidden = step(hidden, tokens, places)
    guesses = [told(int(logits[-1].argmax()))]
    while len(guesses) < depth:
        places = places[-1:] + 1
        logits, hidden = step(hidden[-1:], torch.tensor(guesses[-1:]), places)
        guesses.append(told(int(logits[-1].argmax())))
    return guesses


def medusa_vllm(folder: Path, target: Any, ids: Tensor, depth: int, engine: str) -> list[int]:
    """vLLM's Medusa (0.32): the top token of every head. The token map counts for a smaller vocabulary alone, and that
    loads for one output of all heads alone."""
    files = Folder(folder)
    config, tensors = files.config, files.tensors
    feature, guesses = Taps(target, ids[:-1]).last[-1], []
    for head in range(config["num_heads"]):
        x = feature
        for index in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{index}"
            x = x + silu(x @ tensors[f"{name}.weight"].T + (tensors[f"{name}.bias"] if config["medusa_fc_bias"] else 0))
        rows = tensors[f"lm_heads.{0 if config['original_lm_head'] else head}.weight"]
        cut = config["truncated_vocab_size"] < config["vocab_size"]
        rows = rows[tensors["token_map"]] if cut else rows
        assert len(rows) == config["truncated_vocab_size" if config["original_lm_head"] else "vocab_size"]
        best = int((x @ rows.T).argmax())
        guesses.append(int(tensors["token_map"][best]) if cut else best)
    return guesses[:depth]


def medusa_faster(folder: Path, target: Any, ids: Tensor, depth: int, engine: str) -> list[int]:
    """FasterDecoding's Medusa, which reads the .pt file: V1, or V2 through the target's output."""
    config = json.loads((folder / "config.json").read_text())
    tensors = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in load_file(folder / "medusa_lm_head.safetensors").items()
    }
    feature, guesses = Taps(target, ids[:-1]).last[-1], []
    layers = config["medusa_num_layers"]
    for head in range(config["medusa_num_heads"]):
        x = feature
        for index in range(layers):
            name = f"{head}.{index}.linear"
            x = x + silu(x @ tensors[f"{name}.weight"].double().T + tensors[f"{name}.bias"].double())
        output = target.get_output_embeddings().weight
        rows = output if config.get("version") == "2" else tensors[f"{head}.{layers}.weight"].double()
        guesses.append(int((rows @ x).argmax()))
    return guesses[:depth]
