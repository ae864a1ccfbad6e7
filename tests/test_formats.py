"""Heads in other projects' formats: there and back without a bit lost, the same guesses in every engine, and one clear
error for each way a folder can be wrong."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig

from headstart.heads import FAMILIES, DraftHeads, Tie
from headstart.heads.formats import WRITERS, export_heads, import_heads
from headstart.heads.formats_eagle3 import final_norm
from headstart.infer.cache import TreeCache
from tests import engines
from tests.families import DRAFT, PAPER, disturbed
from tests.toys import SIZES, VOCAB, gpt2, llama

LAST = PAPER | {"fc_norm": True, "residual_last": True}
NORMED = PAPER | {"fc_norm": True, "norm_output": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@functools.cache
def target_of(name: str) -> Any:
    """llama7 and llama8: n odd, n // 2 odd; n even, n // 2 even. gemma: an embedding that is scaled, norms of 1 + w."""
    if name != "gemma":
        return llama(num_hidden_layers=int(name.removeprefix("llama")), head_dim=32)
    torch.manual_seed(1)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | {"num_hidden_layers": 3, "head_dim": 16}))
    with torch.no_grad():
        model.model.norm.weight.normal_()
    return model.eval()


Engine = Callable[[Path, Any, Tensor, int, str], list[int]]


@dataclass(frozen=True)
class Case:
    """Heads with options, where they go, and what runs them there."""

    family: str
    to: str
    engine: Engine
    options: dict[str, Any] = field(default_factory=dict)
    target: str = "llama8"
    draft: bool = True

    def make(self) -> DraftHeads:
        target = target_of(self.target)
        cls, ids = FAMILIES[self.family], DRAFT if self.draft else None
        depth = {"num_draft_heads": 3} | ({"unroll": 3} if "unroll" in cls.options else {})
        return disturbed(cls.from_target(target, draft_ids=ids, **depth | self.options))


EAGLE3, EAGLE1 = engines.eagle3, engines.eagle1
GEMMA = {"layer": {"hidden_act": "silu"}}
CASES = {
    "eagle3-vllm": Case("eagle3", "vllm", EAGLE3, PAPER),
    "eagle3-vllm-odd": Case("eagle3", "vllm", EAGLE3, PAPER, "llama7"),
    "eagle3-vllm-normed": Case("eagle3", "vllm", EAGLE3, PAPER | {"norm_before_residual": True}),
    "eagle3-vllm-3.1": Case("eagle3", "vllm", EAGLE3, NORMED),
    "eagle3-vllm-last": Case("eagle3", "vllm", EAGLE3, LAST, "llama7"),
    "eagle3-vllm-last-gemma": Case("eagle3", "vllm", EAGLE3, LAST | GEMMA, "gemma"),
    "eagle3-vllm-path": Case("eagle3", "vllm", EAGLE3, PAPER | {"step_path": True}),
    "eagle3-vllm-path-odd": Case("eagle3", "vllm", EAGLE3, PAPER | {"step_path": True, "layer": {"head_dim": 24}}),
    "eagle3-vllm-default": Case("eagle3", "vllm", EAGLE3),
    "eagle3-vllm-whole": Case("eagle3", "vllm", EAGLE3, draft=False),
    "eagle3-vllm-layers": Case("eagle3", "vllm", EAGLE3, PAPER | {"features": [0, 1, 4, 5]}),
    "eagle3-sglang": Case("eagle3", "sglang", EAGLE3, PAPER),
    "eagle3-sglang-odd": Case("eagle3", "sglang", EAGLE3, NORMED, "llama7"),
    "eagle3-sglang-two": Case("eagle3", "sglang", EAGLE3, NORMED | {"features": [1, 6]}, draft=False),
    "eagle3-eagle": Case("eagle3", "eagle", EAGLE3, PAPER),
    "eagle3-eagle-odd": Case("eagle3", "eagle", EAGLE3, PAPER, "llama7"),
    "eagle-vllm": Case("eagle", "vllm", EAGLE1, draft=False),
    "eagle-vllm-gemma": Case("eagle", "vllm", EAGLE1, GEMMA, "gemma", draft=False),
    "eagle-sglang": Case("eagle", "sglang", EAGLE1, draft=False),
    "eagle-eagle": Case("eagle", "eagle", EAGLE1, draft=False),
    "medusa-vllm": Case("medusa", "vllm", engines.medusa_vllm),
    "medusa-vllm-shared": Case("medusa", "vllm", engines.medusa_vllm, {"num_draft_layers": 2}, draft=False),
    "medusa-faster-v2": Case("medusa", "medusa", engines.medusa_faster, draft=False),
    "medusa-faster-v1": Case("medusa", "medusa", engines.medusa_faster, {"num_draft_layers": 2}, draft=False),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def drafts(heads: DraftHeads, target: Any, ids: Tensor, depth: int) -> tuple[list[int], list[Tensor]]:
    """Our greedy chain after ids [T + 1], the last of them the root, and the logits it was taken from."""
    tie = Tie.of(target)
    with torch.no_grad():
        out = target(ids[None, :-1], output_hidden_states=True)
        features = torch.cat([out.hidden_states[i] for i in heads.config.features or ()], -1)
        cache = TreeCache(1, heads.attention_layers, 64, heads.device) if heads.attention_layers else None
        state = heads.open(1, 64, cache)
        hidden = heads.refresh(features, ids[None, 1:], torch.tensor([len(ids) - 1]), state, tie)
        if cache is not None:
            cache.advance([len(ids) - 1])
        guesses, laws, token = [], [], ids[None, -1:]
        for d in range(depth):
            if d:
                hidden = heads.level(token, torch.zeros_like(token), d, state, tie)
            laws.append(heads.logits(hidden, token, d, tie)[0, 0])
            best = laws[-1].argmax()
            token = (best if heads.draft_ids is None else heads.draft_ids[best])[None, None]
            guesses.append(int(token))
    return guesses, laws


def texts(count: int = 6) -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB, (9 + i,), generator=g) for i in range(count)]


