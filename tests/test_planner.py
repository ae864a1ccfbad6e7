"""Plans in use: no plan changes a token, bad guesses cost little, good ones are found again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.infer.accept import Accepted
from headstart.infer.costs import key_of
from headstart.infer.draft_heads import HeadsDrafter, joined
from headstart.infer.draft_merge import merge
from headstart.infer.draft_ngram import PromptLookup, from_lists
from headstart.infer.grow import Budget, Children, Sampling, Shape, best_first, taken
from headstart.infer.learned import DOUBT, FIRST, MEMORY, ON, START, Learned
from headstart.infer.plan import Best, Costs, Plan
from headstart.infer.planner import PROBE, SHARE, Adaptive, Fixed, Planning
from headstart.infer.speculator import Speculator
from headstart.infer.target import Seen, Target
from headstart.infer.tree import DraftTree, depths, validate
from tests.drafters import SOURCES, oracle, untrained
from tests.test_compile import graphs
from tests.test_lossless import TOGETHER, check_counts, counted, padded_batch, prompt
from tests.test_plan import KEY, made
from tests.test_rejection import DRAWING, pair_law
from tests.toys import VOCAB, Scripted, c64, llama

NEW = 14
CHEAP = Plan(KEY, made(slope=0.01, level=0.02))


@pytest.fixture(scope="module")
def model() -> Any:
    return llama().double()


class Restless:
    """A plan that is another one in every step: any depth, any part of the tree, now and then none."""

    name, plain_steps, reads = "restless", 0, 0

    def __init__(self, seed: int, drawn: bool = False) -> None:
        self.dice, self.drawn = random.Random(seed), drawn

    def open(self, budget: Budget, context: int, going: int) -> Budget:
        limit = self.dice.randint(0, 3)

        def more(path: Tensor, depth: int) -> bool:
            assert path.ndim == 2 and depth >= 1
            return depth < limit

        if self.dice.random() < 0.3:
            return budget._replace(depth=min(budget.depth, self.dice.randint(0, 4)), nodes=self.dice.randint(7, 16))
        return budget if self.drawn else budget._replace(more=more)

    def cut(self, tree: DraftTree) -> DraftTree:
        if self.drawn:
            return tree
        n = tree.parents.shape[1]
        worth = torch.rand(tree.parents.shape, generator=torch.Generator().manual_seed(self.dice.randrange(1 << 30)))
        for node in range(1, n):  # below its parent's
            worth[:, node] *= worth.gather(1, tree.parents[:, node : node + 1].clamp(min=0))[:, 0]
        worth[:, 0] = 2.0
        size = self.dice.randint(1, n)
        kept = torch.where(tree.valid, worth, -1.0).sort(dim=1, descending=True, stable=True).indices
        kept = kept[:, :size].sort(dim=1)
        cut = taken(tree, kept.values)
        validate(cut, VOCAB)
        return cut

    def learn(self, accepted: Accepted, going: Any) -> None:
        assert len(going) == len(accepted.count)


class Another(Planning):
    """A planning that hands out a restless planner for every call."""

    def __init__(self) -> None:
        super().__init__(None, 1)
        self.calls = 0

    def begin(self, kind: str, rows: int, drawn: bool) -> Any:
        self.calls += 1
        return Restless(self.calls, drawn)


def planned(fast: Speculator, plan: str) -> Speculator:
    fast.planning = Another() if plan == "restless" else Planning(CHEAP, fast.depth)
    return fast


# the text ------------------------------------------------------------------------------------------------------------


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"input_ids": prompt()}, {"do_sample": False}),
    "sampled": ({"input_ids": prompt()}, {"do_sample": True, **TOGETHER}),
    "batch": (padded_batch(), {"do_sample": False}),
}


@pytest.fixture(scope="module")
def plain(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """What ``generate`` writes, and the state of the generator after it."""
    found = {}
    for name, (inputs, options) in CALLS.items():
        torch.manual_seed(3)
        out = model.generate(**inputs, max_new_tokens=NEW, **options)
        found[name] = (out, torch.get_rng_state())
    return found


@pytest.mark.parametrize("plan", ["restless", "adaptive"])
@pytest.mark.parametrize("source", list(SOURCES))
def test_no_plan_changes_a_token(model: Any, plain: Any, source: str, plan: str) -> None:
    """Greedy, sampled draw for draw, and a padded batch; what is learned goes from call to call."""
    fast = planned(Speculator(model, SOURCES[source](model), nodes=16), plan)
    for name, (inputs, options) in CALLS.items():
        expected, state = plain[name]
        torch.manual_seed(3)
        with counted(model) as widths:
            found = fast.generate(**inputs, max_new_tokens=NEW, **options)
        assert found.tolist() == expected.tolist()
        assert torch.equal(torch.get_rng_state(), state)
        if name != "batch":
            check_counts(fast, widths, expected.shape[1] - inputs["input_ids"].shape[1])
    assert fast.report.plan == plan and fast.report.holds == "the text of plain decoding, whatever the plan"


@pytest.mark.parametrize(("source", "plan"), [("medusa", "restless"), ("eagle3", "adaptive"), ("eagle3", "restless")])
def test_under_rejection_any_plan_keeps_the_law(source: str, plan: str) -> None:
    """1,600 texts of three tokens, chi-square over the first two."""
    small = llama(vocab_size=16, initializer_range=0.08, eos_token_id=None).double()
    rows, options = 400, {"temperature": 1.3, "top_k": 12, "top_p": 0.95}
    ids = torch.tensor([[3, 7, 5]])
    expected = pair_law(small, ids, **options) * 4 * rows
    fast = planned(Speculator(small, DRAWING[source](small), nodes=6, rule="rejection"), plan)
    found = torch.zeros(16, 16, dtype=torch.float64)
    torch.manual_seed(7)
    for _ in range(4):
        out = fast.generate(ids, max_new_tokens=3, do_sample=True, num_return_sequences=rows, pad_token_id=0, **options)
        found.index_put_((out[:, 3], out[:, 4]), torch.ones(rows, dtype=torch.float64), accumulate=True)
    likely = expected >= 5
    pairs = torch.stack([found[likely], expected[likely]], 1)
    rest = torch.stack([found[~likely].sum(), expected[~likely].sum()])[None]
    pairs = torch.cat([pairs, rest])
    chi = float(((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1].clamp(min=1e-9)).sum())
    assert chi < len(pairs) - 1 + 4 * (2 * (len(pairs) - 1)) ** 0.5
    assert "the target's law" in fast.report.holds and "only plan='fixed' gives it again" in fast.report.holds


def test_a_fixed_plan_is_what_there_was_before(model: Any) -> None:
    """The default, and the same trees as without a planner."""
    for source in ("medusa", "prompt-lookup", "draft-model-tree"):
        fast = Speculator(model, SOURCES[source](model), nodes=12)
        fast.generate(prompt(), max_new_tokens=NEW, do_sample=False)
        assert fast.report.plan == "fixed" and fast.report.plain_steps == 0
        first = (fast.report.rounds, fast.report.nodes, fast.report.ranks)
        fast.generate(prompt(), max_new_tokens=NEW, do_sample=False)
        assert first == (fast.report.rounds, fast.report.nodes, fast.report.ranks)
    assert isinstance(Planning(None, 4).begin("greedy", 1, False), Fixed)


def test_unknown_plans_are_refused_with_the_known_ones(model: Any) -> None:
    with pytest.raises(ValueError, match="'adaptve'; known are fixed, adaptive"):
        Speculator(model, "prompt-lookup", plan="adaptve")


# what it costs -------------------------------------------------------------------------------------------------------


class Claimer(Scripted):
    """A scripted drafter that claims 0.9 for every guess; right with a chance that may change on the way."""

    def __init__(self, model: Any, right: Callable[[int], float], **options: Any) -> None:
        super().__init__(model, decoys=1, **options)
        self.chance, self.dice = right, random.Random(0)

    def _truth(self, ids: list[int], depth: int) -> list[int]:
        return [(ids[-1] + 1 + i) % 64 for i in range(depth)]

    def grow(self, root: Tensor, budget: Budget) -> DraftTree:
        self.right = self.dice.random() < self.chance(len(self.rows[0]))
        if budget.depth < 1:
            return super().grow(root, budget)
        tree = super().grow(root, budget)
        return tree._replace(logq=torch.full(tree.parents.shape, 0.9).log())


@dataclass(frozen=True)
class Claiming:
    """Its source."""

    right: Callable[[int], float]
    name: str = "claimer"
    depth: int = 3
    wants: tuple[int, ...] = ()
    chain = False

    def check(self, model: Any) -> list[str]:
        return []

    def drafter(self, model: Any, ends: Tensor, sampling: Sampling | None = None) -> Claimer:
        return Claimer(model, self.right, depth=self.depth)


def decoded(costs: Costs, right: Callable[[int], float], new: int, rows: int = 1) -> tuple[Speculator, float]:
    """C64 with a source right so often: seconds of its passes and drafts, by the nodes of each forward of the target
    and the depth asked of the drafter, over those of plain steps."""
    model, spent = c64(), [0.0]
    fast = Speculator(model, Claiming(right), nodes=16)
    fast.planning = Planning(Plan(KEY, costs), fast.depth)
    ids = torch.tensor([[5]] * rows)
    grow, verify = Claimer.grow, Target.verify

    def drafting(self: Any, root: Tensor, budget: Budget) -> DraftTree:
        tree = grow(self, root, budget)
        spent[0] += costs.draft(rows, int(depths(tree.parents).max()))
        return tree

    def verifying(self: Any, tree: DraftTree) -> Any:
        spent[0] += costs.verify(rows, 64, tree.tokens.shape[1]) + costs.overhead
        return verify(self, tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Claimer, "grow", drafting)
        patch.setattr(Target, "verify", verifying)
        out = fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    assert out.tolist() == [[(5 + i) % 64 for i in range(new + 1)]] * rows
    return fast, spent[0] / (new * costs.plain(rows, 64))


@pytest.mark.parametrize("right", [0.0, 0.05])
@pytest.mark.parametrize(("slope", "level"), [(0.01, 0.01), (0.03, 0.1), (0.2, 0.3), (0.02, 0.9)])
def test_bad_guesses_cost_three_percent_at_most(slope: float, level: float, right: float) -> None:
    """By the forwards that were run and what they cost, over a text of 200 tokens, from the first call on."""
    fast, ratio = decoded(made(slope, level), lambda at: right, 200)
    assert ratio <= 1.03
    assert fast.report.plain_steps > (100 if slope + level > 0.1 else 0) or right > slope + level


@pytest.mark.parametrize(("slope", "level"), [(0.02, 0.9), (0.2, 0.3), (0.02, 0.5)])
def test_no_text_loses_more_than_the_purse_held(slope: float, level: float) -> None:
    """However short it is, and where whole paths are drafted at once."""
    for new in (2, 5, 10, 30):
        assert decoded(made(slope, level), lambda at: 0.0, new)[1] * new <= START + (1.0 + SHARE) * new


def test_bad_guesses_cost_three_percent_at_most_over_many_short_calls() -> None:
    costs = made(0.05, 0.1)
    fast, first = decoded(costs, lambda at: 0.0, 20)
    seen = fast.planning.learned["greedy"]
    lost = START + SHARE * 20 - seen.purse
    assert first - 1.0 == pytest.approx(lost / 20, abs=1e-6)  # the purse knows what was spent
    for _ in range(9):
        fast.generate(torch.tensor([[5]]), max_new_tokens=20, do_sample=False)
    assert START + SHARE * 200 - fast.planning.learned["greedy"].purse <= 0.03 * 200
    assert fast.report.plain_steps > 10  # it has not begun anew


def test_good_guesses_are_taken_from_the_first_step_on() -> None:
    fast, ratio = decoded(made(0.01, 0.02), lambda at: 1.0, 120)
    assert fast.report.plain_steps == 0 and fast.report.tokens_per_pass > 3.5 and ratio < 0.35


def test_guesses_that_become_good_are_found_again() -> None:
    """100 tokens of wrong guesses, then right ones: probing brings the source back."""
    fast, _ = decoded(made(0.02, 0.05), lambda at: float(at > 100), 240)
    kept = [accepted for accepted, _ in fast.report.rounds]
    assert sum(kept[:60]) == 0 and fast.report.plain_steps > 40
    assert kept[-10:] == [3] * 9 + [kept[-1]] and fast.planning.learned["greedy"].on


def test_guesses_that_turn_bad_are_given_up_again() -> None:
    fast, ratio = decoded(made(0.02, 0.05), lambda at: float(at < 80), 240)
    late = [accepted + 1 for accepted, _ in fast.report.rounds][-100:]
    assert late == [1] * 100 and not fast.planning.learned["greedy"].on
    nodes = fast.report.nodes - fast.report.passes  # guesses that were verified
    assert nodes < 7 * (80 / 4 + 45) and ratio < 0.9


def test_rows_of_a_batch_share_a_plan() -> None:
    fast, ratio = decoded(made(0.02, 0.05), lambda at: 0.0, 200, rows=3)
    assert ratio <= 1.03 and fast.report.plain_steps > 100


def test_probes_come_at_growing_distances() -> None:
    known = Learned.nothing(2)
    for _ in range(30):
        known.weigh(1.0, 1.5)
    assert not known.on and known.pause == 64 == known.wait
    known.weigh(3.0, 1.5)
    assert known.on and known.speed == pytest.approx(ON)
    for _ in range(4):
        known.weigh(1.0, 1.5)
    assert not known.on and known.wait == 64  # it was luck
    for _ in range(60):
        known.weigh(3.0, 1.5)
    assert known.on and known.pause == FIRST


# one step ------------------------------------------------------------------------------------------------------------


def stepped(plan: Adaptive, laws: list[list[float]], depth: int, rows: int = 1) -> tuple[DraftTree, int]:
    """A step that grows by ``laws``, one a depth and the same for every node: its tree, and the levels drafted."""
    asked = [0]

    def expand(tokens: Tensor, above: Tensor, at: int) -> Children:
        asked[0] += 1
        law = torch.tensor(laws[at])
        return Children(law.log().expand(rows, 1, -1), (10 * at + 1 + torch.arange(len(law))).expand(rows, 1, -1))

    budget = plan.open(Budget(64, depth, torch.full((rows,), depth)), 64, rows)
    tree = plan.cut(best_first(torch.full((rows,), 7), expand, budget, width=8))
    return tree, asked[0]


def test_drafting_ends_where_one_more_level_does_not_pay() -> None:
    sure, unsure = [[0.9, 0.05]] * 6, [[0.9, 0.05], [0.2, 0.1], [0.2, 0.1], [0.2, 0.1], [0.2, 0.1], [0.2, 0.1]]
    for laws, levels in ((sure, (4, 6)), (unsure, (2, 3))):
        plan = Adaptive(made(0.001, 0.12), Learned.nothing(6), 1)
        plan.learned.purse = 9.0
        assert levels[0] <= stepped(plan, laws, 6)[1] <= levels[1]
    plan = Adaptive(made(0.001, 2.5), Learned.nothing(6), 1)  # drafting is dearer than the purse allows
    assert stepped(plan, sure, 6)[1] == 0 and plan.plain_steps == 1


def test_dear_passes_get_small_trees_and_cheap_ones_large_ones() -> None:
    laws = [[0.6, 0.2, 0.1, 0.05]] * 4
    sizes = []
    for slope in (0.0005, 0.02, 0.1, 0.9):
        plan = Adaptive(made(slope, 0.001), Learned.nothing(4), 1)
        plan.learned.purse = 9.0
        sizes.append(stepped(plan, laws, 4)[0].tokens.shape[1])
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 16 > sizes[2] > 1 == sizes[3]


def test_no_step_risks_more_than_the_purse_holds() -> None:
    laws = [[0.6, 0.2, 0.1, 0.05]] * 4
    for purse in (0.05, 0.2, 0.5, 2.0):
        costs = made(0.03, 0.1)
        plan = Adaptive(costs, Learned.nothing(4), 1)
        plan.learned.purse = purse
        tree, levels = stepped(plan, laws, 4)
        assert costs.step(1, 64, tree.tokens.shape[1], levels) / costs.plain(1, 64) - 1.0 <= purse + 1e-9
        assert (levels == 0) == (purse < 0.13)


def test_what_is_kept_of_guesses_moves_the_calibration() -> None:
    plan = Adaptive(made(0.001, 0.001), Learned.nothing(2), 1)
    plan.learned.purse = 9.0
    for _ in range(20):
        tree, _ = stepped(plan, [[0.9]], 1)
        assert tree.tokens.shape[1] == 2
        plan.learn(Accepted(torch.tensor([[0]]), torch.tensor([[5]]), torch.tensor([1])), [True])
        if kept_of(plan.learned) == 0 and plan.learned.claimed[0][0] > 6:
            break
    known = plan.learned
    assert known.claimed[0][0] > 6 and kept_of(known) == 0 and sum(known.claimed[1]) == 0
    before = copy.deepcopy(known.claimed)
    stepped(plan, [[0.9]], 1)
    plan.learn(Accepted(torch.tensor([[0, 1]]), torch.tensor([[5, 6]]), torch.tensor([2])), [False])
    assert known.claimed == [[MEMORY * x for x in row] for row in before]  # a stop cuts what was on offer
    assert kept_of(known) == 0


def test_levels_are_held_to_what_they_brought() -> None:
    """Claims that deeper levels do not keep: after some steps they are hardly drafted, and the first one still is."""
    plan, levels = Adaptive(made(0.01, 0.12), Learned.nothing(3), 1), []
    plan.learned.purse = 9.0
    for _ in range(40):
        levels.append(stepped(plan, [[0.7, 0.1]] * 3, 3)[1])
        plan.learn(Accepted(torch.tensor([[0, 1]]), torch.tensor([[5, 6]]), torch.tensor([2])), [True])
    assert levels[0] == 3 and sum(levels[-20:]) <= 24  # now and then it is tried again
    assert plan.learned.brought[1][1] > 1 > plan.learned.brought[1][0] and plan.learned.brought[2][0] == 0


def test_sources_of_a_merge_are_asked_one_after_the_other() -> None:
    """Each has its own levels: three are paid for, not the sum, and hopes are of the levels there are."""
    costs = made(0.001, 0.05)
    plan = Adaptive(costs, Learned.nothing(5), 1)
    plan.learned.purse = 9.0
    budget, asked = plan.open(Budget(64, 3, torch.tensor([3])), 64, 1), []

    def expand(tokens: Tensor, above: Tensor, depth: int, first: int) -> Children:
        asked.append((first, depth))
        return Children(torch.tensor([[[0.8, 0.1]]]).log(), first + 10 * depth + torch.arange(2)[None, None])

    trees = [best_first(torch.tensor([7]), partial(expand, first=first), budget, width=4) for first in (100, 200)]
    tree = plan.cut(merge(trees, 64))
    assert asked == [(first, depth) for first in (100, 200) for depth in range(3)]
    plan.learn(Accepted(torch.tensor([[0]]), torch.tensor([[5]]), torch.tensor([1])), [True])
    spent = 9.0 + 1.0 + SHARE - plan.learned.purse
    assert spent == pytest.approx(costs.step(1, 64, tree.tokens.shape[1], 3) / costs.plain(1, 64))
    assert [hoped > 0 for _, hoped in plan.learned.brought] == [False, True, True, False, False]


def test_a_merge_with_a_fixed_shape_goes_with_every_rule(model: Any) -> None:
    """Nothing is drawn in a merge, and its nodes are never fewer than the shape has."""
    source = SOURCES["medusa-shape"](model)
    fast = Speculator(model, ["prompt-lookup", source], rule="rejection", nodes=12)
    fast.planning = Planning(Plan(KEY, made(slope=0.2, level=0.02)), fast.depth)
    torch.manual_seed(0)
    out = fast.generate(prompt(12), max_new_tokens=NEW, do_sample=True, pad_token_id=0)
    assert out.shape[1] > 12 + 1 and fast.report.lossless and fast.report.plan == "adaptive"


def test_all_levels_of_a_drawn_tree_are_paid_for() -> None:
    """Four nodes of five levels: what was drafted and not kept took its time too."""
    costs = made(0.01, 0.1)
    plan = Adaptive(costs, Learned.nothing(5), 1, drawn=True)
    plan.learned.purse = 9.0
    budget = plan.open(Budget(4, 5, torch.tensor([5])), 64, 1)
    assert (budget.nodes, budget.depth, budget.more) == (4, 5, None)  # nothing was seen yet: the largest
    parents = torch.tensor([[-1, 0, 0, 1]])
    tree = DraftTree(torch.zeros_like(parents), parents, parents > -2, torch.full(parents.shape, 0.5).log())
    assert plan.cut(tree) is tree
    plan.learn(Accepted(torch.tensor([[0]]), torch.tensor([[5]]), torch.tensor([1])), [True])
    assert 9.0 + 1.0 + SHARE - plan.learned.purse == pytest.approx(costs.step(1, 64, 4, 5) / costs.plain(1, 64))


def test_a_probe_is_small() -> None:
    laws = [[0.6, 0.2, 0.1, 0.05]] * 4
    for on in (True, False):
        plan = Adaptive(made(0.0005, 0.001), Learned.nothing(4), 1)
        plan.learned.purse, plan.learned.on = 9.0, on
        tree, levels = stepped(plan, laws, 4)
        assert (tree.tokens.shape[1] <= PROBE[0] and levels <= PROBE[1]) is not on


def test_what_was_learned_greedily_weighs_little_elsewhere() -> None:
    known = Learned.nothing(2)
    known.claimed[0][1], known.kept[0][1], known.brought[1] = 20.0, 10.0, [5.0, 8.0]
    known.tokens, known.cost, known.steps, known.purse = 2.0, 1.2, 90, 1.0
    planning = Planning(Plan(KEY, made(0.02, 0.05), known.as_dict()), 2)
    greedy, sampled = (planning.begin(kind, 1, False) for kind in ("greedy", "match"))
    assert isinstance(greedy, Adaptive) and isinstance(sampled, Adaptive)
    assert greedy.learned == known and (greedy.learned.speed, sampled.learned.speed) == (2.0 / 1.2, ON)
    assert (sampled.learned.claimed[0][1], sampled.learned.kept[0][1]) == (20.0 * DOUBT, 10.0 * DOUBT)
    assert sampled.learned.steps == 0 and sampled.learned.purse == 1.0 and sampled.learned.on


def kept_of(known: Learned) -> float:
    return sum(map(sum, known.kept))


def test_a_source_without_claims_is_verified_whole_or_not_at_all() -> None:
    """Lookahead's comb must not lose teeth."""
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]])
    tree = DraftTree(parents + 1, parents, torch.ones_like(parents, dtype=torch.bool))
    plan = Adaptive(made(0.05, 0.0), Learned.nothing(3), 1)
    plan.open(Budget(16, 3, torch.tensor([3])), 64, 1)
    assert plan.cut(tree).tokens.shape[1] == 6
    plan.learned.purse = 0.1
    assert plan.open(Budget(16, 3, torch.tensor([3])), 64, 1).depth == 0 and plan.plain_steps == 1
    plan = Adaptive(made(0.05, 0.0), Learned.nothing(3), 1)  # one that has not seen how large these trees are
    plan.learned.purse = 0.1
    plan.open(Budget(16, 3, torch.tensor([3])), 64, 1)
    assert plan.cut(tree).tokens.shape[1] == 1 and plan.plain_steps == 1


