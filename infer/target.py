"""Target: any Hugging Face causal LM seen as prefill, verify and commit. Nothing is set on the model.

Legend: B rows, P prompt, n tree nodes, k tokens of a chunk or path, S cache slots in view, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.heads import Tie
from headstart.infer.accept import Accepted
from headstart.infer.cache import TreeCache
from headstart.infer.tree import DraftTree, depths, visible

PREFILL_CHUNK = 1024  # tokens a row per prefill forward: bounds the [k, S] mask


class Verified(NamedTuple):
    """What one forward says about every node of a tree."""

    logits: Tensor  # [B, n, V] target dtype; a row is cast to float32 when it is visited
    features: Tensor | None  # [B, n, F]


class Seen(NamedTuple):
    """A prompt chunk or a finished step: tokens[:, i] is what features[:, i] led to."""

    tokens: Tensor  # [B, k]
    count: Tensor  # type: ignore[assignment]  # [B] how many of the k are real
    features: Tensor | None  # [B, k, F]
    tree: DraftTree | None = None  # after a step, with `verified`: every row, accepted or not
    verified: Verified | None = None


class Target:
    """One generation's view of a model: its cache, and the features (hidden_states indices) the drafter wants."""

    def __init__(self, model: Any, wants: tuple[int, ...] = (), room: int = 0) -> None:
        self.model = model
        self.wants = wants
        self.forwards = 0
        self._room = room
        text = model.config.get_text_config(decoder=True)
        self._layers: int = text.num_hidden_layers
        self._windows = attention_windows(text)
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._dtype: torch.dtype = model.dtype
        self._keeps_logits: bool = model._supports_logits_to_keep()
        self.cache = TreeCache(0, self._layers, 0, self._device)

    def prefill(self, ids: Tensor, lengths: Tensor, chunk: int = 0, known: Cache | None = None) -> Iterator[Seen]:
        """Caches ``lengths`` - 1 tokens of the left-aligned ids [B, P]; the last one is the first root.

        Yields one Seen a chunk of ``chunk`` tokens (0 = a default), features still on the model's device. ``known`` is
        a stock cache of the first tokens of every row: it is copied in, and those tokens are not run again.
        """
        rows, width = ids.shape
        self.cache = TreeCache(rows, self._layers, max(width, self._room), self._device)
        ids, wanted = ids.to(self._device), (lengths - 1).to(self._device)
        chunk = chunk or PREFILL_CHUNK
        if known is not None:
            self.cache.load(known)
        for begin in range(self.cache.end, width - 1, chunk):
            size = min(chunk, width - 1 - begin)
            count = (wanted - begin).clamp(min=0, max=size)
            fresh = torch.arange(size, device=self._device)
            parents = (fresh - 1).expand(rows, -1)
            chain = DraftTree(ids[:, begin : begin + size], parents, fresh < count[:, None])
            causal = fresh[:, None] >= fresh
            out = self._forward(chain, causal.expand(rows, -1, -1), fresh.expand(rows, -1), keep=1)
            self.cache.advance(count)
            yield Seen(ids[:, begin + 1 : begin + 1 + size], count, self._features(out))

    def verify(self, tree: DraftTree) -> Verified:
        """ONE forward over all nodes, each at its row's own offset and seeing its own ancestors only."""
        depth = torch.where(tree.valid, depths(tree.parents), 0)
        out = self._forward(tree, visible(tree), depth, keep=0)
        return Verified(out.logits, self._features(out))

    def commit(self, path: Accepted) -> None:
        """Accepted keys and values move into place, lengths grow by ``path.count`` [B]; nothing is recomputed."""
        self.cache.commit(path)

    def _forward(self, tree: DraftTree, seen: Tensor, depth: Tensor, keep: int) -> Any:
        """Tokens [B, n] with visibility [B, n, n] and depth [B, n] past each row's end -> model output."""
        slots = self.cache.begin(tree.tokens.shape[1])
        lengths = self.cache.lengths
        mask: Any = {
            kind: tree_mask(seen, depth, lengths, slots, window, self._dtype) for kind, window in self._windows.items()
        }
        if len(mask) == 1:
            mask = next(iter(mask.values()))
        self.forwards += 1
        return self.model(
            input_ids=tree.tokens,
            attention_mask=mask,
            position_ids=lengths[:, None] + depth,
            cache=self.cache,
            use_cache=True,
            return_dict=True,
            **({"logits_to_keep": keep} if self._keeps_logits else {}),
            **({"output_hidden_states": list(self.wants)} if self.wants else {}),
        )

    def _features(self, out: Any) -> Tensor | None:
        """The wanted hidden states side by side, [B, k, F]."""
        if not self.wants:
            return None
        device = out.logits.device
        return torch.cat([out.hidden_states[i].to(device) for i in self.wants], dim=-1)


