"""Stock families as targets: one line each. What is supported writes the text of ``generate``; the rest is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from headstart.heads import FAMILIES
from headstart.infer.speculator import Speculator
from tests.drafters import replay

WINDOW = 12  # shorter than every text here
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
HEAD = {"head_dim": 16}  # not hidden size by heads (FC-115)
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GEMMA_N = HEAD | {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_hidden_layers": 4}
SHARED = GEMMA_N | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}

EXACT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": MOE | {"sliding_window": WINDOW},
    "ministral": BOTH | HEAD,
    "ministral3": HEAD,
    "qwen2": BOTH | {"use_sliding_window": True},
    "qwen3": HEAD,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE | HEAD,
    "gemma": HEAD,
    "gemma2": BOTH | HEAD,
    "gemma3_text": BOTH | HEAD | {"initializer_range": 0.5, "query_pre_attn_scalar": 8},
    "gemma3n_text": SHARED | {"num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": SHARED | {"num_kv_shared_layers": 2, "global_head_dim": 8},
    "vaultgemma": BOTH | HEAD,
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": MOE,
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "gpt_oss": BOTH | HEAD | MOE,
    "codegen": {"rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "xglm": {"ffn_dim": 64},
    "biogpt": {},
    "falcon": {"alibi": False, "new_decoder_architecture": True},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {},
    "cohere2": BOTH | HEAD,
    "olmo": {},
    "olmo2": {},
    "olmo3": BOTH,
    "olmoe": MOE,
    "flex_olmo": MOE,
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "granitemoe": MOE,
    "glm": HEAD,
    "glm4": {"head_dim": 8},
    "glm4_moe": ROUTED | HEAD,
    "smollm3": {},
    "deepseek_v2": ROUTED | MLA,
    "deepseek_v3": ROUTED | MLA,
    "exaone4": BOTH,
    "nemotron": {},
    "helium": {"head_dim": 8},
    "persimmon": {},
    "bitnet": {},
    "arcee": {},
    "ernie4_5": HEAD,
    "hunyuan_v1_dense": HEAD,
    "seed_oss": HEAD,
    "apertus": {},
    "diffllama": {},
    "jetmoe": MOE | {"kv_channels": 8},
    "doge": {"keep_window_size": 64},
    "dots1": ROUTED,
    "nanochat": {},
    "minimax_m2": MOE | HEAD,
    "cwm": BOTH | HEAD,
    "solar_open": ROUTED | HEAD,
    "youtu": MLA,
    "afmoe": BOTH | HEAD | MOE | {"num_shared_experts": 1},
    "jais2": {},
    "aria_text": ROUTED,
    "cohere2_moe": BOTH | HEAD | MOE,
    "ctrl": {"dff": 64},
    "ernie4_5_moe": ROUTED | {"moe_num_experts": 4, "moe_k": 2},
    "exaone": {},
    "exaone_moe": ROUTED,
    "glm4_moe_lite": ROUTED | MLA,
    "gpt_neox_japanese": {},
    "granite_swa": BOTH,
    "granitemoeshared": MOE | {"shared_intermediate_size": 32},
    "hunyuan_v1_moe": MOE | HEAD,
    "longcat_flash": ROUTED
    | MLA
    | {"num_layers": 2, "head_dim": 8, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2},
    "minicpm3": MLA,
    "modernbert-decoder": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
    "llama4_text": HEAD | MOE | {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0], "intermediate_size_mlp": 64},
}

# their eager attention, or its padding, takes no float64
SINGLE = ("gemma2", "vaultgemma", "gpt_oss", "xglm", "granite_swa")
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
AXES = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # text sizes, the rest
    "gemma3": (BOTH | HEAD, {"vision_config": EYES | {"patch_size": 14}, "mm_tokens_per_image": 4}),
    "llava": ({"model_type": "llama"}, {"vision_config": EYES | {"model_type": "clip_vision_model", "patch_size": 14}}),
    "qwen2_5_vl": (AXES, {"vision_config": QWEN_EYES | {"fullatt_block_indexes": [0]}}),
    "qwen3_vl": (AXES, {"vision_config": QWEN_EYES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}}),
}
IMAGES = dict.fromkeys(("image_token_id", "image_token_index", "video_token_id", "boi_token_index"), 95)

STATE = "keep a state|keeps a recurrent state"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]], "window_size": WINDOW}, "counts slots"),
    "mpt": ({}, "attention biases count slots"),
    "bloom": ({}, "attention biases count slots"),
    "falcon": ({"alibi": True}, "attention biases count slots"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, r"\['conv'\] keep a state"),
    "qwen3_next": (
        MOE | HEAD | {"shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]},
        r"\['linear_attention'\] keep a state",
    ),
    "minimax": (MOE | {"layer_types": ["linear_attention", "full_attention"]}, r"\['linear_attention'\] keep a state"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8}, STATE),
    "jamba": (MOE | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}, STATE),
    "mamba": ({}, STATE),
    "rwkv": ({}, STATE),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"]}, STATE),
    "granitemoehybrid": (MOE | {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]}, STATE),
    "nemotron_h": ({"layer_types": ["linear_attention", "full_attention"]}, r"\['linear_attention'\] keep a state"),
    "deepseek_v32": (
        ROUTED | MLA | {"index_n_heads": 2, "index_head_dim": 16},
        r"\['indexed_attention'\] keep a state",
    ),
    "bert": ({}, "other logits for a tree of guesses"),
    "openai-gpt": ({}, "does not take a tree"),
    "t5": ({}, "encoder-decoder"),
}


def tiny(name: str, sizes: dict[str, Any], auto: Any = AutoModelForCausalLM) -> Any:
    """A random model of a family, small enough to build in a moment, whose greedy text varies."""
    torch.manual_seed(0)
    experts = {"experts_implementation": "eager"} if "num_experts" in sizes else {}  # the one that takes float64
    model = auto.from_config(AutoConfig.for_model(name, **(SIZES | sizes)), **experts).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", list(EXACT))
def test_a_family_writes_the_text_of_generate(name: str) -> None:
    """FC-107 and FC-109: trees with branches through every kind of mask, past the window, alone and in a batch."""
    model = tiny(name, EXACT[name]).to(torch.float32 if name in SINGLE else torch.float64)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (2, 9), generator=generator)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(ids[:1], **options)
    fast = Speculator(model, replay(expected[0], decoys=1), nodes=24)
    assert fast.generate(ids[:1], **options).tolist() == expected.tolist()
    assert fast.report.tokens_per_pass > 4
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    options |= {"attention_mask": mask, "max_new_tokens": 12}
    batch = model.generate(ids, **options)
    assert Speculator(model, "token-recycling", nodes=12).generate(ids, **options).tolist() == batch.tolist()


@pytest.mark.parametrize("name", list(SEEING))
def test_a_model_that_sees_writes_text_from_text_and_is_refused_images(name: str) -> None:
    text, rest = SEEING[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, text_config=SIZES | text, tie_word_embeddings=False, **IMAGES, **rest)
    model: Any = AutoModelForImageTextToText.from_config(config).double().eval()
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    fast = Speculator(model, FAMILIES["medusa"].from_target(model).double())
    assert fast.generate(ids, **options).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=r"mm_encoder_outputs \(not understood by trees\)"):
        fast.generate(
            ids, mm_encoder_outputs={"image": SimpleNamespace(pooler_output=torch.zeros(1, 4, 32))}, **options
        )


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_family_that_takes_no_tree_is_refused_by_name(name: str) -> None:
    sizes, reason = REFUSED[name]
    model = tiny(name, sizes, AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM)
    with pytest.raises(ValueError, match=reason):
        Speculator(model, "prompt-lookup")