# what it rests on ----------------------------------------------------------------------------------------------------


def test_lookup_claims_more_for_a_longer_match() -> None:
    drafter = PromptLookup(longest=3).drafter(None, torch.zeros(0))
    drafter.start(torch.tensor([[1, 2, 3, 8, 3, 9, 1, 2, 3]]), torch.tensor([9]), 99)
    tree = drafter.grow(torch.tensor([3]), Budget(16, 4, torch.tensor([4])))
    assert tree.logq is not None and tree.tokens[0, 1] == 8
    claimed = tree.logq.exp()[0].tolist()
    assert claimed[1] == pytest.approx(1 - 0.5**3)  # three tokens matched
    other = tree.tokens[0].tolist().index(9)
    assert tree.parents[0, other] in (0, 2)
    children = [c for c, p in zip(claimed, tree.parents[0].tolist(), strict=True) if p == 0]
    assert sum(children) <= 1.0


def test_a_merge_claims_what_its_sources_claim() -> None:
    root = torch.tensor([9])
    one = from_lists([([9, 1, 2], [-1, 0, 1])], root, [[0.0, -0.5, -0.25]])
    two = from_lists([([9, 1, 3], [-1, 0, 0])], root, [[0.0, -0.1, -2.0]])
    found = merge([one, two], 8)
    assert found.tokens[0].tolist() == [9, 1, 2, 3] and found.logq is not None
    assert found.logq[0].tolist() == pytest.approx([0.0, -0.1, -0.25, -2.0])
    silent = from_lists([([9, 4], [-1, 0])], root)
    assert merge([one, silent], 8).logq is None
    assert merge([one, from_lists([([9], [-1])], root)], 8).logq is not None  # nothing to say, nothing to claim


