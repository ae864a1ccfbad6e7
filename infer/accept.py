"""Rules that turn a verified tree into emitted tokens. Pure: all they know of the target comes through a Visit.

Legend: B rows, n nodes, k path length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.infer.tree import DraftTree, depths, path_to

TINY = 1e-9  # a residual lighter than this is rounding: the draft's law is the target's


class Accepted(NamedTuple):
    """The path that was kept. ``tokens[:, i]`` follows ``nodes[:, i]``; the last emitted token is the next root."""

    nodes: Tensor  # [B, k] path from the root, -1 padded
    tokens: Tensor  # [B, k] emitted tokens, -1 padded
    count: Tensor  # type: ignore[assignment]  # [B] tokens emitted; 0 = the row was finished before


class Visit(Protocol):
    """All a rule may ask. Built from generate's processors, stopping criteria and generator."""

    def law(self, node: Tensor) -> Tensor:
        """[B] nodes -> [B, V] processed float32 scores after the node's own path; -1 = the row is not visited."""

    def draw(self, scores: Tensor, wanted: Tensor) -> Tensor:
        """[B, V] scores -> [B] tokens of the rows ``wanted`` [B] bool; argmax when greedy."""

    def coin(self, p: Tensor) -> Tensor:
        """[B] chances -> [B] bool; "match" never asks."""

    def emit(self, token: Tensor) -> Tensor:
        """[B] tokens, -1 = none -> [B] bool: the row goes on (budget, end tokens, criteria)."""

    def running(self) -> Tensor:
        """[B] bool: rows not finished when the step began."""


Rule = Callable[[DraftTree, Visit], Accepted]


def match(tree: DraftTree, visit: Visit) -> Accepted:
    """Draw from the target at every visited node, in order, and follow the child that was guessed.

    The target's own sampler decides, so the output is the target's own, token for token and draw for draw: recursive
    rejection sampling against point masses, in its "sample and match" form. Works for any tree and any processor.
    """
    guessed = _children(tree)  # a tree is small: on the host, lookups cost less than operations on tensors
    at = [0 if on else -1 for on in visit.running().tolist()]
    nodes, tokens = [], []
    while max(at) >= 0:
        node = torch.tensor(at)
        token = _drawn(visit, visit.law(node), node >= 0)
        nodes.append(node)
        tokens.append(token)
        goes_on = visit.emit(token).tolist()
        step = zip(guessed, at, token.tolist(), goes_on, strict=True)
        at = [children.get((here, chosen), -1) if on and here >= 0 else -1 for children, here, chosen, on in step]
    return _accepted(tree, nodes, tokens)


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """Of each row: (parent, token) -> the first child of that parent that guessed this token."""
    lists = zip(tree.parents.tolist(), tree.tokens.tolist(), tree.valid.tolist(), strict=True)
    rows = [list(zip(*row, range(len(row[0])), strict=True)) for row in lists]
    return [{(parent, token): i for parent, token, there, i in reversed(row) if there} for row in rows]


