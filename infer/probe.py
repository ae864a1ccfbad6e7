"""A start-up self-test on the real weights: a few short forwards that check what the toolkit relies on.

Legend: V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Hashable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig

from headstart.heads import Tie
from headstart.infer.grouped import attention_of
from headstart.infer.target import Target, compute_dtype, home
from headstart.infer.tree import DraftTree

PREFIX, NEW = 20, 3  # tokens before the tree; tokens plain generate writes, the last two of which are guesses
_PASSED: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def check_model(model: Any, wants: tuple[int, ...]) -> None:
    """Raises ValueError naming what does not hold; what held is remembered and not run again until weights change.

    A branching tree must say what ``generate`` says along its greedy text and what a plain forward says along another
    path. For heads, which want hidden states, the ones a list selects must be those of ``output_hidden_states=True``,
    and the output layer applied to the last one must give the logits.
    """
    key = _key(model, wants)
    if key in _PASSED.get(model, set()):
        return
    if wants:
        _check_features(model, wants)
    _check_tree(model)
    _PASSED.setdefault(model, set()).add(key)


def _check_tree(model: Any) -> None:
    """Under a prefix stand the greedy text of ``generate`` and a wrong branch; every node's logits are compared."""
    device, vocab = home(model), model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(1, PREFIX + 3, device=device) * 7919) % vocab
    prefix = ids[:PREFIX]
    try:
        text, plain = _generated(model, prefix)
        wrong = torch.stack([(text[0] + 1) % vocab, ids[-1]])
        found = _verified(model, prefix, text[:2], wrong)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not take a tree of guesses ({type(error).__name__}: {error}); "
            "a decoder with rotary or learned positions and plain attention is needed"
        ) from error
    other = model(input_ids=torch.cat([prefix, wrong])[None], use_cache=False, return_dict=True).logits[0, -2:]
    plain = torch.cat([plain, other.to(plain.device).float()])
    size = float((found.to(plain.device) - plain).abs().max() / plain.abs().max().clamp(min=1.0))
    if not size <= _rounding(model):
        hint = "; it is in training mode, where dropout makes every forward another: call model.eval()"
        raise ValueError(
            f"{type(model).__name__} gives other logits for a tree of guesses than for plain text (relative difference "
            f"{size:.2g}): its attention does not go by mask and position alone, so the text would be wrong"
            + (hint if model.training else "")
        )


def _generated(model: Any, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """What ``generate`` writes after prefix [P]: its greedy tokens [NEW], and the raw logits [NEW, V] of each."""
    twin = copy.copy(model)  # the same weights; only the copy loses the model's own settings, such as end tokens
    twin.generation_config = GenerationConfig()
    wanted = GenerationConfig(
        do_sample=False, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True, use_cache=True
    )
    out: Any = twin.generate(prefix[None], attention_mask=torch.ones_like(prefix)[None], generation_config=wanted)
    return out.sequences[0, len(prefix) :], torch.cat([x.float() for x in out.logits])


def _verified(model: Any, prefix: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
    """Logits [5, V] of one tree: the root and ``right`` [2] below it, then ``wrong`` [2], a second branch."""
    parents = torch.tensor([[-1, 0, 0, 2, 1]], device=prefix.device)
    tokens = torch.stack([prefix[-1], wrong[0], right[0], right[1], wrong[1]])  # the siblings come first, the wrong one
    target = Target(model)
    for _ in target.prefill(prefix[None], torch.tensor([len(prefix)], device=prefix.device)):
        pass
    logits = target.verify(DraftTree(tokens[None], parents, torch.ones_like(parents, dtype=torch.bool))).logits
    return logits[0, [0, 2, 3, 1, 4]].float()


def _rounding(model: Any) -> float:
    """Largest difference of logits, relative to the largest logit, that forwards of other shapes may show."""
    if compute_dtype(model) in (torch.bfloat16, torch.float16) or getattr(model, "is_quantized", False):
        return 0.1
    return 1e-3 if torch.get_float32_matmul_precision() == "highest" else 2e-2


def _check_features(model: Any, wants: tuple[int, ...]) -> None:
    """Hidden states by number, and the output layer, in one forward of three tokens."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    odd = [i for i in wants if not 0 <= i <= layers]
    if odd:
        raise ValueError(f"hidden states {odd} wanted, {type(model).__name__} has 0..{layers}")
    tie = Tie.of(model)
    ids = torch.arange(1, 4, device=home(model))[None]
    whole = model(input_ids=ids, output_hidden_states=True, use_cache=False, return_dict=True)
    listed = model(input_ids=ids, output_hidden_states=list(wants), use_cache=False, return_dict=True)
    for i in wants:
        picked = listed.hidden_states[i] if len(listed.hidden_states) > i else None
        if picked is None or not torch.equal(picked, whole.hidden_states[i]):
            raise ValueError(
                f"hidden state {i} of {type(model).__name__} is not what output_hidden_states=True gives: "
                "this transformers release numbers them otherwise; 5.24 or later is needed"
            )
    mirrored = tie.unembed(whole.hidden_states[-1]).float()
    if not torch.allclose(mirrored.to(whole.logits.device), whole.logits.float(), atol=1e-2, rtol=1e-2):
        raise ValueError(
            f"the output layer of {type(model).__name__} applied to its last hidden state does not give its logits: "
            "it scales or caps them in a way that is not known here, so heads cannot be trained or used on it"
        )


def _key(model: Any, wants: tuple[int, ...]) -> Hashable:
    """What a verdict depends on."""
    own = vars(model).get("forward")  # set on the object by accelerate, torch.compile or a user
    return (_digest(model), attention_of(model), wants, transformers.__version__, id(own), model.training)


def _digest(model: nn.Module) -> str:
    """A few numbers of every parameter, with shapes, dtypes and devices: training and adapters change it."""
    digest = hashlib.sha256()
    parts: dict[torch.device, list[Tensor]] = {}
    for name, p in model.named_parameters():
        digest.update(f"{name} {tuple(p.shape)} {p.dtype} {p.device}".encode())
        if not p.is_meta and p.numel():  # weights on disk are not read
            parts.setdefault(p.device, []).append(_sample(p))
    for samples in parts.values():
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sample(parameter: nn.Parameter) -> Tensor:
    """[n] float64 numbers from all over a parameter; none of a quantised one that does not index."""
    try:
        flat = parameter.detach().flatten()
        return flat[torch.arange(8, device=flat.device) * (flat.numel() - 1) // 7].double()
    except (RuntimeError, TypeError, AttributeError):  # how packed integer tensors refuse to be indexed
        return torch.zeros(0, dtype=torch.float64, device=parameter.device)
