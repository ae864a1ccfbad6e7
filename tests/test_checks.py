"""Which targets and calls are taken, switched with a notice, or refused by name; and the self-test on the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from headstart.heads.attention import tree_mask
from headstart.infer import checks
from headstart.infer.speculator import Speculator
from headstart.infer.target import compute_dtype
from tests.drafters import SOURCES, replay
from tests.toys import SIZES, VOCAB, llama

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def prompt(length: int = 9) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))


def forwards_of(model: nn.Module) -> list[int]:
    """A list that grows by one a forward of ``model``."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


def same_text(model: Any, fast: Speculator, ids: Tensor | None = None) -> None:
    ids = prompt() if ids is None else ids
    assert fast.generate(ids, **GREEDY).tolist() == model.generate(ids, **GREEDY).tolist()


# attention ----------------------------------------------------------------------------------------------------------

MASKLESS = ["flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/flash-attn3", "paged|sdpa"]


@pytest.mark.parametrize("given", MASKLESS)
def test_attention_without_masks_is_switched_with_a_notice(given: str, caplog: pytest.LogCaptureFixture) -> None:
    model = llama().double()
    model.config._attn_implementation = given
    fast = Speculator(model, "prompt-lookup")
    assert model.config._attn_implementation == "sdpa"
    assert any(repr(given) in note and "'sdpa'" in note for note in fast.notes)
    assert repr(given) in caplog.text
    same_text(model, fast)
    assert repr(given) in str(fast.report)


def gemma2() -> Any:
    torch.manual_seed(0)
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12}
    return Gemma2ForCausalLM(Gemma2Config(head_dim=16, attn_logit_softcapping=2.0, **kinds, **SIZES)).eval()


def test_capped_scores_are_switched_to_eager_with_a_notice() -> None:
    model = gemma2().double()
    assert model.config._attn_implementation == "eager" and Speculator(model, "prompt-lookup").notes == []
    for given in ("sdpa", "flash_attention_2"):
        model.config._attn_implementation = given
        fast = Speculator(model, "token-recycling")
        assert model.config._attn_implementation == "eager"
        assert any(repr(given) in note and "'eager'" in note for note in fast.notes)
        same_text(model, fast)


def test_attention_that_is_not_known_is_refused() -> None:
    model = llama()
    model.config._attn_implementation = "my_attention"
    with pytest.raises(ValueError, match="'my_attention' is not known to take a tree mask"):
        Speculator(model, "prompt-lookup")


def test_attention_that_cannot_be_switched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match="does not let it be switched"):
        Speculator(model, "prompt-lookup")

    def raising(wanted: str) -> None:
        raise ValueError("not here")

    model.set_attn_implementation = raising
    with pytest.raises(ValueError, match=r"cannot be switched \(not here\)"):
        Speculator(model, "prompt-lookup")


def test_attention_changed_after_the_checks_is_refused_before_any_forward() -> None:
    model = llama()
    fast = Speculator(model, "prompt-lookup")
    forwards = forwards_of(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' after this Speculator was made"):
        fast.generate(prompt(), **GREEDY)
    assert not forwards


def test_windows_of_several_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    several = (["sliding_attention"] * 2, [{"sliding_window": 8}, {"sliding_window": 16}])
    monkeypatch.setattr(checks, "get_layer_types_and_kwargs", lambda text: several)
    with pytest.raises(ValueError, match=r"\['sliding_attention'\] have windows of several sizes"):
        Speculator(llama(), "prompt-lookup")


def test_chunks_are_cut_by_position() -> None:
    """Chunks of 3 positions; the siblings at 5 and the child at 6 stand in later slots."""
    seen = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]).bool()
    depth = torch.tensor([[0, 1, 1, 2]])  # positions 4, 5, 5, 6
    mask = tree_mask(seen, depth, torch.tensor([4]), 8, window=3, dtype=torch.float32, chunks=True)
    assert (mask[0, 0] == 0).int().tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