def double(heads: DraftHeads) -> DraftHeads:
    torch.nn.Module.to(heads, dtype=torch.float64)
    return heads


def test_there_and_back_the_logits_are_the_same_to_the_bit(case: Case, tmp_path: Path) -> None:
    heads, target = case.make(), target_of(case.target)
    export_heads(heads, case.to, tmp_path, target, "org/target")
    back, _ = import_heads(tmp_path, target)
    assert type(back) is type(heads)
    for ids in texts(2):
        (guesses, laws), (again, laws_again) = (drafts(h, target, ids, 3) for h in (heads, back))
        assert guesses == again
        assert all(torch.equal(one, other) for one, other in zip(laws, laws_again, strict=True))
    kept = ("features", "layer", "num_draft_layers", "residual_last", "step_path", "fc_norm", "norm_output", "adapter")
    assert {k: getattr(back.config, k) for k in kept} == {k: getattr(heads.config, k) for k in kept}
    assert back.config.target_fingerprint == heads.config.target_fingerprint
    assert heads.check_target(target) == back.check_target(target) == []


def test_an_engine_drafts_the_same_tokens(case: Case, tmp_path: Path) -> None:
    export_heads(case.make(), case.to, tmp_path, target_of(case.target), "org/target")
    target = double(target_of(case.target))
    try:
        heads = double(case.make())
        found = [case.engine(tmp_path, target, ids, 3, case.to) for ids in texts()]
        assert found == [drafts(heads, target, ids, 3)[0] for ids in texts()]
    finally:
        torch.nn.Module.to(target, dtype=torch.float32)
    assert len({tuple(guesses) for guesses in found}) > 3, "the texts must lead to different guesses"


# what is refused on the way out --------------------------------------------------------------------------------------

