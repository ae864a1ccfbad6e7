"""HeadsConfig: what a heads folder says of itself and of the target it was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

FORMAT_VERSION = 1  # raised when a folder written before can no longer be read as it stands


class HeadsConfig(PreTrainedConfig):
    """Everything needed to rebuild the heads and to check that a target fits them.

    ``features`` are indices of ``hidden_states`` as transformers numbers them: 0 = embedding output, i = output of
    layer i, and the last one (= ``target_num_layers``) is taken after the final norm.
    """

    model_type = "headstart"

    family: str = ""
    """Key of ``FAMILIES``."""
    format_version: int = FORMAT_VERSION
    target_name: str = ""
    """Hub id or name the target was loaded by; for people, never followed on its own."""
    target_model_type: str = ""
    target_hidden_size: int = 0
    target_vocab_size: int = 0
    target_num_layers: int = 0
    target_fingerprint: str = ""
    """Digest of a few rows of the target's embedding: same shape but other weights is a warning, not silence."""
    features: list[int] | None = None
    """hidden_states indices the heads read, concatenated in this order."""
    draft_vocab_size: int | None = None
    """Tokens the heads can say; None = the whole target vocabulary through the target's own output layer."""
    num_draft_heads: int = 4
    """Depth of the drafts: tokens guessed after the root."""
    num_draft_layers: int = 1
    """Residual blocks per head (Medusa, Hydra)."""

    def check_format(self) -> None:
        """Raises ValueError where this folder was written by a release this one cannot follow."""
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"these heads have format version {self.format_version}, this release reads up to {FORMAT_VERSION}: "
                "upgrade with `pip install -U headstart-llm`"
            )


def target_facts(target_config: PreTrainedConfig) -> dict[str, Any]:
    """The target facts a heads config copies, read from any Hugging Face causal LM config."""
    text = target_config.get_text_config(decoder=True)
    name = str(getattr(target_config, "name_or_path", "") or "")
    return {
        "target_name": Path(name).name if Path(name).exists() else name,  # no path of a machine in a heads folder
        "target_model_type": text.model_type,
        "target_hidden_size": int(text.hidden_size),
        "target_vocab_size": int(text.vocab_size),
        "target_num_layers": int(text.num_hidden_layers),
    }
