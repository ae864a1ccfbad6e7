"""What is trained is what is decoded: teacher-forced laws against the drafter's, whatever it guessed before; and heads
that were trained, at work."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.heads import DraftHeads, Tie, load_heads
from headstart.infer.draft_heads import HeadsDrafter, HeadsSource
from headstart.infer.grow import Budget, Sampling
from headstart.infer.speculator import Speculator
from headstart.infer.target import Seen
from headstart.infer.tree import DraftTree
from headstart.train.batches import collate
from headstart.train.masking import Masked
from tests.families import DRAFT, KINDS, Drafting, Kind, answers, disturbed, learn, lesson, taught, texts
from tests.test_lossless import padded_batch, prompt
from tests.toys import VOCAB, c64, llama

COMMITS = [[3, 4, 4], [4, 0, 0], [0, 6, 0], [1, 1, 0]]
"""Chunks of three rows that end at slots 7, 10 and 3; rows without a token among them."""
SLOTS = [7, 10, 3]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=[None, DRAFT], ids=["whole", "draft-vocabulary"])
def draft_ids(request: pytest.FixtureRequest) -> Tensor | None:
    return request.param  # type: ignore[no-any-return]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("commits", [[[8, 11, 4]], COMMITS], ids=["at-once", "in-chunks"])
@torch.no_grad()
def test_drafting_equals_training_for_the_same_prefix(
    kind: Kind, draft_ids: Tensor | None, commits: list[list[int]]
) -> None:
    """FC-038: teacher-forced logits = the drafter's, depth by depth, also at depths beyond the trained ones; after
    uneven chunks, each of which was followed by guesses that were thrown away."""
    target = llama()
    heads = disturbed(kind.make(target, draft_ids=draft_ids, **({"unroll": 2} if kind.recurrent else {})))
    tie, data = Tie.of(target), texts(heads)
    drafting = Drafting(heads, tie, 3)
    for count in commits:
        root = drafting.commit(data, count)
        if count is not commits[-1]:
            drafting.throw_away(3)
    for _ in range(2):  # the tree may be grown again from the same root
        hidden = root
        for depth in range(4):
            at = torch.tensor(SLOTS)[:, None] + 1 + depth
            node = data.tokens.gather(1, at)
            if depth:
                hidden = drafting.level(node, torch.zeros(3, 1).long(), depth)
            close(heads.logits(hidden, node, depth, tie)[:, 0], taught(heads, tie, data, SLOTS, depth))


@torch.no_grad()
def test_every_node_of_a_tree_has_the_law_of_its_own_path(kind: Kind, draft_ids: Tensor | None) -> None:
    """Three nodes a level that hang on different parents, against a teacher-forced run over each node's path."""
    target = llama()
    heads = disturbed(kind.make(target, draft_ids=draft_ids))
    tie, data = Tie.of(target), texts(heads)
    drafting = Drafting(heads, tie, 3)
    for count in COMMITS:
        drafting.commit(data, count)
    paths: list[list[list[int]]] = [[[]] for _ in SLOTS]  # of the level above: tokens below the root
    hang = {1: [[0, 0, 0]] * 3, 2: [[2, 0, 2], [1, 1, 0], [0, 1, 2]], 3: [[1, 0, 1], [2, 2, 2], [0, 2, 1]]}
    g = torch.Generator().manual_seed(2)
    for depth, parent in hang.items():
        tokens = torch.randint(3, VOCAB, (3, 3), generator=g)
        paths = [
            [[*above[up], token] for up, token in zip(ups, row, strict=True)]
            for above, ups, row in zip(paths, parent, tokens.tolist(), strict=True)
        ]
        logits = heads.logits(drafting.level(tokens, torch.tensor(parent), depth), tokens, depth, tie)
        for node in range(3):
            changed = data.tokens.clone()
            for row, slot in enumerate(SLOTS):
                changed[row, slot + 2 : slot + 2 + depth] = torch.tensor(paths[row][node])
            close(logits[:, node], taught(heads, tie, data._replace(tokens=changed), SLOTS, depth))


# trained heads -------------------------------------------------------------------------------------------------------


@lru_cache
def target() -> Any:
    """T0 with the same greedy text and sharper laws: its first choice can be learned from few steps."""
    model = llama(eos_token_id=None).requires_grad_(False)
    model.lm_head.weight.mul_(4)
    return model


@lru_cache
def overfitted(name: str) -> tuple[DraftHeads, list[float]]:
    """Heads that were shown eight chats, and how often they were right in the end, per depth."""
    heads = KINDS[name].make(target())
    batch = lesson(heads, target(), answers(target()))
    return heads, learn(heads, Tie.of(target()), [batch], steps=60, lr=2e-2)


@pytest.mark.parametrize("name", list(KINDS))
def test_eight_chats_are_learned_by_heart(name: str) -> None:
    accuracy = overfitted(name)[1]
    assert min(accuracy) > 0.9, accuracy


@pytest.mark.parametrize("name", list(KINDS))
def test_on_a_counting_target_every_pass_gives_depth_plus_one_tokens(name: str) -> None:
    """A label, token or position shifted by one cannot pass."""
    model = c64().requires_grad_(False)
    heads = KINDS[name].make(model)
    rows = [Masked([(s + i) % 64 for i in range(28)], [i >= 2 for i in range(28)]) for s in range(0, 64, 2)]
    batches = [lesson(heads, model, collate(rows, range(i, 32, 8))) for i in range(8)]
    learn(heads, Tie.of(model), batches, steps=120 if name == "medusa" else 60, lr=3e-2 if name == "medusa" else 1e-2)
    fast = Speculator(model, heads, nodes=8, depth=4)
    ids = torch.tensor([[50, 51, 52, 53]])
    out = fast.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert out[0].tolist() == [(50 + i) % 64 for i in range(24)]
    assert fast.report.tokens_per_pass == 5, fast.report.rounds


