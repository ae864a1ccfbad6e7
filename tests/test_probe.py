"""The self-test on the real weights: what it finds, what it leaves alone, and that it runs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from headstart.heads import FAMILIES
from headstart.infer.probe import check_model
from headstart.infer.speculator import Speculator
from tests.drafters import SOURCES
from tests.test_checks import forwards_of, same_text
from tests.toys import VOCAB, gpt2, llama


def test_the_self_test_runs_once_for_the_same_weights() -> None:
    model = llama()
    forwards = forwards_of(model)
    Speculator(model, "prompt-lookup")
    assert 0 < len(forwards) <= 6
    forwards.clear()
    Speculator(model, "token-recycling")
    assert not forwards
    Speculator(model, SOURCES["medusa"](model))  # wants hidden states: more to check
    assert forwards
    forwards.clear()
    Speculator(model, SOURCES["medusa"](model))
    assert not forwards
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    Speculator(model, "prompt-lookup")
    assert forwards
    forwards.clear()
    model.set_attn_implementation("eager")
    Speculator(model, "prompt-lookup")
    assert forwards


def test_the_self_test_leaves_nothing_on_the_target() -> None:
    """FC-110."""
    model = llama()
    before, settings = dict(vars(model)), model.generation_config.to_dict()
    check_model(model, (4,))
    assert vars(model) == before and model.generation_config.to_dict() == settings


def test_the_self_test_does_not_depend_on_the_settings_of_the_target() -> None:
    model = llama()
    first = int(model.generate((torch.arange(1, 21) * 7919 % VOCAB)[None], max_new_tokens=1, do_sample=False)[0, -1])
    model.generation_config.update(
        do_sample=True, temperature=2.0, repetition_penalty=3.0, eos_token_id=first, stop_strings=["x"], num_beams=3
    )
    model.generation_config.cache_implementation = "static"
    model.config.use_cache = False
    check_model(model, ())


def ignoring_the_mask(model: Any) -> Callable[..., Any]:
    plain = model.forward
    return lambda *args, **kwargs: plain(*args, **(kwargs | {"attention_mask": None}))


def boolean_mask(model: Any) -> Callable[..., Any]:
    """FC-107: eager attention adds it as 0 and 1."""
    model.set_attn_implementation("eager")
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            kwargs["attention_mask"] = mask == 0
        return plain(*args, **kwargs)

    return forward


@pytest.mark.parametrize("spoil", [ignoring_the_mask, boolean_mask])
def test_a_target_that_does_not_go_by_the_mask_is_refused(spoil: Callable[[Any], Any]) -> None:
    model = llama()
    Speculator(model, "prompt-lookup")  # passes, and that is not remembered for the changed forward
    model.forward = spoil(model)
    with pytest.raises(ValueError, match="other logits for a tree of guesses"):
        Speculator(model, "prompt-lookup")


def test_a_target_whose_generate_prepares_other_inputs_is_refused() -> None:
    class Stretched(LlamaForCausalLM):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            inputs["position_ids"] = 2 * inputs["position_ids"]
            return inputs

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="other logits for a tree of guesses"):
        Speculator(Stretched(llama().config).eval(), "prompt-lookup")


def test_a_target_that_drops_out_is_told_to_be_put_in_evaluation_mode() -> None:
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        Speculator(gpt2().train(), "prompt-lookup")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_half_precision_is_no_reason_to_refuse(dtype: torch.dtype) -> None:
    check_model(llama().to(dtype), (2, 4))


def test_sources_without_heads_do_not_need_the_output_layer() -> None:
    """A scale after it that is not known here matters to heads alone."""

    class Scaled(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.25
            return out

    torch.manual_seed(0)
    model = Scaled(llama().config).eval().double()
    same_text(model, Speculator(model, "token-recycling"))
    with pytest.raises(ValueError, match="scales or caps"):
        Speculator(model, FAMILIES["medusa"].from_target(model))
