"""Pictures in the terminal: the tree of a pass, colours by pass, characters of several bytes, no terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.heads import FAMILIES
from headstart.infer.speculator import Speculator
from headstart.scripts.draw import PassStreamer, drawn, legend, style_of, watched
from tests.byte_tokenizer import byte_tokenizer
from tests.drafters import ScriptedSource, adversary, oracle
from tests.toys import Scripted, c64, chain, llama

OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def written(what: Any, colour: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, force_terminal=colour, width=100, color_system="standard" if colour else None).print(what)
    return file.getvalue()


def test_the_pass_that_gave_most_is_kept_with_its_path() -> None:
    model = c64()
    fast = Speculator(model, oracle(model, depth=3), nodes=64)
    watch = watched(fast)
    out = fast.generate(torch.tensor([[5]]), max_new_tokens=10, **OPTIONS)
    assert out[0].tolist() == list(range(5, 16)) and watch.passes == fast.report.passes == 3
    assert watch.best is not None and watch.best.number == 1 and watch.best.emitted == [6, 7, 8, 9]
    nodes = watch.best.nodes
    assert [node.token for node in nodes if node.kept] == [5, 6, 7, 8]
    assert len(nodes) > 4 and sum(not node.kept for node in nodes) == len(nodes) - 4
    assert all(node.draft is None for node in nodes)  # a script has no probabilities
    right = [node.target for node in nodes if node.kept][1:]
    assert all(0 < node.target < right[0] for node in nodes[1:] if not node.kept and node.parent == 0)


def test_probabilities_are_those_of_draft_and_target() -> None:
    model = c64().double()

    class Sure(Scripted):
        def grow(self, root: torch.Tensor, budget: Any) -> Any:
            tree = super().grow(root, budget)
            return tree._replace(logq=torch.full(tree.tokens.shape, 0.25).log())

    fast = Speculator(model, ScriptedSource(lambda m: Sure(m, depth=2)), nodes=64)
    watch = watched(fast)
    fast.generate(torch.tensor([[5]]), max_new_tokens=3, **OPTIONS)
    assert watch.best is not None and watch.best.emitted == [6, 7, 8]
    law = model(torch.tensor([[5, 6]])).logits[0].detach().softmax(-1)  # [2, V]
    kept = [node for node in watch.best.nodes if node.kept]
    assert [node.target for node in kept[1:]] == pytest.approx([float(law[0, 6]), float(law[1, 7])], abs=1e-6)
    assert {round(node.draft or 0.0, 6) for node in watch.best.nodes} == {0.25}


def test_watching_changes_nothing() -> None:
    model = llama().double()
    texts = []
    for watch in (False, True):
        fast = Speculator(model, ["prompt-lookup", FAMILIES["medusa"].from_target(model).double()])
        if watch:
            watched(fast)
        torch.manual_seed(3)
        options = OPTIONS | {"do_sample": True, "temperature": 1.0, "top_k": 0}
        texts.append(fast.generate(torch.arange(3, 9)[None], max_new_tokens=12, **options))
        assert fast.report.drafter == "prompt-lookup + medusa"
    assert torch.equal(*texts)


def test_a_pass_without_guesses_is_a_root_and_its_token() -> None:
    model = c64()
    fast = Speculator(model, adversary(model), nodes=1)
    watch = watched(fast)
    fast.generate(torch.tensor([[5]]), max_new_tokens=1, **OPTIONS)
    assert watch.best is not None and len(watch.best.nodes) == 1 and watch.best.emitted == [6]


def test_the_tree_is_drawn_with_the_kept_path_in_green() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("🚀é, on and on", add_special_tokens=False)["input_ids"]
    model = chain(dict(zip(ids, [*ids[1:], tokenizer.eos_token_id], strict=True)), eos=tokenizer.eos_token_id)
    fast = Speculator(model, oracle(model, depth=2), nodes=64)
    watch = watched(fast)
    fast.generate(torch.tensor([ids[6:8]]), max_new_tokens=6, **OPTIONS)
    assert watch.best is not None
    tree = drawn(watch.best, watch.passes, tokenizer)
    plain, coloured = written(tree), written(tree, colour=True)
    guesses = len(watch.best.nodes) - 1
    assert f"pass 1 of {watch.passes}: {guesses} guesses, 3 tokens" in plain and "\x1b" not in plain
    assert len(plain.splitlines()) == guesses + 3  # a title, the root, and the target's own token
    lines = coloured.splitlines()
    green = [line for line in lines if "\x1b[1;32m" in line]
    assert len(green) == 3  # the root and two guesses
    assert "the target's own" in coloured and "\x1b[1;36m" in coloured
    part = drawn(watch.best._replace(emitted=ids[:1]), 1, tokenizer)
    assert "\ufffd" not in written(part)  # a byte of a character is shown by its name


def test_text_is_coloured_by_pass_and_characters_come_out_whole() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("a🚀b\nc", add_special_tokens=False)["input_ids"]
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=20)
    stream = PassStreamer(tokenizer, console)
    for _ in range(2):
        stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
        for given in (ids[:1], ids[1:3], ids[3:6], ids[6:]):
            for token in given:
                stream.put(torch.tensor([token]))
            assert "\ufffd" not in file.getvalue()
            stream.passed(len(given))
        stream.end()
    said = file.getvalue()
    assert said == 2 * "a\x1b[32m🚀b\x1b[0m\n\x1b[36mc\x1b[0m\n"
    assert [style_of(n) for n in (0, 1, 2, 3, 4, 5, 9)] == ["", "", "cyan", "green", "yellow", "magenta", "magenta"]
    assert "5 or more" in written(legend())


def test_half_a_character_after_a_line_end_waits_for_its_other_half() -> None:
    """FC-028."""
    tokenizer, file = byte_tokenizer(), io.StringIO()
    ids = tokenizer("a\né", add_special_tokens=False)["input_ids"]
    stream = PassStreamer(tokenizer, Console(file=file, force_terminal=False))
    stream.put(torch.tensor([[1]]))
    for given in (ids[:3], ids[3:]):
        stream.put(torch.tensor(given))
        stream.passed(len(given))
    stream.end()
    assert file.getvalue() == "a\né\n"


def test_a_long_line_is_not_broken() -> None:
    tokenizer, file = byte_tokenizer(), io.StringIO()
    stream = PassStreamer(tokenizer, Console(file=file, force_terminal=True, width=20))
    stream.put(torch.tensor([1]))
    stream.put(torch.tensor(tokenizer("x" * 50, add_special_tokens=False)["input_ids"]))
    stream.passed(2)
    stream.end()
    assert "x" * 50 in file.getvalue()