class Walker(Protocol):
    """What ``walk`` asks: laws and draws that need nothing from the host."""

    def law_at(self, node: Tensor) -> Tensor:
        """[B] nodes >= 0 -> [B, V] processed float32 scores."""

    def draw_at(self, scores: Tensor) -> Tensor:
        """[B, V] -> [B] tokens, a draw for every row; the generator is set back later to where ``match`` leaves it."""

    def open_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B] bool rows not finished, [B] tokens each still wants, [e] end tokens."""


def walk(tree: DraftTree, visit: Walker, depth: int) -> Accepted:
    """``match`` for a tree no deeper than ``depth``, without asking the host anything on the way.

    It takes as many steps as the deepest path could, and drops what came after the end: on an accelerator that is
    cheaper than a sync for each token. Needs processors that look at the scores alone, and no stop but end tokens and
    the number of tokens.
    """
    alive, wanted, ends = visit.open_rows()
    node = torch.zeros_like(tree.tokens[:, 0])
    nodes, tokens = [], []
    for i in range(depth + 1):
        token = visit.draw_at(visit.law_at(node))
        nodes.append(torch.where(alive, node, -1))
        tokens.append(torch.where(alive, token, -1))
        child = _child(tree, node, token)
        alive = alive & (child >= 0) & (i + 1 < wanted) & ~torch.isin(token, ends)
        node = child.clamp(min=0)
    return _accepted(tree, nodes, tokens)


def on_host(tree: DraftTree) -> DraftTree:
    """Structure and tokens on the CPU, read at once; laws stay where they are."""
    if tree.tokens.device.type == "cpu":
        return tree
    drawn = torch.full_like(tree.parents, -1) if tree.drawn is None else tree.drawn
    tokens, parents, valid, drawn = torch.stack([tree.tokens, tree.parents, tree.valid.long(), drawn]).cpu()
    return tree._replace(
        tokens=tokens, parents=parents, valid=valid.bool(), logq=None, drawn=None if tree.drawn is None else drawn
    )


def mixed(tree: DraftTree, visit: Visit) -> Accepted:
    """Rejection sampling where a node has chosen children D and one drawn from q, the draft's law outside D.

    The drawn child y is tested first, with chance min(1, p(y) / q(y)); after a rejection the next token comes from
    max(p - q, 0), and a child that was guessed is followed. The output has the target's law p, whatever q is, as long
    as y was drawn from it (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). Accepts
    p(D) + sum of min(p, q) outside D. Without a drawn child this is ``match``.
    """
    node = torch.where(visit.running().to(tree.tokens.device), 0, -1)  # [B]
    nodes, tokens = [], []
    while bool((node >= 0).any()):
        scores = visit.law(node)
        open_, guess = node >= 0, torch.full_like(node, -1)
        if tree.drawn is not None and tree.law is not None:
            places = tree.valid & (tree.parents == node[:, None]) & (tree.drawn >= 0)
            has = places.any(1) & open_
            place = places.int().argmax(1)
            p, q = torch.softmax(scores, -1), _row(tree.law, _at(tree.drawn, place)).to(scores.device)
            y = _at(tree.tokens, place)
            chance = _ratio(_at(p, y), _at(q, y))
            took = has & visit.coin(torch.where(has.to(chance.device), chance, 0.0)).to(has.device)
            guess = torch.where(took, y, guess)
            scores = torch.where((has & ~took).to(scores.device)[:, None], _residual(p, q), scores)
        drawn = open_ & (guess < 0)
        token = torch.where(drawn, _drawn(visit, scores, drawn), guess)
        nodes.append(node)
        tokens.append(token)
        goes_on = visit.emit(token)
        node = torch.where(goes_on.to(node.device), _child(tree, node, token), -1)
    return _accepted(tree, nodes, tokens)


def block(tree: DraftTree, visit: Visit) -> Accepted:
    """Block verification of chains whose guesses were all drawn (Sun et al., arXiv 2403.10444).

    The longest prefix is kept that a joint test allows, never the first failure's: accepts at least what token-wise
    rejection accepts, and the output has the target's law. The length of a chain may depend on its tokens only
    through what came before the place where it ends.
    """
    running = visit.running().to(tree.tokens.device)
    count = torch.where(running, tree.valid.sum(1) - 1, -1)  # [B] guesses of each row's chain; -1 = not visited
    if tree.drawn is None or tree.law is None:
        if int(count.max()) > 0:
            raise ValueError(
                "this source calls its trees chains of drawn guesses (`chain`), but they were chosen: set `chain` to "
                "False, or use rule='match'"
            )
        return match(tree, visit)
    if not bool(running.any()):
        return _accepted(tree, [], [])
    nodes = range(int(count.max()) + 1)
    laws = [visit.law(torch.where(count >= i, i, -1)) for i in nodes]  # scores [B, V] of each node
    home = laws[0].device
    qs = [_row(tree.law, tree.drawn[:, i]).to(home) for i in nodes[1:]]  # what guess i + 1 was drawn from
    left = [torch.ones(count.shape, dtype=torch.float64, device=home)]  # a_i [B]
    for i, q in enumerate(qs, 1):
        x = tree.tokens[:, i]
        ratio = _ratio(_at(torch.softmax(laws[i - 1], -1), x), _at(q, x), cap=False)
        left.append((left[-1] * ratio).clamp(max=1.0))
    # From the far end: the longest i whose coin falls; h_0 = 1.
    guesses = count.to(home)
    kept, bonus = torch.full_like(guesses, -1), torch.zeros_like(laws[0])
    for i in reversed(nodes):
        here, last = (guesses >= i) & (kept < 0), guesses == i
        chance, rest = left[i].to(laws[i].dtype), laws[i]
        if i < len(qs):
            over = (chance[:, None] * torch.softmax(laws[i], -1) - qs[i].to(chance.dtype)).clamp(min=0)  # [B, V]
            mass = over.sum(-1)
            inner = torch.where(chance >= 1, torch.ones_like(mass), mass / (mass + 1 - chance).clamp(min=TINY))
            chance = torch.where(last, chance, inner)
            rest = torch.where((last | (mass <= TINY))[:, None], laws[i], over.log())
        fell = here if i == 0 else here & visit.coin(torch.where(here, chance, 0.0)).to(home)
        kept = torch.where(fell, i, kept)
        bonus = torch.where(fell[:, None], rest, bonus)
    kept = kept.to(count.device)
    steps = torch.arange(len(laws), device=kept.device)
    return _emit_path(tree, visit, torch.where(steps <= kept[:, None], steps, -1), bonus)


def typical(tree: DraftTree, visit: Visit, epsilon: float = 0.09, delta: float = 0.3) -> Accepted:
    """Medusa's acceptance (arXiv 2401.10774, section 3.3.1): LOSSY, a guess is kept where the target finds it typical.

    A child x is kept if p(x) > min(epsilon, delta exp(-H(p))); of the kept paths the longest one is followed, of
    equally long ones the likeliest; the token after it is drawn from the target.
    """
    running = visit.running().to(tree.tokens.device)
    rows, n = tree.tokens.shape
    score = torch.full((rows, n), -torch.inf, dtype=torch.float64, device=tree.tokens.device)  # path, -inf = not kept
    score[:, 0] = torch.where(running, 0.0, -torch.inf)
    depth, laws = depths(tree.parents), {}
    for i in range(n):
        here = score[:, i] > -torch.inf
        if not bool(here.any()):
            continue
        laws[i] = visit.law(torch.where(here, i, -1))
        logp = torch.log_softmax(laws[i].double(), -1)
        entropy = torch.special.entr(logp.exp()).sum(-1)
        bar = (delta * (-entropy).exp()).clamp(max=epsilon).to(score.device)
        children = tree.valid & (tree.parents == i) & here[:, None]
        own = logp.gather(1, tree.tokens.to(logp.device)).to(score.device)  # [B, n]
        kept = children & (own.exp() > bar[:, None])
        score = torch.where(kept, score[:, i : i + 1] + own, score)
    if not laws:
        return _accepted(tree, [], [])
    longest = torch.where(score > -torch.inf, depth, -1).amax(1, keepdim=True)
    best = torch.where(depth == longest, score, -torch.inf).argmax(1)  # [B]
    bonus = torch.stack([laws[at][row] for row, at in enumerate(best.tolist())])  # [B, V]
    path = path_to(tree.parents, torch.where(running, best, -1), int(longest.max()) + 1)
    return _emit_path(tree, visit, path, bonus)


def _emit_path(tree: DraftTree, visit: Visit, path: Tensor, bonus: Tensor) -> Accepted:
    """Emits the guesses on each row's ``path`` [B, k], then one token drawn from ``bonus`` [B, V] scores."""
    nodes, tokens = [], []
    goes_on = path[:, 0] >= 0 if path.shape[1] else torch.zeros_like(tree.valid[:, 0])
    for i in range(path.shape[1]):
        here = goes_on & (path[:, i] >= 0)
        after = path[:, i + 1] if i + 1 < path.shape[1] else torch.full_like(path[:, i], -1)
        last = here & (after < 0)
        token = torch.where(here & ~last, _at(tree.tokens, after), _drawn(visit, bonus, last))
        nodes.append(torch.where(here, path[:, i], -1))
        tokens.append(token)
        goes_on = visit.emit(token).to(here.device) & here & ~last
    return _accepted(tree, nodes, tokens)


