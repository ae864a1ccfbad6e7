"""Pictures in the terminal: the tree of a pass, and text coloured by how many tokens each pass gave.

Both look over the shoulder of a drafter: what it guesses, and what it is shown afterwards. One row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.infer.drafter import Drafter
    from headstart.infer.speculator import Speculator
    from headstart.infer.target import Seen
    from headstart.infer.tree import DraftTree

STYLES = ("", "cyan", "green", "yellow", "magenta")  # of 1, 2, 3, 4, and 5 tokens a pass or more
PARTIAL = "\ufffd"  # what stands for a character of which only some bytes are there


class Node(NamedTuple):
    """A guess."""

    token: int
    parent: int  # -1 = the root, which is the last known token
    draft: float | None  # probability given the parent, where the drafter has one
    target: float  # the same by the target, before temperature and the like
    kept: bool


class Pass(NamedTuple):
    """One verified tree and what came of it."""

    number: int  # from 1
    nodes: list[Node]  # the root first
    emitted: list[int]  # the tokens it gave, of which the last is the bonus token


@dataclass
class Watch:
    """A source of guesses that notes what its drafters do, and is otherwise the one it stands for."""

    source: Any
    told: Callable[[int], None] | None = None  # after every pass, with the tokens it gave
    passes: int = 0
    best: Pass | None = None  # the first of those that gave the most
    _paths: dict[tuple[int, ...], float] = field(
        default_factory=dict, init=False
    )  # guessed path -> draft probability of its end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def drafter(self, *args: Any, **kwargs: Any) -> "Drafter":
        """As the source's, watched."""
        self.passes, self.best = 0, None
        made: Drafter = _Watched(self.source.drafter(*args, **kwargs), self)
        return made

    def grew(self, tree: "DraftTree") -> None:
        """Notes the draft probabilities by path: the loop may prune or renumber nodes before it verifies them."""
        self._paths = {}
        if tree.logq is not None:
            for path, logq in zip(_paths(tree), tree.logq[0].tolist(), strict=True):
                self._paths.setdefault(path, math.exp(logq))

    def saw(self, seen: "Seen") -> None:
        """A pass is over."""
        assert seen.tree is not None
        self.passes += 1
        emitted = seen.tokens[0, : int(seen.count[0])].tolist()
        if self.best is None or len(emitted) > len(self.best.emitted):
            self.best = Pass(self.passes, _nodes(seen, emitted, self._paths), emitted)
        if self.told is not None:
            self.told(len(emitted))


class _Watched:
    """A drafter that tells ``watch`` what it does."""

    def __init__(self, drafter: Any, watch: Watch) -> None:
        self._drafter, self._watch = drafter, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def observe(self, seen: "Seen") -> None:
        """On to the drafter; a step, not a chunk of the prompt, is noted."""
        self._drafter.observe(seen)
        if seen.tree is not None:
            self._watch.saw(seen)

    def grow(self, root: "Tensor", budget: Any) -> "DraftTree":
        """The drafter's tree below root [1]."""
        tree: DraftTree = self._drafter.grow(root, budget)
        self._watch.grew(tree)
        return tree


class PassStreamer:
    """A streamer of one row that prints what each pass gave in a colour of its own; characters come out whole."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self._tokenizer, self._console = tokenizer, console
        self._ids: list[int] = []
        self._said, self._prompt, self._style = "", True, ""

    def put(self, value: "Tensor") -> None:
        """The prompt first, which is not printed; then tokens, which wait for the end of their pass."""
        if not self._prompt:
            self._ids += value.flatten().tolist()
        self._prompt = False

    def passed(self, tokens: int) -> None:
        """A pass that gave so many tokens is over."""
        self._style = style_of(tokens)
        text = self._text()
        self._print(text.rstrip(PARTIAL))
        if text.endswith("\n"):  # decoded anew line by line: a long text would take ever longer
            self._ids, self._said = [], ""

    def end(self) -> None:
        """Prints what is left, and a line end."""
        self._print(self._text())
        self._console.print()
        self._ids, self._said, self._prompt = [], "", True

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text

    def _print(self, text: str) -> None:
        fresh = Text(text[len(self._said) :], style=self._style)
        self._console.print(fresh, end="", soft_wrap=True, highlight=False)
        self._said = text


def watched(fast: "Speculator", told: Callable[[int], None] | None = None) -> Watch:
    """Lets ``fast`` guess under a watch from now on."""
    watch = Watch(fast.source, told)
    fast.source = watch
    return watch


def style_of(tokens: int) -> str:
    """The colour of text of which a pass gave so many tokens."""
    return STYLES[min(max(tokens, 1), len(STYLES)) - 1]


def legend() -> Text:
    """What the colours mean."""
    counts = [*map(str, range(1, len(STYLES))), f"{len(STYLES)} or more"]
    parts = [Text(count, style=style) for count, style in zip(counts, STYLES, strict=True)]
    return Text("coloured by the tokens a pass gave: ").append_text(Text(", ").join(parts))


def drawn(step: Pass, passes: int, tokenizer: Any) -> Tree:
    """The tree of a pass: kept guesses in green, with the draft's and the target's probability of each."""
    head = f"pass {step.number} of {passes}: {len(step.nodes) - 1} guesses, {len(step.emitted)} tokens; draft > target"
    top = Tree(Text(head, style="bold"))
    places: list[Tree] = []
    for node in step.nodes:
        label = Text(_shown(node.token, tokenizer), style="bold green" if node.kept else "")
        if node.parent >= 0:
            draft = "" if node.draft is None else f"{node.draft:.2f}"
            label.append(f"  {draft} > {node.target:.2f}", style="green" if node.kept else "dim")
        above = top if node.parent < 0 else places[node.parent]
        places.append(above.add(label, guide_style="green" if node.kept else "dim"))
    last = max(at for at, node in enumerate(step.nodes) if node.kept)
    places[last].add(Text(f"{_shown(step.emitted[-1], tokenizer)}  the target's own", style="bold cyan"))
    return top


def _nodes(seen: "Seen", emitted: list[int], known: dict[tuple[int, ...], float]) -> list[Node]:
    """The verified nodes of row 0, padding left out and numbered anew."""
    assert seen.tree is not None and seen.verified is not None
    tree, laws = seen.tree, seen.verified.logits[0].float().softmax(-1)  # [n, V]
    parents, valid = tree.parents[0].tolist(), tree.valid[0].tolist()
    number: dict[int, int] = {}
    nodes: list[Node] = []
    for at, path in enumerate(_paths(tree)):
        if not valid[at]:
            continue
        parent = parents[at]
        law = 1.0 if parent < 0 else float(laws[parent, path[-1]])
        kept = list(path[1:]) == emitted[: len(path) - 1] and len(path) <= len(emitted)
        number[at] = len(nodes)
        nodes.append(Node(path[-1], number.get(parent, -1), known.get(path), law, kept))
    return nodes


def _paths(tree: "DraftTree") -> list[tuple[int, ...]]:
    """Of row 0: the tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append((*(paths[parent] if 0 <= parent < len(paths) else ()), token))
    return paths


def _shown(token: int, tokenizer: Any) -> str:
    """A token as text in quotes; where it is part of a character, its name in the vocabulary."""
    text: str = tokenizer.decode([token])
    return repr(tokenizer.convert_ids_to_tokens(token) if PARTIAL in text else text)
