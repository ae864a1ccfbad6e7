"""Heads folders that are broken, or of something else: one clear error or warning each, before any decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.heads import load_heads
from headstart.infer.speculator import Speculator
from headstart.train.hub import staged
from tests.byte_tokenizer import byte_tokenizer
from tests.heads_folder import NAME
from tests.toys import llama


def test_a_tokenizer_of_other_tokens_is_a_warning_that_names_both(trained: Path) -> None:
    target = llama()
    assert Speculator.from_pretrained(str(trained), target, tokenizer=byte_tokenizer()).notes == []
    other = byte_tokenizer(merges=[("a", "b")])
    (note,) = Speculator.from_pretrained(str(trained), target, tokenizer=other).notes
    assert load_heads(str(trained)).config.target_tokenizer in note and "other tokens" in note


def break_it(folder: Path, how: str) -> None:
    from safetensors.torch import load_file, save_file

    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if how == "a renamed tensor":
        tensors = load_file(file)
        name = next(name for name in sorted(tensors) if name != "draft_ids")
        save_file({(f"new.{k}" if k == name else k): v for k, v in tensors.items()}, file, metadata={"format": "pt"})
    elif how == "a truncated file":
        file.write_bytes(file.read_bytes()[:-40])
    elif how == "an empty file":
        file.write_bytes(b"")
    changes = {
        "a future format": {"format_version": 99, "family": "of-the-future"},
        "a null format": {"format_version": None},
        "null layer ids": {"features": None},
        "a null layer id": {"features": [None]},
        "a layer id outside": {"features": [5]},
        "two layer ids": {"features": [1, 4]},
        "no layer": {"family": "eagle3"},
        "half a layer": {"family": "eagle", "layer": {"hidden_size": 64}},
    }
    (folder / "config.json").write_text(json.dumps(config | changes.get(how, {})))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a renamed tensor", r"missing: .*\n.*unknown: new\."),
        ("a truncated file", "damaged or cut short"),
        ("an empty file", "damaged or cut short"),
        ("a future format", r"format version 99.*reads up to 1.*pip install -U"),
        ("a null format", "format version None"),
        ("null layer ids", r"features=None.*from 0 .* to 4"),
        ("a null layer id", r"features=\[None\]"),
        ("a layer id outside", r"features=\[5\]"),
        ("two layer ids", r"features=\[1, 4\]: medusa heads read one hidden state"),
        ("no layer", r"layer=None: .*hidden_size.* are missing"),
        ("half a layer", r"layer=\{'hidden_size': 64\}: .* num_attention_heads, .* are missing"),
    ],
)
def test_what_is_broken_is_one_clear_error_before_any_decoding(folder: Path, how: str, said: str) -> None:
    """FC-068, FC-118; the push sees the same, before it asks the network."""
    break_it(folder, how)
    target = llama()
    target.forward = lambda *a, **k: pytest.fail("the target was run")
    for use in (lambda: Speculator.from_pretrained(str(folder), target), lambda: staged(folder, NAME)):
        with pytest.raises(ValueError, match=said):
            use()


def test_another_target_is_refused_or_told_with_both_sides_named(trained: Path) -> None:
    """FC-067."""
    wide = llama(hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
    wide.config.name_or_path = "org/wide"
    said = "heads of toy do not fit org/wide: hidden_size: heads for 64, the target has 32"
    with pytest.raises(ValueError, match=said):
        Speculator.from_pretrained(str(trained), wide)
    other = llama(seed=1)
    other.config.name_or_path = "org/other"
    (note,) = Speculator.from_pretrained(str(trained), other).notes
    assert "toy" in note and "org/other" in note and load_heads(str(trained)).config.target_fingerprint in note
