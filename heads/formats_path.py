"""The step path of our EAGLE-3 as attention heads, for layouts that have no matrix beside the attention.

A head whose queries and keys are one constant vector scores a pair of slots by their distance alone, and highest at
distance 0. Made large enough, its softmax is 1 for the own slot and nothing for the others, so that such heads hand on
their values; with the rows of the path as values and the identity as output they add exactly path(x) to the residual.
Biases on queries and keys supply the constant. All heads get keys of their own: H / head_dim heads more than before, or
some more, as Llama configs want H to be a multiple of their number.

Legend: H width, W what attention reads, h heads, g key/value heads, c channels of a head, E heads added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.heads.layers import Rotary

GAP = 64.0  # how far the own slot's score stands above all others: e^-64 of a value is lost in any float
SHARPEST = 0.005  # least gap as a share of the score itself, so that bfloat16 rounding (0.0003 of it) does not close it

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def constant(layer: Mapping[str, Any]) -> float:
    """What the first half of a head's channels must hold in queries and keys. Raises ValueError where rotary positions
    turn too slowly to tell neighbours apart."""
    places = torch.arange(layer["max_position_embeddings"])[None]
    cos, sin = Rotary(dict(layer))(places)
    half = layer["head_dim"] // 2
    turned = torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).double()  # [L, c] of a vector of ones
    score = turned @ turned[0]  # [L] by distance
    gap = float(score[0] - score[1:].max())
    if gap < SHARPEST * float(score[0]):
        raise ValueError(
            "heads.step_path=true goes into this layout as attention heads that see only themselves, and the rotary "
            f"scaling of these heads ({layer['rope_parameters']['rope_type']}) turns too slowly for that: train with "
            "heads.step_path=false"
        )
    return float((GAP * layer["head_dim"] ** 0.5 / gap) ** 0.5)


def fold_path(
    path: Tensor, state: dict[str, Tensor], layer: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Our tensors without the path [H, W] but with E more heads and biases, and the layer's facts to match."""
    width, channels, heads = layer["hidden_size"], layer["head_dim"], layer["num_attention_heads"]
    total = next((n for n in range(heads - (-width // channels), width + 1) if width % n == 0), None)
    if total is None:
        raise ValueError(
            f"heads.step_path=true goes into this layout as {-(-width // channels)} more attention heads of {channels} "
            f"channels, more than a width of {width} takes: train with heads.step_path=false"
        )
    more = (total - heads) * channels  # E * c
    shared = heads // layer["num_key_value_heads"]
    mark = path.new_zeros(more // channels, channels)
    mark[:, : channels // 2] = constant(layer)
    none, nothing = path.new_zeros(heads * channels), path.new_zeros(more, path.shape[1])
    rows = {"q_proj": nothing, "k_proj": nothing, "v_proj": torch.cat([path, nothing[width:]])}
    out = dict(state)
    for name in PROJECTIONS:
        own = state[f"layer.{name}.weight"]
        if name != "q_proj":
            own = own.view(-1, channels, own.shape[1]).repeat_interleave(shared, 0).flatten(0, 1)
        out[f"layer.{name}.weight"] = torch.cat([own, rows[name]])
        bias = mark.flatten() if name != "v_proj" else torch.zeros_like(mark).flatten()
        out[f"layer.{name}.bias"] = torch.cat([none, bias])
    eye = torch.eye(width, more, dtype=path.dtype)
    out["layer.o_proj.weight"] = torch.cat([state["layer.o_proj.weight"], eye], 1)
    out["layer.o_proj.bias"] = path.new_zeros(width)
    return out, dict(layer) | {"num_attention_heads": total, "num_key_value_heads": total}


def unfold_path(state: dict[str, Tensor], layer: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What ``fold_path`` was given, the path as "path.weight"; None where these biases are of other making."""
    width, channels, total = layer["hidden_size"], layer["head_dim"], layer["num_attention_heads"]
    q, k, v, o = (state[f"layer.{name}.weight"] for name in (*PROJECTIONS, "o_proj"))
    biases = {name: state[f"layer.{name}.bias"] for name in (*PROJECTIONS, "o_proj")}
    marked = biases["q_proj"].view(total, channels).any(1)
    added = int(marked.sum())
    heads, own = total - added, (total - added) * channels
    if heads < 1 or added * channels < width or layer["num_key_value_heads"] != total:
        return None
    mark = biases["q_proj"][own:].view(added, channels)
    ours = (
        not q[own:].any()
        and not k[own:].any()
        and torch.equal(o[:, own:], torch.eye(width, added * channels, dtype=o.dtype))
        and bool((mark[:, : channels // 2] == mark[0, 0]).all())
        and float(mark[0, 0]) > 0
        and not mark[:, channels // 2 :].any()
        and torch.equal(biases["k_proj"], biases["q_proj"])
        and not any(part.any() for part in (biases["q_proj"][:own], biases["v_proj"], biases["o_proj"]))
    )
    if not ours:
        return None
    keys, values = (x[:own].view(heads, channels, -1) for x in (k, v))
    groups = [n for n in range(heads, 0, -1) if heads % n == 0 and all(_same(x, n) for x in (keys, values))]
    out = {name: tensor for name, tensor in state.items() if not name.endswith(".bias")}
    out["path.weight"] = v[own : own + width]
    out["layer.q_proj.weight"], out["layer.o_proj.weight"] = q[:own], o[:, :own]
    out["layer.k_proj.weight"], out["layer.v_proj.weight"] = (x[:: groups[0]].flatten(0, 1) for x in (keys, values))
    return out, dict(layer) | {"num_attention_heads": heads, "num_key_value_heads": heads // groups[0]}


def _same(heads: Tensor, group: int) -> bool:
    """Whether heads [h, c, W] repeat in groups of ``group``."""
    grouped = heads.reshape(-1, group, *heads.shape[1:])
    return torch.equal(grouped, grouped[:, :1].expand_as(grouped))