@pytest.mark.parametrize("name", list(KINDS))
def test_rows_of_a_batch_accept_what_they_accept_alone(name: str) -> None:
    """FC-104: the text of ``generate``, and the same counts pass by pass as at batch 1."""
    fast = Speculator(target(), overfitted(name)[0], nodes=12)
    batch = {"input_ids": answers(target()).tokens[[0, 3, 5], :6], "attention_mask": torch.ones(3, 6).long()}
    batch["attention_mask"][1, :3] = 0
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    together = fast.generate(**batch, **options)
    rounds: dict[int, list[int]] = {}
    for row, (accepted, _) in zip(fast.report.row_of, fast.report.rounds, strict=True):
        rounds.setdefault(row, []).append(accepted)
    assert together.tolist() == target().generate(**batch, **options).tolist()
    assert len({len(of) for of in rounds.values()}) > 1  # the ragged path is taken
    for row in range(3):
        ids = batch["input_ids"][row, batch["attention_mask"][row] > 0][None]
        fast.generate(ids, **options)
        assert rounds[row] == [accepted for accepted, _ in fast.report.rounds]


@pytest.mark.parametrize("name", list(KINDS))
def test_loaded_heads_draft_the_same(name: str, tmp_path: Path) -> None:
    heads, found = overfitted(name)[0], []
    heads.save_pretrained(tmp_path)
    for made in (heads, load_heads(str(tmp_path))):
        fast = Speculator(target(), made, nodes=12)
        out = fast.generate(prompt(), max_new_tokens=12, do_sample=False, pad_token_id=0)
        found.append((out.tolist(), fast.report.rounds, fast.report.ranks, fast.report.nodes))
    assert found[0] == found[1]


class Watched(HeadsSource):
    """Heads whose drafters compare each tree with that of a fresh one."""

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> HeadsDrafter:
        return Watcher(self, Tie.of(model), ends, sampling)


class Watcher(HeadsDrafter):
    """Grows each tree twice: also by a fresh drafter that is fed the whole committed text in one piece."""

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        super().start(ids, lengths, room)
        self.begun = (ids, lengths, room)
        self.fed: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ids]

    def observe(self, seen: Seen) -> None:
        super().observe(seen)
        assert seen.features is not None
        for row, n in enumerate(seen.count.tolist()):
            self.fed[row] += [(seen.features[row, i], seen.tokens[row, i]) for i in range(n)]

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        tree = super().grow(root, budget)
        count = torch.tensor([len(fed) for fed in self.fed])
        features = nn.utils.rnn.pad_sequence([torch.stack([f for f, _ in fed]) for fed in self.fed], batch_first=True)
        tokens = nn.utils.rnn.pad_sequence([torch.stack([t for _, t in fed]) for fed in self.fed], batch_first=True)
        fresh = HeadsDrafter(HeadsSource(self.heads), self.tie, self.ends)
        fresh.start(*self.begun)
        fresh.observe(Seen(tokens, count, features))
        other = fresh.grow(root, budget)
        assert torch.equal(tree.tokens, other.tokens) and torch.equal(tree.parents, other.parents)
        if self._fresh:  # without room for guesses nothing was taken in
            self._catch_up()
        assert self._root is not None and fresh._root is not None
        close(self._root, fresh._root)
        WATCHED.append(int(count.max()))
        return tree


WATCHED: list[int] = []
"""Tokens committed at each tree that was compared."""


@pytest.mark.parametrize("name", list(KINDS))
def test_drafts_are_those_of_a_fresh_drafter_in_every_round(name: str) -> None:
    """FC-113: guessed hidden states leave no trace: rows that accept differently, 40 tokens."""
    WATCHED.clear()
    batch = {k: v[:3] for k, v in padded_batch().items()}
    fast = Speculator(target(), Watched(overfitted(name)[0]), nodes=12)
    fast.generate(**batch, max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert fast.report.mean_accepted > 0 and len(WATCHED) == fast.report.steps > 5


@pytest.mark.parametrize("name", ["eagle", "eagle3", "hydra"])
def test_a_stated_head_size_is_kept(name: str, tmp_path: Path) -> None:
    """FC-115: hidden 64, four heads of 32: train, save, load, generate."""
    model = llama(head_dim=32, eos_token_id=None).requires_grad_(False)
    heads = KINDS[name].make(model)
    assert heads.config.layer is not None and heads.config.layer["head_dim"] == 32
    learn(heads, Tie.of(model), [lesson(heads, model, answers(model, 2))], steps=2, lr=1e-3)
    heads.save_pretrained(tmp_path)
    again = load_heads(str(tmp_path))
    assert {p.shape for n, p in again.named_parameters() if n.endswith("q_proj.weight")} <= {(128, 64), (128, 128)}
    fast = Speculator(model, again, nodes=12)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert fast.generate(prompt(), **options).tolist() == model.generate(prompt(), **options).tolist()


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_draft_layer_with_fewer_positions_than_the_target(name: str) -> None:
    """FC-082: 64 positions under a target of 256; prompt 60, 40 new tokens: rotary positions have no table to leave."""
    model = llama(eos_token_id=None)
    heads = KINDS[name].make(model, layer={"max_position_embeddings": 64})
    assert heads.config.layer is not None and heads.config.layer["max_position_embeddings"] == 64
    fast = Speculator(model, heads, nodes=12)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    ids = prompt(1, 60)
    assert fast.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    assert fast.report.drafter == KINDS[name].family
