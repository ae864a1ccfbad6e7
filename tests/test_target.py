"""One forward over a tree says what plain forwards over its paths say, before and after commit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.attention import tree_mask
from headstart.infer.accept import Accepted
from headstart.infer.probe import check_model
from headstart.infer.target import Target, attention_windows
from headstart.infer.tree import DraftTree, path_to
from tests.reference import path_of, random_parents, sequential_logits
from tests.toys import TARGETS, VOCAB, llama

LENGTHS = (19, 3, 1, 26)


def left_aligned(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    return ids, torch.tensor(LENGTHS)


def random_tree(roots: Tensor, n: int, generator: torch.Generator) -> DraftTree:
    batch = roots.shape[0]
    tokens = torch.randint(3, VOCAB, (batch, n), generator=generator)
    tokens[:, 0] = roots
    parents = torch.tensor([random_parents(n, generator) for _ in range(batch)])
    valid = torch.ones(batch, n, dtype=torch.bool)
    valid[1, n - 3 :] = False  # padding, with parents and tokens that must not matter
    return DraftTree(tokens, parents, valid)


def check_every_node(model: Any, target: Target, tree: DraftTree, known: list[list[int]], tolerance: float) -> Any:
    verified = target.verify(tree)
    for b, prefix in enumerate(known):
        parents, tokens = tree.parents[b].tolist(), tree.tokens[b].tolist()
        for node in range(len(parents)):
            if not tree.valid[b, node]:
                continue
            expected = sequential_logits(model, prefix, [tokens[i] for i in path_of(parents, node)])
            torch.testing.assert_close(verified.logits[b, node], expected, atol=tolerance, rtol=tolerance)
    return verified


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(TARGETS))
@torch.no_grad()
def test_random_trees_equal_their_paths_before_and_after_commit(name: str, attention: str) -> None:
    model = TARGETS[name]()
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(1)
    ids, lengths = left_aligned(generator)
    target = Target(model, wants=(2, 4))
    seen = list(target.prefill(ids, lengths, chunk=7))
    assert [int(s.count.max()) for s in seen] == [7, 7, 7, 4]
    known = [row[: n - 1].tolist() for row, n in zip(ids, LENGTHS, strict=True)]
    roots = ids[torch.arange(len(LENGTHS)), lengths - 1]
    for _ in range(3):  # rows accept different counts each time, one of them nothing in the second round
        tree = random_tree(roots, 9, generator)
        verified = check_every_node(model, target, tree, known, 1e-4)
        leaf = torch.tensor([int(torch.randint(6, (1,), generator=generator)) for _ in LENGTHS])
        path = path_to(tree.parents, leaf, 9)
        count = (path >= 0).sum(1)
        roots = torch.randint(3, VOCAB, (len(LENGTHS),), generator=generator)
        follow = torch.where(path >= 0, tree.tokens.gather(1, path.clamp(min=0)), -1)
        target.commit(Accepted(path, follow, count))
        for b, row in enumerate(known):
            row += follow[b, : count[b]].tolist()
            assert target.cache.lengths[b] == len(row)
            features = verified.features
            assert features is not None
            hidden = model(torch.tensor([row]), output_hidden_states=True).hidden_states
            expected = torch.cat([hidden[2][0, -1], hidden[4][0, -1]])
            torch.testing.assert_close(features[b, leaf[b]], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_prefill_gives_the_features_and_tokens_of_every_position_but_the_last() -> None:
    model = llama()
    ids, lengths = left_aligned(torch.Generator().manual_seed(2))
    chunks = list(Target(model, wants=(4,)).prefill(ids, lengths, chunk=5))
    for b, n in enumerate(LENGTHS):
        features = torch.cat([c.features[b, : c.count[b]] for c in chunks if c.features is not None])
        tokens = torch.cat([c.tokens[b, : c.count[b]] for c in chunks])
        assert tokens.tolist() == ids[b, 1:n].tolist()
        if n > 1:
            expected = model(ids[b : b + 1, :n], output_hidden_states=True).hidden_states[4][0, :-1]
            torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(TARGETS))
@torch.no_grad()
def test_the_end_of_the_prompt_runs_together_with_the_first_tree(name: str, attention: str) -> None:
    """One forward for both; afterwards the prompt is cached and the next tree is right too."""
    model = TARGETS[name]()
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCAB, (2, 20), generator=generator)
    target = Target(model)
    seen = list(target.prefill(ids, torch.tensor([20, 20]), chunk=7, hold=True))
    assert torch.cat([s.tokens for s in seen], 1).tolist() == ids[:, 1:].tolist()
    assert (target.forwards, target.held, target.kept, target.cache.kept) == (2, 5, [19, 19], [14, 14])
    known = [row[:-1].tolist() for row in ids]
    tree = random_tree(ids[:, -1], 9, generator)
    check_every_node(model, target, tree, known, 1e-4)
    assert (target.forwards, target.held, target.kept, target.cache.kept) == (3, 0, [19, 19], [19, 19])
    path = torch.tensor([[0], [0]])
    target.commit(Accepted(path, tree.tokens[:, :1], torch.tensor([1, 1])))
    following = random_tree(torch.tensor([5, 6]), 6, generator)
    check_every_node(model, target, following, [row.tolist() for row in ids], 1e-4)


def test_rows_of_unequal_length_features_and_compiled_targets_hold_nothing() -> None:
    model, ids = llama(), torch.randint(3, VOCAB, (2, 20))
    for wants, lengths, compiled in (((), [20, 12], None), ((2,), [20, 20], None), ((), [20, 20], model)):
        target = Target(model, wants, room=64, compiled=compiled, sizes=(4,))
        with torch.no_grad():
            list(target.prefill(ids, torch.tensor(lengths), hold=True))
        assert target.held == 0 and target.cache.kept == [n - 1 for n in lengths]


@torch.no_grad()
def test_the_cache_grows_past_its_first_capacity() -> None:
    model = llama(max_position_embeddings=1024)
    ids = torch.randint(3, VOCAB, (1, 300), generator=torch.Generator().manual_seed(3))
    target = Target(model)
    assert target.cache._capacity == 256
    list(target.prefill(ids, torch.tensor([300]), chunk=100))
    tree = DraftTree(ids[:, -1:], torch.tensor([[-1]]), torch.tensor([[True]]))
    expected = sequential_logits(model, ids[0].tolist(), [])
    torch.testing.assert_close(target.verify(tree).logits[0, 0], expected, atol=1e-4, rtol=1e-4)
    for _ in range(3):
        target.cache._reserve(target.cache._capacity + 1)
    torch.testing.assert_close(target.verify(tree).logits[0, 0], expected, atol=1e-4, rtol=1e-4)


def test_the_mask_is_an_additive_float_and_compares_positions() -> None:
    """Five siblings: the last stands four slots past its position, and the window must not see that."""
    parents = torch.tensor([[-1, 0, 0, 0, 0, 0]])
    seen = torch.eye(6, dtype=torch.bool)[None] | (torch.arange(6) == 0)
    depth = (parents >= 0).long()
    mask = tree_mask(seen, depth, torch.tensor([4]), 10, window=3, dtype=torch.float32)
    assert mask.dtype == torch.float32 and mask.shape == (1, 1, 6, 10)
    visible = (mask[0, 0] == 0).int().tolist()
    assert visible[0] == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]  # root at position 4 sees 2, 3, 4
    assert visible[5] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]  # position 5 sees 3, 4 and itself
    assert mask.min() == torch.finfo(torch.float32).min


def test_layers_that_cannot_be_rolled_back_are_refused_by_name() -> None:
    config = llama().config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        attention_windows(config)


def test_a_model_that_scales_its_logits_unseen_is_refused() -> None:
    model = llama()
    check_model(model, (4,))
    plain = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    model.forward = scaled
    with pytest.raises(ValueError, match="scales or caps"):
        check_model(model, (4,))


def test_hidden_states_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[99\]"):
        check_model(llama(), (4, 99))