def test_steps_without_guesses_ask_nothing_of_the_heads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens are taken in at once when guessing goes on, and give what they give one by one."""
    heads = untrained("eagle3")(model)
    calls: list[int] = []
    refresh = type(heads).refresh

    def noting(self: Any, features: Tensor, *rest: Any) -> Tensor:
        calls.append(features.shape[1])
        return refresh(self, features, *rest)

    monkeypatch.setattr(type(heads), "refresh", noting)
    fast = Speculator(model, heads, nodes=8)
    fast.planning = Planning(Plan(KEY, made(5.0, 5.0)), fast.depth)
    fast.generate(prompt(), max_new_tokens=20, do_sample=False)
    assert calls == [8] and fast.report.plain_steps == fast.report.steps - 1  # the last one has no room for guesses


def test_joined_steps_leave_no_gaps() -> None:
    first = Seen(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]), torch.arange(6.0).reshape(2, 3, 1))
    second = Seen(torch.tensor([[5], [6]]), torch.tensor([1, 1]), torch.tensor([[[8.0]], [[9.0]]]))
    third = Seen(torch.tensor([[7], [0]]), torch.tensor([1, 0]), torch.tensor([[[10.0]], [[11.0]]]))
    found = joined([first, second, third])
    assert found.count.tolist() == [5, 2] and found.tokens.tolist()[0] == [1, 2, 3, 5, 7]
    assert found.tokens[1, :2].tolist() == [4, 6] and found.features is not None
    assert found.features[0, :, 0].tolist() == [0, 1, 2, 8, 10] and found.features[1, :2, 0].tolist() == [3, 9]
    assert joined([first]) is first


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle", "eagle3"])
@torch.no_grad()
def test_heads_guess_the_same_after_steps_without_guesses(model: Any, name: str) -> None:
    """Two drafters see the same steps, ragged ones: one grows a tree after each, the other only at the end."""
    heads = untrained(name)(model)
    source = Speculator(model, heads, nodes=8).source
    g = torch.Generator().manual_seed(0)
    features = torch.randn(2, 20, len(source.wants) * 64, generator=g, dtype=torch.float64)
    tokens = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    budget = Budget(8, 2, torch.tensor([2, 2]))
    trees = []
    for eager in (True, False):
        drafter: HeadsDrafter = source.drafter(model, torch.zeros(0, dtype=torch.int64))
        drafter.start(tokens[:, :6], torch.tensor([6, 6]), 64)
        drafter.observe(Seen(tokens[:, 1:6], torch.tensor([5, 5]), features[:, :5]))
        at = [5, 5]
        for counts in ([3, 1], [1, 1], [1, 1], [2, 3]):
            k = max(counts)
            picked = [torch.stack([x[row, at[row] : at[row] + k] for row in (0, 1)]) for x in (tokens, features)]
            tree = drafter.grow(tokens[:, 0], budget) if eager else trees[0]
            drafter.observe(Seen(picked[0], torch.tensor(counts), picked[1], tree))
            at = [a + c for a, c in zip(at, counts, strict=True)]
        trees.append(drafter.grow(tokens[:, 0], budget))
    assert torch.equal(trees[0].tokens, trees[1].tokens) and torch.equal(trees[0].parents, trees[1].parents)
    torch.testing.assert_close(trees[0].logq, trees[1].logq)


def test_compiled_passes_have_two_sizes() -> None:
    """One for trees, one for plain steps, whatever the plan cuts."""
    model = llama(num_hidden_layers=1).double()
    fast = Speculator(model, SOURCES["medusa"](model), nodes=12, compile="eager", plan=_here(model, "medusa", 12))

    def calls() -> None:
        for plan in (None, Another()):
            fast.planning = plan or fast.planning
            out = fast.generate(prompt(), max_new_tokens=NEW, do_sample=False)
            assert out.tolist() == model.generate(prompt(), max_new_tokens=NEW, do_sample=False).tolist()

    assert graphs(calls) == 2


def _here(model: Any, source: str, nodes: int) -> Plan:
    """A plan whose key is that of a compiled Speculator, so that nothing is measured."""
    plain = Speculator(model, SOURCES[source](model), nodes=nodes)
    return Plan(key_of(plain) | {"compiled": "eager"}, made(nodes=nodes))


def test_compiled_heads_fill_the_best_static_tree_of_a_plan() -> None:
    model = llama(num_hidden_layers=1).double()
    best = Best(Shape.of([[0], [1], [0, 0]]), 2, 2.0, 1.5)
    plan = _here(model, "medusa", 12)._replace(best=best)
    fast = Speculator(model, SOURCES["medusa"](model), nodes=12, compile="eager", plan=plan)
    assert fast.nodes == 4 and fast.source.shape == best.shape
    expected = model.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    assert fast.generate(prompt(), max_new_tokens=NEW, do_sample=False).tolist() == expected.tolist()


def test_an_oracle_keeps_its_tokens_a_pass_under_an_adaptive_plan(model: Any) -> None:
    fast = Speculator(model, oracle(model, depth=4), nodes=64)
    fast.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    fixed = fast.report.tokens_per_pass
    fast.planning = Planning(CHEAP, fast.depth)
    fast.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    assert fast.report.tokens_per_pass == fixed and fast.report.plain_steps == 0
