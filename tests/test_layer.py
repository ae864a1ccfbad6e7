"""The draft layer's sizes from any target's config, and least squares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headstart.heads.config import ROPE_KINDS, layer_facts
from headstart.heads.layers import DecoderLayer, Rotary
from headstart.heads.solve import LeastSquares

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
GPT2 = GPT2Config(n_embd=64, n_head=4, n_positions=128)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONG = {"rope_theta": 1e6, "rope_type": "default"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SIZES, rms_norm_eps=1e-4), {"head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-4}),
        (Qwen3Config(**SIZES, head_dim=32), {"head_dim": 32, "num_key_value_heads": 2}),
        (Gemma3TextConfig(**SIZES, head_dim=32), {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": LONG}),
        (GPT2, {"intermediate_size": 256, "hidden_act": "gelu_new", "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
        (GPT2, {"max_position_embeddings": 128, "rope_parameters": PLAIN, "head_dim": 16}),
        (MixtralConfig(**SIZES), {"intermediate_size": 96, "head_dim": 16, "rope_parameters": LONG}),
        (Qwen3MoeConfig(**SIZES, head_dim=8), {"intermediate_size": 96, "head_dim": 8}),
    ],
    ids=["llama", "qwen3", "gemma3", "gpt2", "gpt2-positions", "mixtral", "qwen3-moe"],
)
@torch.no_grad()
def test_a_layer_like_the_targets(config: PreTrainedConfig, expected: dict[str, Any]) -> None:
    facts = layer_facts(config)
    assert {name: facts[name] for name in expected} == expected
    assert (facts["hidden_size"], facts["num_attention_heads"]) == (64, 4)
    layer = DecoderLayer(facts, 128)
    assert layer.q_proj.weight.shape == (4 * facts["head_dim"], 128)
    cos, _ = layer.rotary(torch.arange(5)[None])
    assert cos.shape == (1, 5, facts["head_dim"])  # all of each head is turned


def scaled(kind: str) -> LlamaConfig:
    more = {"factor": 4.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    long = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    names = {"linear": ["factor"], "llama3": list(more), "yarn": list(more)[:2], "proportional": ["factor"]}
    chosen = {name: more[name] for name in names.get(kind, list(more)[:2] if kind != "default" else [])}
    return LlamaConfig(
        **SIZES, rope_parameters=PLAIN | chosen | {"rope_type": kind} | (long if kind == "longrope" else {})
    )


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rotary_scalings_do_not_depend_on_the_length(kind: str) -> None:
    """Keys that were cached stay right when the text grows."""
    facts = layer_facts(scaled(kind))
    rotary = Rotary(facts)
    short = rotary(torch.arange(40)[None])
    long = rotary(torch.arange(4000)[None])
    again = rotary(torch.arange(40)[None])
    for one, other, third in zip(short, long, again, strict=True):
        assert torch.equal(one, other[:, :40]) and torch.equal(one, third)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_that_depend_on_the_length_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"rotary scaling '{kind}' depends on the length"):
        layer_facts(scaled(kind))
    assert layer_facts(scaled(kind), {"rope_parameters": PLAIN})["rope_parameters"] == PLAIN


def test_unknown_activations_and_sizes_are_refused_by_name() -> None:
    odd = LlamaConfig(**SIZES, hidden_act="swoosh")
    with pytest.raises(ValueError, match=r"activation 'swoosh'.*layer\.hidden_act"):
        layer_facts(odd)
    assert layer_facts(odd, {"hidden_act": "silu"})["hidden_act"] == "silu"
    with pytest.raises(ValueError, match=r"unknown layer sizes \['heads'\]; known are \['head_dim', "):
        layer_facts(LlamaConfig(**SIZES), {"heads": 2})
    with pytest.raises(ValueError, match="whole groups"):
        layer_facts(LlamaConfig(**SIZES), {"num_attention_heads": 3})
    with pytest.raises(ValueError, match="even head_dim"):
        layer_facts(LlamaConfig(**SIZES), {"head_dim": 15})
    with pytest.raises(ValueError, match="layer says num_attention_heads='4'"):
        layer_facts(LlamaConfig(**SIZES), {"num_attention_heads": "4"})


@pytest.mark.parametrize(
    ("config", "name"),
    [(Gemma3nTextConfig(), "intermediate_size"), (Gemma4TextConfig(), "head_dim")],
    ids=["gemma3n", "gemma4"],
)
def test_a_size_that_differs_by_layer_must_be_given(config: PreTrainedConfig, name: str) -> None:
    with pytest.raises(ValueError, match=rf"give layer\.{name}"):
        layer_facts(config)
    assert layer_facts(config, {name: 128})[name] == 128


def test_changes_replace_the_targets_sizes() -> None:
    facts = layer_facts(LlamaConfig(**SIZES), {"num_attention_heads": 8, "intermediate_size": 32})
    assert (facts["num_attention_heads"], facts["head_dim"], facts["intermediate_size"]) == (8, 16, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_least_squares_over_batches(dtype: torch.dtype) -> None:
    """Without a ridge torch's own solution; with one, that of the rows with the ridge's root below them."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200, size, generator=g).to(dtype) for size in (12, 5))
    solver = LeastSquares()
    for part in (slice(0, 150), slice(150, 150), slice(150, 200)):
        solver.add(x[part], y[part])
    x, y = x.double(), y.double()
    torch.testing.assert_close(solver.solve(0.0), torch.linalg.lstsq(x, y).solution, atol=1e-5, rtol=1e-5)
    weight = 0.1 * x.pow(2).sum(0).mean()
    below = torch.cat([x, weight.sqrt() * torch.eye(12, dtype=torch.float64)])
    expected = torch.linalg.lstsq(below, torch.cat([y, torch.zeros(12, 5, dtype=torch.float64)])).solution
    torch.testing.assert_close(solver.solve(0.1), expected, atol=1e-5, rtol=1e-5)
    once_more, fresh = LeastSquares(solver.power), LeastSquares()
    for one in (once_more, fresh):
        one.add(x.to(dtype), 2 - y.to(dtype))
    torch.testing.assert_close(once_more.solve(0.1), fresh.solve(0.1), atol=1e-5, rtol=1e-5)


def test_inputs_that_are_always_zero_do_not_break_the_solution() -> None:
    solver = LeastSquares()
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    x[:, 2:4] = 0
    solver.add(x, x[:, :1] - x[:, 5:])
    found = solver.solve()
    assert found.isfinite().all() and (found[2:4] == 0).all()
    assert found[[0, 5], 0].tolist() == pytest.approx([1, -1], abs=0.05)


def test_a_start_without_a_label_is_refused() -> None:
    """Rather than heads that map everything to zero."""
    solver = LeastSquares()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"nothing to solve a start from.*optim\.fit_batches=0"):
            solver.solve()
        solver.add(torch.zeros(0, 6), torch.zeros(0, 3))
