"""What is seen of a call from outside: as many forwards as there are, and the time between them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from headstart.infer.watch import FirstToken, watched
from tests.toys import c64


def test_forwards_are_counted_and_what_passes_between_them_is_timed() -> None:
    model = c64()

    def slow(*_: Any) -> None:
        time.sleep(0.02)

    ids = torch.tensor([[5]])
    time.sleep(0.01)
    hook = model.lm_head.register_forward_hook(slow)  # inside of a forward
    with watched(model) as found:
        time.sleep(0.05)  # before the first one
        for _ in range(3):
            model(ids)
            time.sleep(0.004)
        time.sleep(0.05)  # behind the last one
    hook.remove()
    assert found.count == 3 and found.seconds["forward"] >= 0.06 and found.seconds["before"] >= 0.05
    assert 0.008 <= found.between == found.seconds["between"]
    model(ids)
    assert found.count == 3  # nobody watches any more


def test_hooks_go_also_where_a_call_fails() -> None:
    model = c64()
    with pytest.raises(RuntimeError, match="full"), watched(model):
        raise RuntimeError("full")
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_the_first_token_is_what_comes_after_the_prompt() -> None:
    stream, model = FirstToken(), c64()
    began = time.perf_counter()
    model.generate(torch.tensor([[5, 6]]), streamer=stream, max_new_tokens=3, do_sample=False)
    assert stream.puts == 4 and began < stream.at < time.perf_counter() and stream.tokens == 1