# what changes with length -------------------------------------------------------------------------------------------


def dynamic() -> Any:
    return llama(max_position_embeddings=33, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})


def longrope() -> Any:
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 33, **factors}
    return Phi3ForCausalLM(Phi3Config(rope_parameters=rope, original_max_position_embeddings=33, **SIZES)).eval()


def by_layer() -> Any:
    """One set of rotary parameters for each kind of layer."""
    torch.manual_seed(0)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"sliding_attention": plain, "full_attention": plain | {"rope_type": "dynamic", "factor": 4.0}}
    sizes = SIZES | {"max_position_embeddings": 33}
    config = Gemma3TextConfig(rope_parameters=rope, head_dim=16, sliding_window=12, **sizes)
    return Gemma3ForCausalLM(config).eval()


def scaled_by_slots() -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0, 1, 0]}
    config = Llama4TextConfig(head_dim=16, floor_scale=58, attention_chunk_size=12, **experts, **SIZES)
    return Llama4ForCausalLM(config).eval()


def chosen_slots() -> Any:
    torch.manual_seed(0)
    return DogeForCausalLM(DogeConfig(keep_window_size=57, **SIZES)).eval()


LIMITED = [
    (dynamic, "rope_type 'dynamic', whose frequencies change at 33 tokens"),
    (by_layer, "rope_type 'dynamic', whose frequencies change at 33 tokens"),
    (longrope, "rope_type 'longrope', whose frequencies change at 33 tokens"),
    (scaled_by_slots, "scale its attention by slots at 57 tokens"),
    (chosen_slots, "choose among slots at 57 tokens"),
]


@pytest.mark.parametrize(("make", "why"), LIMITED)
def test_what_changes_with_length_is_exact_up_to_there_and_refused_past_it(make: Callable[[], Any], why: str) -> None:
    model = make().double()
    expected = model.generate(prompt(9), **GREEDY)
    fast = Speculator(model, replay(expected[0], decoys=1), nodes=24)
    assert fast.generate(prompt(9), **GREEDY).tolist() == expected.tolist()  # 33 tokens in all
    forwards = forwards_of(model)
    with pytest.raises(ValueError, match=f"{why}.* may be 34 here"):
        fast.generate(prompt(10), **GREEDY)
    assert not forwards


# PEFT and other wrappers --------------------------------------------------------------------------------------------


def lora(model: Any) -> Any:
    """Adapters that change the text."""
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return wrapped.double().eval()


@pytest.mark.parametrize("name", ["medusa", "token-recycling"])
def test_lora_targets_write_the_adapted_text(name: str) -> None:
    plain = llama().double().generate(prompt(), **GREEDY).tolist()
    model = lora(llama())
    expected = model.generate(input_ids=prompt(), **GREEDY).tolist()
    assert expected != plain
    fast = Speculator(model, SOURCES[name](model))
    assert fast.generate(input_ids=prompt(), **GREEDY).tolist() == expected
    assert model.generate(input_ids=prompt(), custom_generate=fast, **GREEDY).tolist() == expected
    inner = Speculator(model.get_base_model(), SOURCES[name](model))  # the adapted model, without its wrapper
    assert model.generate(input_ids=prompt(), custom_generate=inner, **GREEDY).tolist() == expected
    with model.disable_adapter():
        assert fast.generate(input_ids=prompt(), **GREEDY).tolist() == plain
    with pytest.raises(ValueError, match="another model object"):
        lora(llama(seed=1)).generate(input_ids=prompt(), custom_generate=fast, **GREEDY)


def test_prompt_tuned_targets_are_refused_when_made_and_when_called() -> None:
    """The call hands over the bare model, without the virtual tokens: the text would be another."""
    base = llama()
    fast = Speculator(base, "prompt-lookup")
    tuned = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
    forwards = forwards_of(base)
    with pytest.raises(ValueError, match="'default' is PROMPT_TUNING: virtual tokens"):
        Speculator(tuned, "prompt-lookup")
    with pytest.raises(ValueError, match="this call comes from a PeftModelForCausalLM: virtual tokens"):
        tuned.generate(input_ids=prompt(), custom_generate=fast, **GREEDY)
    assert not forwards
    same_text(base, fast)  # and the bare model goes on working


