"""What targets do to embedding and logits that draft models elsewhere do not: it goes into the tensors, or is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from headstart.heads import FAMILIES, Tie
from headstart.heads.formats import export_heads, import_heads
from tests.families import DRAFT, PAPER, disturbed
from tests.toys import SIZES

SILU = {"layer": {"hidden_act": "silu"}}


def cohere() -> Any:
    """Logits times 0.25."""
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)).eval()


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("draft_ids", [None, DRAFT], ids=["whole", "draft-vocabulary"])
def test_a_scale_of_the_logits_goes_into_the_output_and_comes_out(
    to: str, draft_ids: torch.Tensor | None, tmp_path: Path
) -> None:
    """An engine's logits are output @ hidden and nothing more; ours are the same numbers."""
    target = cohere()
    heads = disturbed(FAMILIES["eagle3"].from_target(target, draft_ids=draft_ids, features=[1, 2, 3], **PAPER))
    export_heads(heads, to, tmp_path, target)
    hidden, tie = torch.randn(5, 64), Tie.of(target)
    ours = heads.logits(hidden, torch.zeros(5, dtype=torch.int64), 0, tie)
    normed = heads.get_submodule("norm")(hidden)
    torch.testing.assert_close(normed @ load_file(tmp_path / "model.safetensors")["lm_head.weight"].T, ours)
    back, _ = import_heads(tmp_path, target)
    assert torch.equal(back.logits(hidden, torch.zeros(5, dtype=torch.int64), 0, tie), ours)
    with pytest.raises(ValueError, match=r"cohere targets scale their logits.*give --target"):
        export_heads(heads, to, tmp_path / "again")


def test_what_no_tensor_can_hold_is_told(tmp_path: Path) -> None:
    heads = disturbed(FAMILIES["eagle"].from_target(cohere()))
    _, notes = export_heads(heads, "sglang", tmp_path / "scaled", cohere())
    assert any("multiplies its logits by 0.25" in note for note in notes)
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=5.0)).eval()
    _, notes = export_heads(FAMILIES["eagle"].from_target(capped, **SILU), "vllm", tmp_path / "capped", capped)
    assert any("caps its logits at 5" in note for note in notes)