REFUSED = {
    "sglang-last": ("eagle3", "sglang", LAST, "heads.residual_last=false"),
    "sglang-path": ("eagle3", "sglang", PAPER | {"step_path": True}, "heads.step_path=false"),
    "sglang-normed": ("eagle3", "sglang", PAPER | {"norm_before_residual": True}, "heads.norm_before_residual=false"),
    "sglang-embedding": ("eagle3", "sglang", PAPER | {"features": [0, 3]}, "names 0, the embedding"),
    "sglang-one": ("eagle3", "sglang", PAPER | {"features": [3]}, "one layer"),
    "eagle-norms": ("eagle3", "eagle", NORMED, "heads.fc_norm=false"),
    "eagle-layers": ("eagle3", "eagle", PAPER | {"features": [1, 3, 5]}, r"captures \[2, 4, 5\]"),
    "vllm-last-raw": ("eagle3", "vllm", PAPER | {"residual_last": True}, "heads.fc_norm=true"),
    "vllm-act": ("eagle3", "vllm", PAPER | {"layer": {"hidden_act": "gelu"}}, "hidden_act=silu"),
    "vllm-eagle-act": ("eagle", "vllm", {"layer": {"hidden_act": "gelu"}}, "hidden_act=silu"),
    "vllm-medusa-layer": ("medusa", "vllm", {"features": [3]}, r"heads.features=\[8\]"),
    "medusa-draft": ("medusa", "medusa", {}, "heads.draft_vocab_size=null"),
    "medusa-eagle": ("eagle", "medusa", {}, "takes medusa heads and these are eagle heads; export them to vllm or"),
    "sglang-medusa": ("medusa", "sglang", {}, "export them to vllm or medusa"),
    "hydra": ("hydra", "vllm", {}, "no serving engine does"),
    "tgi": ("medusa", "tgi", {}, "no format 'tgi'; expected one of vllm, sglang, eagle, medusa"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_has_no_place_for_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, to, options, said = REFUSED[name]
    heads = Case(family, to, EAGLE3, options).make()
    with pytest.raises(ValueError, match=said):
        export_heads(heads, to, tmp_path / "out", target_of("llama8"))
    assert not (tmp_path / "out").exists()


def test_a_path_that_never_learnt_goes_without_a_trace(tmp_path: Path) -> None:
    heads = FAMILIES["eagle3"].from_target(target_of("llama8"), draft_ids=DRAFT, **PAPER | {"step_path": True})
    export_heads(heads, "sglang", tmp_path)
    assert not any("bias" in name for name in load_file(tmp_path / "model.safetensors"))


NEEDS = {
    "last": ("eagle3-vllm-last", "through the target's final norm: give --target"),
    "output": ("eagle3-sglang-two", "speak through the target's own output"),
    "shared": ("medusa-vllm-shared", "speak through the target's own output"),
    "scale": ("eagle-vllm-gemma", "gemma3_text targets scale their embedding"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_where_the_layout_holds_something_of_the_target_it_is_asked_for(name: str, tmp_path: Path) -> None:
    case, said = NEEDS[name]
    with pytest.raises(ValueError, match=said):
        export_heads(CASES[case].make(), CASES[case].to, tmp_path / "out")


def test_the_right_target_is_asked_for(tmp_path: Path) -> None:
    heads = CASES["eagle3-vllm-last"].make()
    with pytest.raises(ValueError, match="do not fit"):
        export_heads(heads, "vllm", tmp_path / "out", target_of("llama8"))
    other = llama(seed=3, num_hidden_layers=7, head_dim=32)
    with pytest.raises(ValueError, match="other weights"):
        export_heads(heads, "vllm", tmp_path / "out", other)


def test_a_final_norm_that_is_no_rms_norm_of_this_epsilon_is_refused() -> None:
    target = target_of("llama7")
    assert torch.equal(final_norm(target, target.config.rms_norm_eps), target.model.norm.weight)
    gains = final_norm(target_of("gemma"), target_of("gemma").config.rms_norm_eps)
    assert torch.equal(gains, 1 + target_of("gemma").model.norm.weight)
    with pytest.raises(ValueError, match=r"no RMS norm with the epsilon 0\.001"):
        final_norm(target, 1e-3)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has none"):
        final_norm(gpt2(), 1e-5)


def test_slow_rotary_positions_cannot_tell_neighbours_apart(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 40.0}
    heads = Case("eagle3", "vllm", EAGLE3, PAPER | {"step_path": True, "layer": {"rope_parameters": rope}}).make()
    with pytest.raises(ValueError, match=r"linear.*heads\.step_path=false"):
        export_heads(heads, "vllm", tmp_path / "out")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("another one")
    with pytest.raises(ValueError, match="not empty"):
        export_heads(CASES["eagle3-vllm"].make(), "vllm", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_heads_trained_with_an_adapter_need_it_merged(tmp_path: Path) -> None:
    heads = CASES["medusa-vllm"].make()
    heads.config.adapter = "0" * 16
    with pytest.raises(ValueError, match="give --target and --adapter"):
        export_heads(heads, "vllm", tmp_path / "out")


# what is written ------------------------------------------------------------------------------------------------------


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_the_config_says_what_engines_look_for(case: Case, tmp_path: Path) -> None:
    """The target's vocabulary beside the draft's, the base model's name, and no path of this machine."""
    heads = case.make()
    export_heads(heads, case.to, tmp_path, target_of(case.target), "org/target")
    text, config = (tmp_path / "config.json").read_text(), config_of(tmp_path)
    assert "org/target" in text and "/tmp" not in text and str(tmp_path) not in text
    layer = config.get("transformer_layer_config", config)
    if case.engine is not engines.medusa_faster:
        assert layer["vocab_size"] == VOCAB
    if case.family == "eagle3":
        assert config["draft_vocab_size"] == (len(DRAFT) if case.draft else VOCAB)
        assert LlamaConfig(**layer).rope_parameters == (heads.config.layer or {})["rope_parameters"]
        assert config["norm_before_residual"] is heads.config.norm_before_residual


def test_layer_ids_are_each_engines_own(tmp_path: Path) -> None:
    for name, ids in (("llama7", [2, 3, 4]), ("llama8", [2, 4, 5])):
        heads = Case("eagle3", "", EAGLE3, PAPER, name).make()
        for to in ("vllm", "sglang"):
            export_heads(heads, to, tmp_path / name / to)
        assert config_of(tmp_path / name / "vllm")["eagle_aux_hidden_state_layer_ids"] == ids
        flat = config_of(tmp_path / name / "sglang")
        assert flat["eagle_aux_hidden_state_layer_ids"] == ids  # vLLM reads the top level, SGLang the nested ones
        assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in ids]


def test_vocabulary_tables_are_offsets_and_members(tmp_path: Path) -> None:
    export_heads(CASES["eagle3-sglang"].make(), "sglang", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert int(tensors["t2d"].sum()) == len(DRAFT)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], torch.arange(len(DRAFT)) + tensors["d2t"])
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_streams_in_another_order_are_sorted(tmp_path: Path) -> None:
    """Engines capture as the layers go by, whatever the list says."""
    case = Case("eagle3", "vllm", EAGLE3, LAST | {"features": [5, 1, 3]})
    export_heads(case.make(), "vllm", tmp_path, target_of("llama8"))
    assert config_of(tmp_path)["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5, 8]
    back, _ = import_heads(tmp_path, target_of("llama8"))
    for ids in texts(3):
        (guesses, laws), (again, laws_again) = (drafts(h, target_of("llama8"), ids, 3) for h in (case.make(), back))
        assert guesses == again
        torch.testing.assert_close(laws, laws_again, rtol=1e-4, atol=1e-4)


def test_half_precision_stays_what_it_is(tmp_path: Path) -> None:
    heads = CASES["eagle3-vllm-default"].make()
    torch.nn.Module.to(heads, dtype=torch.bfloat16)
    export_heads(heads, "vllm", tmp_path, target_of("llama8"))
    assert config_of(tmp_path)["torch_dtype"] == "bfloat16"
    assert {str(t.dtype) for t in load_file(tmp_path / "model.safetensors").values()} == {
        "torch.bfloat16",
        "torch.int64",
        "torch.bool",
    }
    back, _ = import_heads(tmp_path, target_of("llama8"))
    kept = heads.state_dict()
    assert all(torch.equal(t.float(), kept[name].float()) for name, t in back.state_dict().items())


@pytest.mark.parametrize("to", ["sglang", "vllm"])
def test_rotary_scaling_goes_along(to: str, tmp_path: Path) -> None:
    case = Case("eagle3", to, EAGLE3, PAPER | {"layer": {"rope_parameters": LLAMA3}})
    export_heads(case.make(), to, tmp_path)
    config = config_of(tmp_path)
    layer = config.get("transformer_layer_config", config)
    assert layer["rope_theta"] == 10000.0 and layer["rope_scaling"]["rope_type"] == "llama3"
    back, _ = import_heads(tmp_path, target_of("llama8"))
    assert (back.config.layer or {})["rope_parameters"] == LLAMA3
    layer.pop("rope_parameters")  # as before transformers 5
    layer["rope_scaling"]["type"] = layer["rope_scaling"].pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config))
    back, _ = import_heads(tmp_path, target_of("llama8"))
    assert (back.config.layer or {})["rope_parameters"] == LLAMA3


def test_blocks_that_fasterdecodings_own_code_makes_one_are_told(tmp_path: Path) -> None:
    for name, told in (("medusa-faster-v1", 1), ("medusa-faster-v2", 0)):
        _, notes = export_heads(CASES[name].make(), "medusa", tmp_path / name, target_of("llama8"))
        assert sum("one module of the 2 blocks" in note for note in notes) == told


def test_a_draft_vocabulary_that_stays_behind_is_told(tmp_path: Path) -> None:
    heads = Case("eagle", "vllm", EAGLE1).make()
    _, notes = export_heads(heads, "vllm", tmp_path)
    assert any("draft vocabulary of 106 tokens stays behind" in note for note in notes)


# what comes in wrong --------------------------------------------------------------------------------------------------


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def renamed(tensors: dict[str, Tensor]) -> None:
    name = sorted(tensors)[0]
    tensors[f"{name}_"] = tensors.pop(name)


def dropped(tensors: dict[str, Tensor]) -> None:
    del tensors[sorted(tensors)[len(tensors) // 2]]


def added(tensors: dict[str, Tensor]) -> None:
    tensors["foreign.weight"] = torch.zeros(2)


def reshaped(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in sorted(tensors) if "proj" in name or "linear" in name or "layers" in name)
    tensors[name] = torch.zeros(3, *tensors[name].shape[1:])


def poisoned(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in sorted(tensors) if "proj" in name or "linear" in name or "layers" in name)
    tensors[name].flatten()[0] = torch.nan


DAMAGES = {
    "renamed": (renamed, "(?s)(missing|has no fc.weight).*|unknown"),
    "dropped": (dropped, "missing"),
    "added": (added, r"unknown: foreign.weight \(2,\)"),
    "reshaped": (reshaped, r"misshapen.*expected"),
    "poisoned": (poisoned, "not finite"),
}
ONE_EACH = ["eagle3-vllm-default", "eagle3-sglang", "eagle-sglang", "medusa-vllm", "medusa-faster-v1"]
ONE_EACH.append("medusa-faster-v2")


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_set_of_tensors_is_one_error(name: str, damage: str, tmp_path: Path) -> None:
    case, (change, said) = CASES[name], DAMAGES[damage]
    export_heads(case.make(), case.to, tmp_path, target_of(case.target), "org/target")
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=said):
        import_heads(tmp_path, target_of(case.target))


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_file_cut_short_is_one_error(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    export_heads(case.make(), case.to, tmp_path, target_of(case.target), "org/target")
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="damaged, cut short"):
        import_heads(tmp_path, target_of(case.target))
    file.unlink()
    if (pickle := tmp_path / "medusa_lm_head.pt").exists():
        pickle.write_bytes(pickle.read_bytes()[: pickle.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"damaged, cut short|holds no weights"):
        import_heads(tmp_path, target_of(case.target))


@pytest.mark.parametrize("name", ONE_EACH)
def test_another_target_is_one_error_with_both_sizes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    export_heads(case.make(), case.to, tmp_path, target_of(case.target), "org/target")
    layers = int(case.target.removeprefix("llama"))
    others = [llama(num_hidden_layers=layers, hidden_size=32)]
    if name != "medusa-faster-v2":  # whose folder has nothing of the vocabulary's size
        others.append(llama(num_hidden_layers=layers, vocab_size=300))
    for other in others:
        with pytest.raises(ValueError, match=r"(?s)64.*32|320.*300|106.*300"):
            import_heads(tmp_path, other)


def test_pickles_that_are_more_than_tensors_are_refused(tmp_path: Path) -> None:
    case = CASES["medusa-faster-v2"]
    export_heads(case.make(), case.to, tmp_path, target_of(case.target))
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    assert import_heads(tmp_path, target_of(case.target))[0].outputs is None
    torch.save({"0.0.linear.weight": print}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="no file of plain tensors"):
        import_heads(tmp_path, target_of(case.target))
    torch.save([torch.zeros(2)], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="holds list, expected tensors by name"):
        import_heads(tmp_path, target_of(case.target))


Config = dict[str, Any]


def nested_ids(config: Config) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]


WRONG_CONFIGS: dict[str, tuple[str, Callable[[Config], Any], str]] = {
    "null ids": ("eagle3-vllm", lambda c: c.update(eagle_aux_hidden_state_layer_ids=None), "=null.*--layer"),
    "null ids, flat": (
        "eagle3-sglang",
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=None),
        "=null.*--layer",
    ),
    "a null id": (
        "eagle3-vllm",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, None, 5]),
        r"=\[2, null, 5\].*--layer",
    ),
    "two conventions": ("eagle3-sglang", nested_ids, "contradicts itself.*one less"),
    "too many ids": (
        "eagle3-vllm",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        "names 4 layers .* fc reads 3",
    ),
    "ids out of range": (
        "eagle3-vllm",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 99]),
        r"\[0, 1, 99\].*0\.\.7",
    ),
    "ids out of order": (
        "eagle3-vllm",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[4, 2, 5]),
        "ascending order",
    ),
    "later version": ("eagle3-vllm", lambda c: c.update(speculators_version="1.2.0"), "speculators 1.2.0.*up to 0.9.0"),
    "strange version": ("eagle3-vllm", lambda c: c.update(speculators_version="later"), "speculators later"),
    "another type": ("eagle3-vllm", lambda c: c.update(speculators_model_type="dflash"), "'dflash'; .* 'eagle3'"),
    "no residual": ("eagle3-vllm", lambda c: c.pop("norm_before_residual"), "vLLM for true"),
    "one norm": ("eagle3-sglang", lambda c: c["eagle_config"].update(norm_before_fc=True), "norm_before_fc=true"),
    "no layer": ("eagle3-vllm", lambda c: c.pop("transformer_layer_config"), "transformer_layer_config=None"),
    "qwen3 layer": (
        "eagle3-vllm",
        lambda c: c["transformer_layer_config"].update(model_type="qwen3"),
        "model_type='qwen3'",
    ),
    "two layers": ("eagle3-sglang", lambda c: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
    "wider draft": ("eagle3-sglang", lambda c: c.update(target_hidden_size=128), "target_hidden_size=128.*64"),
    "no width": ("eagle-vllm", lambda c: c.pop("hidden_size"), r"lacks \['hidden_size'\]"),
    "biases": (
        "eagle3-vllm",
        lambda c: c["transformer_layer_config"].update(attention_bias=True),
        "missing: layers.0.self_attn.q_proj.bias",
    ),
    "half turned": ("eagle3-sglang", lambda c: c.update(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    "half turned, nested": (
        "eagle3-vllm",
        lambda c: c["transformer_layer_config"]["rope_parameters"].update(partial_rotary_factor=0.5),
        "partial_rotary_factor=0.5",
    ),
    "bias": ("eagle-vllm", lambda c: c.update(bias=True), r"missing: fc.bias"),
    "unknown arch": ("eagle-vllm", lambda c: c.update(architectures=["BertModel"]), "BertModel.*known are"),
    "hydra": ("eagle-vllm", lambda c: c.update(hydra_num_heads=4), "Hydra"),
    "ours": ("eagle-vllm", lambda c: c.update(model_type="headstart"), "already"),
    "more heads": ("medusa-faster-v2", lambda c: c.update(medusa_num_heads=5), "missing: 4.0.linear.weight"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_wrong_config_is_one_error(name: str, tmp_path: Path) -> None:
    made, change, said = WRONG_CONFIGS[name]
    case = CASES[made]
    export_heads(case.make(), case.to, tmp_path, target_of(case.target), "org/target")
    config = config_of(tmp_path)
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        import_heads(tmp_path, target_of(case.target))


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        import_heads(tmp_path, target_of("llama8"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        import_heads(tmp_path, target_of("llama8"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list"):
        import_heads(tmp_path, target_of("llama8"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        import_heads(tmp_path, target_of("llama8"))


TABLES = {
    "outside": (lambda t: t["d2t"].add_(300), r"leads to token 3\d\d, the target has 320"),
    "ids instead of offsets": (lambda t: t["d2t"].add_(torch.arange(len(DRAFT))), "holds offsets|do not name the same"),
    "of other heads": (lambda t: t["t2d"].logical_not_(), "do not name the same tokens"),
}


@pytest.mark.parametrize("name", TABLES)
def test_foreign_vocabulary_tables_are_refused(name: str, tmp_path: Path) -> None:
    change, said = TABLES[name]
    export_heads(CASES["eagle3-sglang"].make(), "sglang", tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=said):
        import_heads(tmp_path, target_of("llama8"))


# what others publish --------------------------------------------------------------------------------------------------


def test_published_names_and_configs_that_say_less(tmp_path: Path) -> None:
    """SafeAILab: no layer ids, no flags; the target's embedding along; older names of norms."""
    case, target = CASES["eagle3-sglang-odd"], target_of("llama7")
    heads = case.make()
    export_heads(heads, "sglang", tmp_path)
    config = config_of(tmp_path)
    for key in ("eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states", "rope_parameters"):
        config.pop(key)
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    def older(tensors: dict[str, Tensor]) -> None:
        for i, place in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{place}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
        tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().half()

    rewritten(tmp_path, older)
    back, notes = import_heads(tmp_path, target)
    assert drafts(back, target, texts()[0], 3)[0] == drafts(heads, target, texts()[0], 3)[0]
    assert any("hidden_states [2, 3, 4]" in note for note in notes)
    assert import_heads(tmp_path, target, [1, 2, 3])[0].config.features == [1, 2, 3]
    rewritten(tmp_path, lambda t: t["embed_tokens.weight"].mul_(2))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight \(320, 64\).* is not the embedding \(320, 64\)"):
        import_heads(tmp_path, target)


def test_eagle_with_a_bias_and_its_own_copy_of_the_embedding(tmp_path: Path) -> None:
    case, target = CASES["eagle-sglang"], target_of("llama8")
    export_heads(case.make(), "sglang", tmp_path / "one")
    assert import_heads(tmp_path / "one", target)[0].config.fc_bias is False  # a bias of zeros is none
    rewritten(tmp_path / "one", lambda t: t["fc.bias"].add_(0.5))
    biased, _ = import_heads(tmp_path / "one", target)
    assert biased.config.fc_bias and float(biased.get_parameter("fc.bias")[0].detach()) == 0.5
    export_heads(biased, "eagle", tmp_path / "two")
    config = config_of(tmp_path / "two")
    assert config.pop("bias") is True
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))  # absent: there is one
    assert import_heads(tmp_path / "two", target)[0].config.fc_bias
    with pytest.raises(ValueError, match="fc has a bias, and its fc has none"):
        export_heads(biased, "vllm", tmp_path / "three")


def test_medusa_configs_that_say_fewer_heads_than_the_file_holds(tmp_path: Path) -> None:
    case, target = CASES["medusa-faster-v1"], target_of("llama8")
    heads = case.make()
    export_heads(heads, "medusa", tmp_path, target)
    config = config_of(tmp_path) | {"medusa_num_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewritten(tmp_path, lambda t: t.update({f"medusa_head.{name}": t.pop(name) for name in list(t)}))
    back, notes = import_heads(tmp_path, target)
    assert back.config.num_draft_heads == 3 and "2 heads, the file holds 3" in notes[0]
    assert drafts(back, target, texts()[0], 3)[0] == drafts(heads, target, texts()[0], 3)[0]


def test_medusa_of_vllm_without_biases(tmp_path: Path) -> None:
    case, target = CASES["medusa-vllm"], target_of("llama8")
    export_heads(case.make(), "vllm", tmp_path)
    config = config_of(tmp_path)
    del config["medusa_fc_bias"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewritten(tmp_path, lambda t: [t.pop(name) for name in list(t) if name.endswith("bias")] and None)
    back, _ = import_heads(tmp_path, target)
    assert not any(t.any() for name, t in back.state_dict().items() if name.endswith("bias"))


def test_every_format_has_a_case() -> None:
    assert {(to, family) for to, families in WRITERS.items() for family in families} == {
        (case.to, case.family) for case in CASES.values()
    }