def _drawn(visit: Visit, scores: Tensor, wanted: Tensor) -> Tensor:
    """Tokens [B] drawn for the rows ``wanted`` [B], -1 elsewhere; no draw where nobody wants one."""
    if not bool(wanted.any()):
        return torch.full(wanted.shape, -1, device=wanted.device)
    return torch.where(wanted, visit.draw(scores, wanted).to(wanted.device), -1)


def _child(tree: DraftTree, node: Tensor, token: Tensor) -> Tensor:
    """The child of ``node`` [B] that guessed ``token`` [B], -1 = none."""
    same = tree.valid & (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
    return torch.where(same.any(1) & (node >= 0), same.int().argmax(1), -1)


def _accepted(tree: DraftTree, nodes: list[Tensor], tokens: list[Tensor]) -> Accepted:
    """Columns [B] of a path as one Accepted; a row that emitted nothing at a column has -1 there."""
    if not nodes:
        none = torch.full_like(tree.tokens[:, :1], -1)
        return Accepted(none, none, torch.zeros_like(none[:, 0]))
    path, emitted = torch.stack(nodes, 1), torch.stack(tokens, 1)
    return Accepted(path, emitted, (path >= 0).sum(1))


def _at(values: Tensor, index: Tensor) -> Tensor:
    """[B, m] values at [B] places -> [B]."""
    return values.gather(1, index.clamp(min=0).to(values.device)[:, None])[:, 0]


def _row(laws: Tensor, index: Tensor) -> Tensor:
    """[B, r, V] laws -> the row [B, V] each batch row asks for."""
    return laws[torch.arange(laws.shape[0], device=laws.device), index.clamp(min=0).to(laws.device)]


def _ratio(p: Tensor, q: Tensor, cap: bool = True) -> Tensor:
    """p / q [B], with ``cap`` at most one; q is never zero for a token that was drawn from it."""
    ratio = p / q.to(p).clamp(min=torch.finfo(p.dtype).tiny)
    return ratio.clamp(max=1.0) if cap else ratio


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Scores [B, V] whose softmax is max(p - q, 0), normalised; p itself where rounding left nothing."""
    over = (p - q).clamp(min=0)
    return torch.where(over.sum(-1, keepdim=True) > TINY, over, p).log()


RULES: dict[str, Rule] = {"match": match, "rejection": mixed, "typical": typical}
"""By name. "rejection" becomes ``block`` for a source whose trees are chains."""
LOSSY = {"typical"}
