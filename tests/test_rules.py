"""Every rule's output law, by enumerating all draws and coins of the shipped rule under the shipped loop.

The target is a table: the law after every prefix is looked up. So is the draft's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from headstart.infer import accept
from headstart.infer.accept import Accepted, Rule, block, match, mixed, typical
from headstart.infer.decode import Limits, decode
from headstart.infer.grow import Budget, Children, Sampling, best_first, offered
from headstart.infer.target import Verified
from headstart.infer.tree import DraftTree
from headstart.infer.visit import Emission

NEW = 3  # tokens of every text
EXACT = 1e-12
Prefix = tuple[int, ...]


class Branches:
    """Replays a list of choices and then takes the first possible one: run it again until all were taken."""

    def __init__(self) -> None:
        self.taken: list[list[Any]] = []  # [place among the possible, the possible ones]
        self.at, self.weight = 0, 1.0

    def choose(self, chances: Sequence[float]) -> int:
        possible = [i for i, c in enumerate(chances) if c > 0]
        if self.at == len(self.taken):
            self.taken.append([0, possible])
        choice: int = self.taken[self.at][1][self.taken[self.at][0]]
        self.at += 1
        self.weight *= chances[choice] / sum(chances)
        return choice

    def runs(self) -> Iterator[None]:
        while True:
            self.at, self.weight = 0, 1.0
            yield
            while self.taken and self.taken[-1][0] + 1 == len(self.taken[-1][1]):
                self.taken.pop()
            if not self.taken:
                return
            self.taken[-1][0] += 1


def table(vocab: int, seed: int, sharp: float = 1.5) -> Callable[[Prefix], Tensor]:
    """Random log-laws [V] float64 for every prefix."""
    made: dict[Prefix, Tensor] = {}

    def law(prefix: Prefix) -> Tensor:
        if prefix not in made:
            generator = torch.Generator().manual_seed(hash((seed, prefix)) % (1 << 31))
            made[prefix] = torch.log_softmax(torch.randn(vocab, generator=generator, dtype=torch.float64) * sharp, -1)
        return made[prefix]

    return law


class TableTarget:
    """What the loop asks of a Target, with laws from a table."""

    def __init__(self, law: Callable[[Prefix], Tensor], rows: int = 1) -> None:
        self.law, self.forwards, self.vocab_size = law, 0, len(law(()))
        self.texts: list[Prefix] = [() for _ in range(rows)]  # without the prompt's one token
        self.cache = SimpleNamespace(lengths=torch.zeros(rows, dtype=torch.int64), kept=[0] * rows)

    held = 0  # tokens of the prompt that wait for the first tree

    @property
    def kept(self) -> list[int]:
        kept: list[int] = self.cache.kept
        return kept

    def prefill(self, ids: Tensor, lengths: Tensor, known: Any = None, hold: bool = False) -> Iterator[Any]:
        return iter(())

    def verify(self, tree: DraftTree) -> Verified:
        self.forwards += 1
        paths = [below(*row) for row in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)]
        return Verified(
            look_up(self.law, [[text + p for p in row] for text, row in zip(self.texts, paths, strict=True)]), None
        )

    def commit(self, path: Accepted) -> None:
        for row, count in enumerate(path.count.tolist()):
            self.cache.kept[row] += count
            self.texts[row] += tuple(path.tokens[row, :count].tolist())


def below(tokens: list[int], parents: list[int]) -> list[Prefix]:
    """Of each node of a row, the tokens from below the root down to it; padding counts as roots."""
    paths: list[Prefix] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return paths


def look_up(law: Callable[[Prefix], Tensor], prefixes: list[list[Prefix]]) -> Tensor:
    """[B, n] prefixes -> their laws [B, n, V]."""
    number = {p: i for i, p in enumerate(dict.fromkeys(p for row in prefixes for p in row))}
    return torch.stack([law(p) for p in number])[torch.tensor([[number[p] for p in row] for row in prefixes])]


class TableDrafter:
    """Grows trees by the shipped growth from the laws of a table."""

    wants: tuple[int, ...] = ()

    def __init__(
        self,
        law: Callable[[Prefix], Tensor],
        target: TableTarget,
        sampling: Sampling | None,
        *,
        vocab: int,
        depth: int = 2,
        width: int = 2,
        branch: int = 2,
        nodes: int = 16,
        change: Callable[[DraftTree], DraftTree] = lambda tree: tree,
    ) -> None:
        self.law, self.target, self.sampling, self.vocab = law, target, sampling, vocab
        self.depth, self.width, self.branch, self.nodes, self.change = depth, width, branch, nodes, change
        self.level: list[list[Prefix]] = []

    def start(self, ids: Tensor, lengths: Tensor, room: int) -> None:
        pass

    def observe(self, seen: Any) -> None:
        pass

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        budget = budget._replace(nodes=self.nodes, depth=min(budget.depth, self.depth))
        self.level = [[()] for _ in self.target.texts]
        return self.change(best_first(root, self.expand, budget, self.width))

    def expand(self, tokens: Tensor, above: Tensor, depth: int) -> Children:
        if depth:
            self.level = [
                [self.level[b][a] + (t,) for t, a in zip(tokens[b].tolist(), above[b].tolist(), strict=True)]
                for b in range(len(self.level))
            ]
        texts = zip(self.target.texts, self.level, strict=True)
        logits = look_up(self.law, [[text + p for p in row] for text, row in texts])
        return offered(logits, self.branch, vocab_size=self.vocab, sampling=self.sampling)


class Weighed(Emission):
    """A visit whose draws and coins are all taken, each with its chance; laws stay in float64."""

    def __init__(self, branches: Branches) -> None:
        super().__init__(
            torch.tensor([[0]]), [], StoppingCriteriaList(), max_length=1 + NEW, do_sample=True, pad=0, in_order=False
        )
        self.branches = branches

    def law(self, node: Tensor) -> Tensor:
        assert self._verified is not None
        return self._verified.logits[0, node]

    def draw(self, scores: Tensor, wanted: Tensor) -> Tensor:
        assert wanted.tolist() == [True]
        return torch.tensor([self.branches.choose(torch.softmax(scores[0], -1).tolist())])

    def coin(self, p: Tensor) -> Tensor:
        chance = float(p[0])
        assert -EXACT <= chance <= 1 + EXACT
        return torch.tensor([self.branches.choose([min(max(chance, 0.0), 1.0), max(1 - chance, 0.0)]) == 0])


def output_law(rule: Rule, vocab: int, seed: int, drawn: bool, **options: Any) -> Tensor:
    """[V, V, V] law of the text of three tokens: every way the pass can go, weighed."""
    p, q = table(vocab, seed), table(vocab, seed + 1000)
    law = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    branches = Branches()

    def pick(laws: Tensor) -> Tensor:
        return torch.tensor([branches.choose(row.tolist()) for row in laws])

    for _ in branches.runs():
        target, visit = TableTarget(p), Weighed(branches)
        drafter = TableDrafter(q, target, Sampling(pick) if drawn else None, vocab=vocab, **options)
        decode(target, drafter, rule, visit, torch.tensor([[0]]), torch.tensor([1]), Limits(99, 2, 99))  # type: ignore[arg-type]
        law[tuple(target.texts[0])] += branches.weight
    return law


def target_law(vocab: int, seed: int) -> Tensor:
    p = table(vocab, seed)
    law = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for a, b, c in itertools.product(range(vocab), repeat=3):
        law[a, b, c] = (p(())[a] + p((a,))[b] + p((a, b))[c]).exp()
    return law


CASES: dict[str, tuple[Rule, bool, dict[str, Any]]] = {
    "match": (match, False, {"width": 2, "branch": 2}),
    "match-3-children": (match, False, {"width": 3, "branch": 3}),
    "mixed-deterministic": (mixed, False, {"width": 2, "branch": 2}),
    "mixed": (mixed, True, {"width": 2, "branch": 2}),
    "mixed-pruned": (mixed, True, {"width": 2, "branch": 2, "nodes": 4}),
    "mixed-3-children": (mixed, True, {"width": 1, "branch": 3, "nodes": 5}),
    "mixed-chain": (mixed, True, {"width": 1, "branch": 1}),
    "block": (block, True, {"width": 1, "branch": 1}),
    "block-cut": (block, True, {"width": 1, "branch": 1, "nodes": 2}),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("case", list(CASES))
def test_the_output_has_the_targets_law(case: str, vocab: int, seed: int) -> None:
    rule, drawn, options = CASES[case]
    options = options | {"branch": min(options["branch"], vocab)}
    torch.testing.assert_close(
        output_law(rule, vocab, seed, drawn, **options), target_law(vocab, seed), atol=EXACT, rtol=0
    )


@pytest.mark.parametrize("case", ["match", "mixed-3-children", "block"])
def test_the_output_has_the_targets_law_over_five_tokens(case: str) -> None:
    rule, drawn, options = CASES[case]
    options = options | ({"depth": 1} if case == "mixed-3-children" else {})
    torch.testing.assert_close(output_law(rule, 5, 7, drawn, **options), target_law(5, 7), atol=EXACT, rtol=0)


def as_if_drawn(tree: DraftTree) -> DraftTree:
    """The likeliest child tested as if it had been drawn from the whole law: the classic bias."""
    assert tree.logq is not None
    q = torch.full((1, 1, 3), 0.0, dtype=torch.float64)
    first = tree.parents[0] == 0
    q[0, 0, tree.tokens[0][first]] = tree.logq[0][first].double().exp()
    return tree._replace(drawn=torch.where(torch.arange(tree.tokens.shape[1]) == 1, 0, -1)[None], law=q)


def unlikely_ones_dropped(tree: DraftTree) -> DraftTree:
    """Drawn children pruned by what they turned out to be."""
    if tree.law is None or tree.drawn is None:
        return tree
    own = tree.law[0, tree.drawn[0].clamp(min=0)].gather(1, tree.tokens[0][:, None])[:, 0]
    gone = (tree.drawn[0] >= 0) & (own < 0.5)
    for node, parent in enumerate(tree.parents[0].tolist()):
        gone[node] |= parent >= 0 and bool(gone[parent])
    return tree._replace(valid=tree.valid & ~gone)


def test_a_chosen_child_tested_as_if_drawn_is_biased() -> None:
    options = {"width": 1, "branch": 3, "depth": 1, "change": as_if_drawn}
    assert (output_law(mixed, 3, 0, False, **options) - target_law(3, 0)).abs().max() > 1e-3


def test_drawn_children_dropped_by_what_they_are_bias() -> None:
    options = {"width": 1, "branch": 1, "depth": 1, "change": unlikely_ones_dropped}
    assert (output_law(mixed, 3, 0, True, **options) - target_law(3, 0)).abs().max() > 1e-3


def test_a_residual_that_takes_off_the_drawn_token_alone_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(p: Tensor, q: Tensor) -> Tensor:
        return torch.where(p >= q, p, 0.0).log()

    monkeypatch.setattr(accept, "_residual", wrong)
    options = {"width": 1, "branch": 1, "depth": 1}
    assert (output_law(mixed, 3, 0, True, **options) - target_law(3, 0)).abs().max() > 1e-3


def test_a_number_used_for_the_test_and_again_for_the_draw_is_biased() -> None:
    """Reused uniforms: what fails the test is drawn by the same number that failed it."""
    p, q, steps = table(3, 0)(()).exp(), table(3, 1000)(()).exp(), 3000
    law = torch.zeros(3, dtype=torch.float64)
    for y, i in itertools.product(range(3), range(steps)):
        u = (i + 0.5) / steps
        over = (p - q).clamp(min=0)
        again = int(torch.searchsorted(torch.cumsum(over / over.sum(), 0), torch.tensor(u, dtype=torch.float64)))
        law[y if u < float(p[y] / q[y]) else again] += q[y] / steps
    assert (law - p).abs().max() > 3e-3


def test_block_verification_with_a_plain_bonus_is_biased() -> None:
    """The residual belongs to the joint test: a token drawn from p after a rejection gives another law."""

    def wrong(tree: DraftTree, visit: Any) -> Accepted:
        return block(
            tree,
            SimpleNamespace(  # type: ignore[arg-type]
                law=visit.law,
                coin=visit.coin,
                emit=visit.emit,
                running=visit.running,
                draw=lambda scores, wanted: visit.draw(visit.law(torch.tensor([0])), wanted),
            ),
        )

    options = {"width": 1, "branch": 1}
    assert (output_law(wrong, 3, 0, True, **options) - target_law(3, 0)).abs().max() > 1e-3


def accepted_tokens(rule: Rule, seed: int, **options: Any) -> float:
    """Mean guesses kept in the first pass, every way weighed."""
    p, q = table(3, seed), table(3, seed + 1000)
    branches, mean = Branches(), 0.0

    def pick(laws: Tensor) -> Tensor:
        return torch.tensor([branches.choose(row.tolist()) for row in laws])

    for _ in branches.runs():
        target, visit = TableTarget(p), Weighed(branches)
        drafter = TableDrafter(q, target, Sampling(pick), vocab=3, **options)
        report = decode(target, drafter, rule, visit, torch.tensor([[0]]), torch.tensor([1]), Limits(99, 2, 99))  # type: ignore[arg-type]
        mean += branches.weight * report.rounds[0][0]
    return mean


@pytest.mark.parametrize("seed", range(3))
def test_block_verification_keeps_at_least_what_rejection_keeps(seed: int) -> None:
    chains = {"width": 1, "branch": 1}
    assert accepted_tokens(block, seed, **chains) >= accepted_tokens(mixed, seed, **chains) - EXACT


def test_the_mixed_rule_accepts_what_it_says() -> None:
    """p(D) + sum of min(p, q) outside D, one node."""
    p, q = table(3, 4)(()).exp(), table(3, 1004)(()).exp()
    best = int(q.argmax())
    rest = q.clone()
    rest[best] = 0.0
    rest /= rest.sum()
    expected = float(p[best] + torch.minimum(p, rest)[torch.arange(3) != best].sum())
    assert accepted_tokens(mixed, 4, width=1, branch=2, depth=1) == pytest.approx(expected, abs=EXACT)


ROWS = 20_000


@pytest.mark.parametrize("case", ["match", "mixed", "block"])
def test_twenty_thousand_draws(case: str) -> None:
    """The same with the shipped visit and real draws, 20,000 rows at once: first two tokens against p, chi-square."""
    rule, drawn, options = CASES[case]
    vocab, seed = 4, 3
    p, q = table(vocab, seed), table(vocab, seed + 1000)
    torch.manual_seed(11)
    target = TableTarget(p, ROWS)
    visit = Emission(
        torch.zeros(ROWS, 1, dtype=torch.int64), [], StoppingCriteriaList(), max_length=3, do_sample=True, pad=0
    )
    sampling = Sampling(lambda laws: torch.multinomial(laws, 1)[:, 0]) if drawn else None
    drafter = TableDrafter(q, target, sampling, vocab=vocab, **options)
    prompt = torch.zeros(ROWS, 1, dtype=torch.int64)
    decode(target, drafter, rule, visit, prompt, torch.ones(ROWS, dtype=torch.int64), Limits(99, 2, 99))  # type: ignore[arg-type]
    found = torch.zeros(vocab, vocab)
    for a, b in target.texts:
        found[a, b] += 1
    expected = target_law(vocab, seed).sum(-1) * ROWS
    chi = float(((found - expected) ** 2 / expected).sum())
    assert chi < 37.7  # the 0.999 quantile of 15 degrees of freedom


class Fixed:
    """A visit with fixed laws per node, for one row; draws the argmax."""

    def __init__(self, laws: dict[int, list[float]]) -> None:
        self.laws, self.emitted = laws, []

    def law(self, node: Tensor) -> Tensor:
        return torch.tensor([self.laws[int(node)]]).log()

    def draw(self, scores: Tensor, wanted: Tensor) -> Tensor:
        return scores.argmax(-1)

    def coin(self, p: Tensor) -> Tensor:
        raise AssertionError("typical acceptance throws no coin")

    def emit(self, token: Tensor) -> Tensor:
        self.emitted.append(int(token))  # type: ignore[attr-defined]
        return torch.tensor([True])

    def running(self) -> Tensor:
        return torch.tensor([True])


def test_typical_acceptance_keeps_the_longest_typical_path() -> None:
    """root -> 1, 2;  1 -> 0;  2 -> 0, 1. Token 1 is likeliest at the root, but only below 2 a second guess passes."""
    tree = DraftTree(torch.tensor([[0, 1, 2, 0, 0, 1]]), torch.tensor([[-1, 0, 0, 1, 2, 2]]), torch.ones(1, 6).bool())
    peaked, flat = [0.02, 0.02, 0.96], [0.3, 0.3, 0.4]
    visit = Fixed({0: [0.05, 0.6, 0.35], 1: peaked, 2: flat, 3: flat, 4: peaked, 5: peaked})
    kept = typical(tree, visit)
    assert kept.nodes.tolist() == [[0, 2, 4]] and kept.tokens.tolist() == [[2, 0, 2]] == [visit.emitted]
    nothing = typical(tree, Fixed({0: [0.98, 0.01, 0.01]}))
    assert nothing.nodes.tolist() == [[0]] and nothing.tokens.tolist() == [[0]]
