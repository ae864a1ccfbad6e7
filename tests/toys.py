"""Toy targets and drafters that every suite shares. Names as in the field: C64 counts, T0 is random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headstart.infer.grow import Budget
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree, root_only

VOCAB = 320
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    """T0: a random tiny Llama whose greedy text varies."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).eval()


def qwen3() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **SIZES)).eval()


def mistral() -> Any:
    """A window of 12 positions, shorter than every text here."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(sliding_window=12, **SIZES)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()


TARGETS: dict[str, Callable[[], Any]] = {"llama": llama, "qwen3": qwen3, "mistral": mistral, "gpt2": gpt2}


def chain(order: dict[int, int], size: int = VOCAB, eos: int | None = None) -> Any:
    """A target that says order[t] after t with high probability: attention and MLP write nothing."""
    model = llama(vocab_size=size, hidden_size=size, intermediate_size=64, eos_token_id=eos, initializer_range=0.02)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for said, then in order.items():
            model.lm_head.weight[then, said] = 1.0
    return model


def c64(eos: int | None = None) -> Any:
    """C64: says t + 1 modulo 64 after t."""
    return chain({t: (t + 1) % 64 for t in range(64)}, size=64, eos=eos)


class Scripted:
    """A drafter that knows the target's greedy continuation.

    Under every node it hangs one right child at a random sibling place among ``decoys`` wrong ones, which have children
    of their own; ``right`` = False leaves the right one out (an adversary).
    """

    wants: tuple[int, ...] = ()

    def __init__(self, model: Any, *, depth: int, decoys: int = 2, right: bool = True, seed: int = 0) -> None:
        self.model, self.depth, self.decoys, self.right = model, depth, decoys, right
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[list[int]] = []
        self.known: dict[tuple[int, ...], int] = {}

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        self.rows = [row[:n].tolist() for row, n in zip(ids, lengths.tolist(), strict=True)]

    def observe(self, seen: Seen) -> None:
        if seen.tree is not None:
            for row, tokens, n in zip(self.rows, seen.tokens.tolist(), seen.count.tolist(), strict=True):
                row += tokens[:n]

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        depth = min(self.depth, budget.depth)
        trees = [self._tree(ids, min(depth, int(room))) for ids, room in zip(self.rows, budget.room, strict=True)]
        if max(len(t[0]) for t in trees) == 1:
            return root_only(root)
        n = max(len(tokens) for tokens, _ in trees)
        tokens = torch.tensor([t + [0] * (n - len(t)) for t, _ in trees])
        parents = torch.tensor([p + [-1] * (n - len(p)) for _, p in trees])
        valid = torch.tensor([[i < len(t) for i in range(n)] for t, _ in trees])
        return DraftTree(tokens, parents, valid)

    def _tree(self, ids: list[int], depth: int) -> tuple[list[int], list[int]]:
        assert ids, "start must come first"
        tokens, parents, spine = [ids[-1]], [-1], 0
        truth = self._truth(ids, depth)
        for d in range(depth):
            wrong = [t for t in self._random(3 * self.decoys + 3) if t != truth[d]][: self.decoys]
            place = int(torch.randint(len(wrong) + 1, (1,), generator=self.generator))
            children = [*wrong[:place], truth[d], *wrong[place:]] if self.right else wrong
            first = len(tokens)
            tokens += children
            parents += [spine] * len(children)
            for at, token in enumerate(children):  # decoys have a child each, with a token that would be right
                if token != truth[d] and d + 1 < depth:
                    tokens.append(truth[d + 1])
                    parents.append(first + at)
            if not self.right:
                return tokens, parents
            spine = first + place
        return tokens, parents

    def _truth(self, ids: list[int], depth: int) -> list[int]:
        grown = list(ids)
        for _ in range(depth):
            key = tuple(grown)
            if key not in self.known:
                self.known[key] = int(self.model(torch.tensor([grown])).logits[0, -1].argmax())
            grown.append(self.known[key])
        return grown[len(ids) :]

    @classmethod
    def replay(cls, model: Any, text: list[int], *, depth: int, **options: Any) -> Scripted:
        """An oracle for one row that knows the text to come, prompt included: also a sampled one."""

        class Replay(cls):  # type: ignore[valid-type, misc]
            def _truth(self, ids: list[int], depth: int) -> list[int]:
                assert ids == text[: len(ids)]
                return [*text[len(ids) : len(ids) + depth], *[3] * depth][:depth]

        made: Scripted = Replay(model, depth=depth, **options)
        return made

    def _random(self, count: int) -> list[int]:
        vocab = self.model.config.vocab_size
        return list(dict.fromkeys(torch.randint(3, vocab, (count,), generator=self.generator).tolist()))