def attention_windows(config: Any) -> dict[str, int | None]:
    """Layer kinds of a text config and how far each one looks back in positions (None = everywhere)."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    known = {"full_attention": None, "sliding_attention": window}
    odd = sorted(set(kinds) - set(known))
    if odd:
        raise ValueError(
            f"layers of kind {odd} keep a state that a rejected guess cannot be taken out of; "
            "a target whose layers are full_attention or sliding_attention is needed"
        )
    return {kind: known[kind] for kind in sorted(set(kinds))}


def tree_mask(
    seen: Tensor, depth: Tensor, lengths: Tensor, slots: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Additive float mask [B, 1, n, S]: 0 where a node may look, the dtype's minimum elsewhere.

    ``seen`` [B, n, n] which tree nodes each node sees, ``depth`` [B, n], ``lengths`` [B] committed tokens. A window
    compares *positions*: siblings stand in later slots than their depth. Never bool: eager attention adds a bool mask.
    """
    batch, n = depth.shape
    slot = torch.arange(slots, device=seen.device)
    past = slot < lengths[:, None]  # [B, S]
    place = (slot - lengths[:, None]).clamp(min=0, max=n - 1)  # [B, S] tree node standing in a slot
    fresh = (slot >= lengths[:, None]) & (slot < lengths[:, None] + n)
    allowed = seen.gather(2, place[:, None].expand(-1, n, -1)) & fresh[:, None] | past[:, None]
    if window is not None:
        position = torch.where(past, slot, lengths[:, None] + depth.gather(1, place))
        allowed = allowed & ((lengths[:, None] + depth)[:, :, None] - position[:, None] < window)
    mask = torch.zeros(batch, n, slots, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


@torch.no_grad()
def check_model(model: Any, wants: tuple[int, ...]) -> None:
    """A few short forwards that check what the toolkit relies on; raises ValueError naming what does not hold.

    The hidden states a list selects must be those of ``output_hidden_states=True``, the output layer applied to the
    last one must give the logits, and a branching tree must say what plain forwards over its paths say.
    """
    _check_features(model, wants)
    _check_tree(model)


def _check_tree(model: Any) -> None:
    """A prefix of 20 tokens, two branches of two nodes, against a plain forward of each branch."""
    device = model.get_input_embeddings().weight.device
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(1, 26, device=device) * 7919) % vocab
    prefix, parents = ids[:20], torch.tensor([[-1, 0, 0, 1, 2]], device=device)
    tree = DraftTree(torch.cat([prefix[-1:], ids[20:24]])[None], parents, torch.ones_like(parents, dtype=torch.bool))
    target = Target(model)
    try:
        for _ in target.prefill(prefix[None], torch.tensor([20], device=device)):
            pass
        found = target.verify(tree).logits[0, 3:].float()  # the two leaves
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not take a tree of guesses ({type(error).__name__}: {error}); "
            "a decoder with rotary or learned positions and plain attention is needed"
        ) from error
    paths = torch.stack([torch.cat([prefix, ids[[20, 22]]]), torch.cat([prefix, ids[[21, 23]]])])
    plain = model(input_ids=paths, use_cache=False, return_dict=True).logits[:, -1].float()
    scale = plain.abs().max().clamp(min=1.0)
    allowed = 0.1 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    error_size = float((found - plain).abs().max() / scale)
    if not error_size <= allowed:
        raise ValueError(
            f"{type(model).__name__} gives other logits for a tree of guesses than for plain text (relative difference "
            f"{error_size:.2g}): its attention does not go by mask and position alone, so the text would be wrong"
        )


def _check_features(model: Any, wants: tuple[int, ...]) -> None:
    """Hidden states by number, and the output layer, in one forward of three tokens."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    odd = [i for i in wants if not 0 <= i <= layers]
    if odd:
        raise ValueError(f"hidden states {odd} wanted, {type(model).__name__} has 0..{layers}")
    tie = Tie.of(model)
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(1, 4, device=device)[None]
    whole = model(input_ids=ids, output_hidden_states=True, use_cache=False, return_dict=True)
    listed = (
        model(input_ids=ids, output_hidden_states=list(wants), use_cache=False, return_dict=True) if wants else None
    )
    for i in wants:
        picked = listed.hidden_states[i] if listed is not None and len(listed.hidden_states) > i else None
        if picked is None or not torch.equal(picked, whole.hidden_states[i]):
            raise ValueError(
                f"hidden state {i} of {type(model).__name__} is not what output_hidden_states=True gives: "
                "this transformers release numbers them otherwise; 5.24 or later is needed"
            )
    mirrored = tie.unembed(whole.hidden_states[-1]).float()
    if not torch.allclose(mirrored, whole.logits.float(), atol=1e-2, rtol=1e-2):
        raise ValueError(
            f"the output layer of {type(model).__name__} applied to its last hidden state does not give its logits: "
            "it scales or caps them in a way that is not known here, so heads cannot be trained or used on it"
        )
