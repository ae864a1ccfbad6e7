"""Slow, obvious implementations to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def depth_of(parents: Sequence[int], node: int) -> int:
    """Steps from ``node`` up to the root."""
    return 0 if parents[node] < 0 else 1 + depth_of(parents, parents[node])


def path_of(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to ``node``."""
    return [node] if parents[node] < 0 else [*path_of(parents, parents[node]), node]


def random_parents(n: int, generator: torch.Generator) -> list[int]:
    """Any tree of n nodes: every node hangs on one that came before it."""
    return [-1] + [int(torch.randint(i, (1,), generator=generator)) for i in range(1, n)]


def sequential_logits(model: Any, prefix: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits [V] after prefix + path, from one plain forward over all of it."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([[*prefix, *path]])).logits[0, -1]
    return logits


def likeliest_paths(laws: Sequence[Sequence[float]], nodes: int) -> set[tuple[int, ...]]:
    """The ``nodes`` - 1 paths of ranks with the largest products, the law at a depth being laws[depth]."""
    scored = [
        (torch.tensor([laws[d][r] for d, r in enumerate(path)]).prod().item(), path)
        for length in range(1, len(laws) + 1)
        for path in itertools.product(*(range(len(law)) for law in laws[:length]))
    ]
    scored.sort(key=lambda pair: -pair[0])
    return {path for _, path in scored[: nodes - 1]}


def loss_by_label(heads: Any, batch: Any, tie: Any, weights: Sequence[float]) -> tuple[float, list[int]]:
    """The loss of any family slot by slot, label by label: summed loss and predictions per depth."""
    total, counts = 0.0, [0] * len(weights)
    rows, length = batch.tokens.shape
    for depth, (slots, hidden) in enumerate(heads.unroll(batch, tie, len(weights))):
        for b in range(rows):
            for slot in range(length):
                label = slot + 2 + depth
                if label >= length or not batch.supervised[b, label]:
                    continue
                if batch.document[b, slot] != batch.document[b, label] or batch.document[b, label] < 0:
                    continue
                p = torch.softmax(tie.unembed(batch.last[b, label - 1]).double(), -1)
                out = hidden[b, slots[b].tolist().index(slot)]
                logq = torch.log_softmax(heads.logits(out, batch.tokens[b, label - 1], depth, tie).double(), -1)
                p = p if heads.draft_ids is None else p[heads.draft_ids]
                total += weights[depth] * float(-(p * logq).sum().detach())
                counts[depth] += 1
    return total, counts


def hydra_hidden(heads: Any, batch: Any, tie: Any, b: int, slot: int, depth: int) -> Tensor:
    """Hidden [H] of a Hydra head at one slot, features and embeddings put side by side by hand."""
    x = batch.features[b, slot]
    if heads.prefix is not None:
        keys = []
        for s in range(slot + 1):
            if batch.document[b, s] == batch.document[b, slot]:
                x = batch.features[b, s]
                read = _rms(heads.prefix_norm, x)
                keys.append(_key_value(heads.prefix, heads.config.layer, read, s))
        x = _decoder_layer(heads.prefix, heads.config.layer, read, x, slot, keys)
    x = torch.cat([x, *(tie.embed(batch.tokens[b, slot + 1 + i]) for i in range(depth + 1))])
    entry, *blocks = heads.blocks[depth]
    x = entry.residual(x) + _silu(entry.linear(x))
    for block in blocks:
        x = x + _silu(block.linear(x))
    assert isinstance(x, Tensor)
    return x


def recurrent_hidden(heads: Any, batch: Any, tie: Any, depths: int) -> list[list[dict[int, Tensor]]]:
    """[depth][row][slot] -> hidden [H] of an EAGLE head, one slot and one step at a time (arXiv 2503.01840).

    A query of slot t and step k sees the keys of step 0 at the slots up to t of the same document, and those of the
    steps 1..k at its own slot. Only slots whose tokens exist are there.
    """
    found: list[list[dict[int, Tensor]]] = [[{} for _ in batch.tokens] for _ in range(depths)]
    facts, length = heads.config.layer, batch.tokens.shape[1]
    for b in range(batch.tokens.shape[0]):
        first: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of step 0
        for t in range(length - 1):
            hidden = _begin(heads, batch.features[b, t])
            same = [s for s in range(t + 1) if batch.document[b, s] == batch.document[b, t]]
            own: list[tuple[Tensor, Tensor]] = []
            for step in range(depths):
                if t + 1 + step >= length:
                    break
                read, residual = _mix(heads, hidden, tie.embed(batch.tokens[b, t + 1 + step]))
                pair = _key_value(heads.layer, facts, read, t + step)
                if step == 0:
                    first[t] = pair
                else:
                    own.append(pair)
                keys = [*(first[s] for s in same), *own]
                out = _decoder_layer(heads.layer, facts, read, residual, t + step, keys)
                hidden = _rms(heads.norm, out) if heads.config.norm_output else out
                found[step][b][t] = hidden
    return found


def recurrent_logits(heads: Any, hidden: Tensor, tie: Any) -> Tensor:
    """[H] as the next step is given it -> [V]: normed once in EAGLE-3, not at all in EAGLE-1."""
    bare = heads.config.family == "eagle" or heads.config.norm_output
    logits: Tensor = tie.weight @ (hidden if bare else _rms(heads.norm, hidden))
    return logits


def _begin(heads: Any, features: Tensor) -> Tensor:
    if heads.config.family == "eagle":
        return features
    width = heads.config.target_hidden_size
    parts = [features[i : i + width] for i in range(0, len(features), width)]
    last = parts.pop() if heads.config.residual_last else None
    if heads.config.fc_norm:
        parts = [_rms(norm, part) for norm, part in zip(heads.fc_norm, parts, strict=True)]
    g: Tensor = heads.fc.weight @ torch.cat(parts)
    return g if last is None else g + last


def _mix(heads: Any, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    if heads.config.family == "eagle":
        x = heads.fc.weight @ torch.cat([embedded, hidden])
        return x, x
    normed = _rms(heads.hidden_norm, hidden)
    x = torch.cat([_rms(heads.input_layernorm, embedded), normed])
    residual = normed if heads.config.norm_before_residual else hidden
    return x, residual + heads.path.weight @ x if heads.config.step_path else residual


def _key_value(layer: Any, facts: Any, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """Two of [g, c]."""
    shape = (facts["num_key_value_heads"], facts["head_dim"])
    theta = facts["rope_parameters"]["rope_theta"]
    return _turned((layer.k_proj.weight @ x).view(shape), position, theta), (layer.v_proj.weight @ x).view(shape)


def _decoder_layer(
    layer: Any, facts: Any, x: Tensor, residual: Tensor, position: int, keys: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """One query over the listed keys, head by head, then the MLP."""
    heads, size = facts["num_attention_heads"], facts["head_dim"]
    groups = heads // facts["num_key_value_heads"]
    q = _turned((layer.q_proj.weight @ x).view(heads, size), position, facts["rope_parameters"]["rope_theta"])
    seen = []
    for h in range(heads):
        scores = torch.stack([q[h] @ k[h // groups] / size**0.5 for k, _ in keys])
        share = scores.exp() / scores.exp().sum()
        seen.append(sum(s * v[h // groups] for s, (_, v) in zip(share, keys, strict=True)))
    hidden = residual + layer.o_proj.weight @ torch.cat(seen)
    normed = _rms(layer.post_attention_layernorm, hidden)
    inner = _silu(layer.mlp.gate_proj.weight @ normed) * (layer.mlp.up_proj.weight @ normed)
    out: Tensor = hidden + layer.mlp.down_proj.weight @ inner
    return out


def _turned(x: Tensor, position: int, theta: float) -> Tensor:
    """[h, c]: channel i and i + c / 2 turned together by position * theta^(-2 i / c)."""
    half = x.shape[1] // 2
    angle = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=x.dtype)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)


def _rms(norm: Any, x: Tensor) -> Tensor:
    out: Tensor = x / (x.pow(2).mean() + norm.eps).sqrt() * norm.weight
    return out


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())
