"""Target: any Hugging Face causal LM seen as prefill, verify and commit. Nothing stays set on the model.

Legend: B rows, P prompt, n tree nodes, k tokens of a chunk or path, S cache slots in view, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.heads.attention import tree_mask
from headstart.infer.accept import Accepted
from headstart.infer.cache import TreeCache
from headstart.infer.grouped import by_groups
from headstart.infer.tree import DraftTree, depths, filled, visible

PREFILL_CHUNK = 1024  # tokens a row per prefill forward: bounds the [k, S] mask


class Verified(NamedTuple):
    """What one forward says about every node of a tree."""

    logits: Tensor  # [B, n, V] target dtype; a row is cast to float32 when it is visited
    features: Tensor | None  # [B, n, F]


class Seen(NamedTuple):
    """A prompt chunk or a finished step: tokens[:, i] is what features[:, i] led to."""

    tokens: Tensor  # [B, k]; of a prompt on the target's device, of a step on the CPU, and so is `count`
    count: Tensor  # type: ignore[assignment]  # [B] how many of the k are real
    features: Tensor | None  # [B, k, F]
    tree: DraftTree | None = None  # after a step, with `verified`: every row, accepted or not
    verified: Verified | None = None


class Target:
    """One generation's view of a model: its cache, and the features (hidden_states indices) the drafter wants."""

    def __init__(
        self,
        model: Any,
        wants: tuple[int, ...] = (),
        room: int = 0,
        compiled: Callable[..., Any] | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        """``room`` tokens a row the cache begins with; ``compiled`` the same model for verifying, whose trees are all
        filled up to one of the ``sizes``, ascending: with it the room must be enough for the whole text and a tree."""
        self.model = model
        self._compiled, self._sizes = compiled, sizes
        self.wants = wants
        self.forwards = 0
        self._room = room
        text = model.config.get_text_config(decoder=True)
        self.vocab_size: int = text.vocab_size
        self._layers: int = text.num_hidden_layers
        self._windows = attention_windows(text)
        self._device = home(model)
        self._dtype = compute_dtype(model)
        self._keeps_logits: bool = model._supports_logits_to_keep()
        self._held: Tensor | None = None  # [B, k] end of the prompt that waits for the first tree
        self.cache = TreeCache(0, self._layers, 0, self._device)

    @property
    def kept(self) -> list[int]:
        """Tokens of each row before its root: cached, or waiting to run with the first tree."""
        return [n + self.held for n in self.cache.kept]

    @property
    def held(self) -> int:
        """Tokens of the prompt that wait for the first tree."""
        return 0 if self._held is None else self._held.shape[1]

    def prefill(
        self, ids: Tensor, lengths: Tensor, chunk: int = 0, known: Cache | None = None, hold: bool = False
    ) -> Iterator[Seen]:
        """Caches ``lengths`` - 1 tokens of the left-aligned ids [B, P]; the last one is the first root.

        Yields one Seen a chunk of ``chunk`` tokens (0 = a default), features still on the model's device. ``known`` is
        a stock cache of the first tokens of every row: it is copied in, and those tokens are not run again. ``hold``
        lets the last chunk wait for the first tree, to run in one forward with it: for who guesses without features,
        and where rows are equally long.
        """
        rows, width = ids.shape
        fixed = self._compiled is not None
        self.cache = TreeCache(rows, self._layers, max(width, self._room), self._device, fixed)
        ids, wanted = ids.to(self._device), (lengths - 1).tolist()
        chunk = chunk or PREFILL_CHUNK
        if known is not None:
            self.cache.load(known)
        hold = hold and not fixed and not self.wants and len(set(wanted)) == 1
        for begin in range(self.cache.end, width - 1, chunk):
            size = min(chunk, width - 1 - begin)
            if hold and begin + size == width - 1:
                self._held = ids[:, begin : begin + size]
                yield Seen(ids[:, begin + 1 : begin + 1 + size], torch.full((rows,), size, device=self._device), None)
                return
            kept = [min(max(n - begin, 0), size) for n in wanted]
            count = torch.tensor(kept, device=self._device)
            fresh = torch.arange(size, device=self._device)
            parents = (fresh - 1).expand(rows, -1)
            chain = DraftTree(ids[:, begin : begin + size], parents, fresh < count[:, None])
            causal = fresh[:, None] >= fresh
            out = self._forward(chain, causal.expand(rows, -1, -1), fresh.expand(rows, -1), keep=1)
            self.cache.advance(kept)
            yield Seen(ids[:, begin + 1 : begin + 1 + size], count, self._features(out))

    def verify(self, tree: DraftTree) -> Verified:
        """ONE forward over all nodes, each at its row's own offset and seeing its own ancestors only."""
        n = tree.tokens.shape[1]
        if self._held is not None:
            return self._verify_with_prompt(tree, self._held)
        if self._compiled is not None:
            tree = filled(tree, next(size for size in self._sizes if size >= n))
        depth = torch.where(tree.valid, depths(tree.parents), 0)
        out = self._forward(tree, visible(tree), depth, keep=0, model=self._compiled)
        features = self._features(out)
        return Verified(out.logits[:, :n], None if features is None else features[:, :n])

    def _verify_with_prompt(self, tree: DraftTree, prompt: Tensor) -> Verified:
        """The same where ``prompt`` [B, k] stands before every root and is not cached yet: it is cached afterwards."""
        (rows, n), k = tree.tokens.shape, prompt.shape[1]
        seen = torch.ones(rows, k + n, k + n, dtype=torch.bool, device=prompt.device).tril()
        seen[:, k:, k:] = visible(tree)
        fresh = torch.arange(k, device=prompt.device).expand(rows, -1)
        depth = torch.cat([fresh, k + torch.where(tree.valid, depths(tree.parents), 0)], 1)
        both = torch.cat([prompt, tree.tokens], 1)
        out = self._forward(DraftTree(both, both, torch.ones_like(both, dtype=torch.bool)), seen, depth, keep=n)
        self._held = None
        self.cache.advance([k] * rows)
        return Verified(out.logits[:, -n:], None)

    def extend(self, tokens: Tensor, seen: Tensor, depth: Tensor) -> Tensor:
        """Logits [B, w, V] of one level more of a tree that grows: nothing of it is kept afterwards.

        ``tokens`` [B, w] the new level; ``seen`` [B, w, m] which of the m nodes so far, the new ones last among them,
        each new one sees; ``depth`` [B, m] of all of them past each row's end.
        """
        level = DraftTree(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool))
        logits: Tensor = self._forward(level, seen, depth, keep=0).logits
        return logits

    def commit(self, path: Accepted) -> None:
        """Accepted keys and values move into place, lengths grow by ``path.count`` [B]; nothing is recomputed."""
        self.cache.commit(path)

    def _forward(self, tree: DraftTree, seen: Tensor, depth: Tensor, keep: int, model: Any = None) -> Any:
        """Tokens [B, n] with visibility [B, n, m] and depth [B, m] past each row's end -> model output.

        m > n where the first m - n nodes were written by the forwards before.
        """
        width = tree.tokens.shape[1]
        slots = self.cache.begin(width, held=depth.shape[1] - width)
        lengths = self.cache.lengths
        mask: Any = {
            kind: tree_mask(seen, depth, lengths, slots, window, self._dtype, chunks=kind == "chunked_attention")
            for kind, window in self._windows.items()
        }
        if len(mask) == 1:
            mask = next(iter(mask.values()))
        self.forwards += 1
        run = self.model if model is None else model
        with by_groups(self.model):
            return run(
                input_ids=tree.tokens,
                attention_mask=mask,
                position_ids=lengths[:, None] + depth[:, -width:],
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


def home(model: Any) -> torch.device:
    """Where token ids go: the device of the input embedding, also where its weights are kept elsewhere until used."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    hook = getattr(embedding, "_hf_hook", None)  # accelerate's, for weights offloaded to memory or disk
    hooks = [hook, *getattr(hook, "hooks", ())]
    used = next((h.execution_device for h in hooks if getattr(h, "execution_device", None) is not None), "cpu")
    return torch.device(used)


def compute_dtype(model: Any) -> torch.dtype:
    """The floating dtype of a model's hidden states, also where its weights are stored as integers."""
    stored: list[torch.dtype] = [model.dtype, model.get_input_embeddings().weight.dtype]
    return next((dtype for dtype in stored if dtype.is_floating_point), torch.get_default_dtype())


def attention_windows(config: Any) -> dict[str, int | None]:
    """Layer kinds of a text config and how far each one looks back in positions (None = everywhere).

    Of "chunked_attention" it is the size of a chunk: a position sees what stands in its own chunk.
    """
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    chunk = getattr(config, "attention_chunk_size", None)
    known = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    odd = sorted(set(kinds) - set(known))
    if odd:
        raise ValueError(
            f"layers of kind {odd} keep a state beyond keys and values that a rejected guess cannot be taken out of; "
            f"a target whose layers are of the kinds {', '.join(known)} is needed"
        )
    return {kind: known[kind] for kind in sorted(set(kinds))}