def test_adapters_that_begin_inside_the_text_are_refused() -> None:
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    model = get_peft_model(llama(), config)
    with pytest.raises(ValueError, match=r"'default' \(LORA\) begins at its invocation tokens"):
        Speculator(model, "prompt-lookup")
    model.add_adapter("whole", LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("whole")  # what is not active does no harm
    fast = Speculator(model, "prompt-lookup")
    model.set_adapter("default")
    with pytest.raises(ValueError, match="begins at its invocation tokens"):
        model.generate(input_ids=prompt(), custom_generate=fast, **GREEDY)


def test_a_compiled_wrapper_stands_for_the_model_inside() -> None:
    model = llama().double()
    wrapped = torch.compile(model)
    same_text(model, Speculator(wrapped, "prompt-lookup"))


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sequential is no transformers model.*\.module"):
        Speculator(nn.Sequential(llama()), "prompt-lookup")


# where the weights are ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_weights_are_refused() -> None:
    model = llama()
    fully_shard(model)
    with pytest.raises(ValueError, match="distributed tensors"):
        Speculator(model, "prompt-lookup")


def test_partitioned_and_split_weights_are_refused() -> None:
    """FC-130: under ZeRO-3 a parameter has no values outside forward."""
    model = llama()
    model._tp_size = 2
    with pytest.raises(ValueError, match="tensor parallelism over 2 processes"):
        Speculator(model, "prompt-lookup")
    model = llama()
    weight = model.lm_head.weight
    weight.ds_id, weight.data = 0, torch.empty(0)
    with pytest.raises(ValueError, match="ZeRO-3"):
        Speculator(model, "prompt-lookup")
    model = llama()
    model.model.layers[1] = type("FullyShardedDataParallel", (nn.Identity,), {})()
    with pytest.raises(ValueError, match="sharded by FSDP"):
        Speculator(model, "prompt-lookup")


@pytest.mark.parametrize("name", ["medusa", "token-recycling"])
def test_a_target_dispatched_by_a_device_map(name: str) -> None:
    plain = llama().double()
    model = copy.deepcopy(plain)
    model = dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    assert model.hf_device_map and "forward" in vars(model)
    same_text(plain, Speculator(model, SOURCES[name](model)))


def test_a_target_whose_weights_are_offloaded() -> None:
    """Weights come in for each forward only, the embedding among them."""
    plain = llama().double()
    model = cpu_offload(copy.deepcopy(plain), torch.device("cpu"))
    assert model.get_input_embeddings().weight.is_meta
    same_text(plain, Speculator(model, "token-recycling"))


class Int8Linear(nn.Module):
    """Weight-only quantisation: int8 rows and a scale each."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


@pytest.mark.parametrize("name", ["medusa", "token-recycling"])
def test_a_quantised_target(name: str) -> None:
    model = llama().double()
    for module in list(model.model.layers.modules()):
        for child, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(module, child, Int8Linear(linear))
    same_text(model, Speculator(model, SOURCES[name](model)))


class IntegerLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A model that gives the dtype its weights are stored in."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8


def test_the_mask_has_a_floating_dtype_whatever_the_weights_are_stored_in() -> None:
    model = IntegerLlama(llama().config).eval().double()
    assert compute_dtype(model) is torch.float64
    same_text(model, Speculator(model, "token-recycling"))
    whole = SimpleNamespace(weight=torch.zeros(2, dtype=torch.int8))
    stored: Any = SimpleNamespace(dtype=torch.int8, get_input_embeddings=lambda: whole)
    assert compute_dtype(stored) is torch.get_default_dtype()
