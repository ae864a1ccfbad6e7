"""HeadsConfig: what a heads folder says of itself and of the target it was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

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
    target_revision: str = ""
    """Commit of the target on the Hub, where it was loaded from there."""
    target_tokenizer: str = ""
    """Digest of the tokens the heads were trained with, ``vocabulary_fingerprint``: other ones are a warning."""
    target_fingerprint: str = ""
    """Digest of a few rows of the target's embedding: same shape but other weights is a warning, not silence."""
    adapter: str | None = None
    """Digest of the adapter on the target that was trained together with the heads (Medusa-2), None = the bare target:
    another one, or none, is a warning."""
    features: list[int] | None = None
    """hidden_states indices the heads read, concatenated in this order."""
    draft_vocab_size: int | None = None
    """Tokens the heads can say; None = the whole target vocabulary through the target's own output layer."""
    num_draft_heads: int = 4
    """Depth of the drafts: tokens guessed after the root."""
    num_draft_layers: int = 1
    """Residual blocks per head (Medusa, Hydra)."""
    layer: dict[str, Any] | None = None
    """Sizes of the draft's own decoder layer, named as in a Llama config (EAGLE, Hydra with prefix attention)."""
    unroll: int = 1
    """Steps on its own output that a recurrent family is trained for (EAGLE-3's training-time test); it may draft
    deeper."""
    fc_norm: bool = False
    """EAGLE-3.1: a norm of its own for each feature stream before they are fused."""
    norm_output: bool = False
    """EAGLE-3.1: the next step is fed the output after the final norm, not before it."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual is the fused feature after its norm (the speculators variant)."""
    residual_last: bool = False
    """EAGLE-3: what is fused is added to the target's last hidden state, which is then the last of ``features``."""
    step_path: bool = False
    """EAGLE-3: a matrix beside the attention, over what attention reads, into the residual."""
    prefix_attention: bool = False
    """Hydra++: a decoder layer over the whole prefix stands before the heads."""
    dropout: float = 0.0
    """Hydra++: share of a block's output dropped in training."""
    feature_noise: float = 0.0
    """EAGLE-1: width of the uniform noise on the features in training, for a text of 512 tokens (published: 0.2)."""
    fc_bias: bool = False
    """EAGLE-1 that was trained elsewhere: fc has a bias. Heads made here have none: engines disagree on it."""

    def check_format(self) -> None:
        """Raises ValueError where this folder was written by a release this one cannot follow, or lost its layer
        ids."""
        if not isinstance(self.format_version, int) or self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"these heads have format version {self.format_version}, this release reads up to {FORMAT_VERSION}: "
                "upgrade with `pip install -U headstart-llm`"
            )
        listed, last = self.features, self.target_num_layers
        if not listed or any(type(i) is not int or not 0 <= i <= last for i in listed):
            raise ValueError(
                f"the config of these heads says features={listed}: a list of layer ids was expected, hidden_states "
                f"indices from 0 (the embedding) to {last} (the last layer); write in those the heads were trained on"
            )

    def check_sizes(self, facts: dict[str, Any]) -> None:
        """Raises ValueError where a target of these facts, as of ``target_facts``, is of other sizes than ours."""
        wrong = [
            f"{name.removeprefix('target_')}: heads for {getattr(self, name)}, the target has {facts[name]}"
            for name in ("target_hidden_size", "target_vocab_size", "target_num_layers")
            if facts[name] != getattr(self, name)
        ]
        if wrong:
            raise ValueError(
                f"heads of {self.target_name or 'another target'} do not fit {facts['target_name'] or 'this target'}: "
                + "; ".join(wrong)
            )


LAYER = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)
"""Names of the sizes of a decoder layer."""


def check_layer(layer: Any) -> None:
    """Raises ValueError where a heads config lost sizes of its decoder layer."""
    lacks = [name for name in LAYER if not isinstance(layer, dict) or layer.get(name) is None]
    if lacks:
        raise ValueError(
            f"the config of these heads says layer={layer}: the sizes of a decoder layer were expected, and "
            f"{', '.join(lacks)} are missing; write in those the heads were trained with"
        )


def check_one_feature(config: HeadsConfig) -> None:
    """Raises ValueError where heads that read one hidden state are given several."""
    if len(config.features or ()) != 1:
        raise ValueError(
            f"features={config.features}: {config.family} heads read one hidden state; one index in "
            f"0..{config.target_num_layers} was expected, such as [{config.target_num_layers}], the last one"
        )


ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary scalings that look the same for every length of the text, so that cached keys stay right."""


def layer_facts(target_config: PreTrainedConfig, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sizes of a Llama layer like the target's, from any Hugging Face causal LM config; ``changes`` replace some.

    Raises ValueError naming what cannot be mirrored. A target whose rotary positions turn only a part of each head, or
    that has none (GPT-2), gets a draft layer that turns all of it: the draft learns its own attention.
    """
    text = target_config.get_text_config(decoder=True)
    given = changes or {}
    hidden, heads = int(text.hidden_size), _number(text, "num_attention_heads", given)
    rope = getattr(text, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention") or next((r for r in rope.values() if isinstance(r, dict)), rope))
    rope.pop("partial_rotary_factor", None)
    kind, activation = rope.get("rope_type", "default"), _first(text, ("hidden_act", "hidden_activation"), "silu")
    facts = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _number(text, "num_key_value_heads", given, heads),
        "head_dim": _number(text, "head_dim", given, hidden // heads),
        "intermediate_size": _number(text, "intermediate_size", given, 4 * hidden),
        "hidden_act": _first(text, ("activation_function",), activation),
        "rms_norm_eps": _first(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-6),
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", None) or 2048),
        "rope_parameters": {"rope_theta": 10000.0} | rope | {"rope_type": kind},
    }
    unknown = sorted(set(given) - set(facts))
    if unknown:
        raise ValueError(f"unknown layer sizes {unknown}; known are {sorted(facts)}")
    facts |= given
    kind = facts["rope_parameters"].get("rope_type")
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"rotary scaling {kind!r} depends on the length of the text and cannot be mirrored in a draft layer; give "
            f"layer.rope_parameters of one of the kinds {', '.join(ROPE_KINDS)}"
        )
    if facts["hidden_act"] not in ACT2FN:
        raise ValueError(f"activation {facts['hidden_act']!r} cannot be mirrored: give layer.hidden_act, such as silu")
    if facts["num_attention_heads"] % facts["num_key_value_heads"] or facts["head_dim"] % 2:
        sizes = {name: facts[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        raise ValueError(f"{sizes}: heads in whole groups a key/value head and an even head_dim were expected")
    return facts


def _first(text: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    return next((v for v in (getattr(text, name, None) for name in names) if v is not None), otherwise)


def _number(text: Any, name: str, given: dict[str, Any], otherwise: int | None = None) -> int:
    """A size, given or the target's. Raises ValueError where the target's differs by layer or is missing."""
    try:
        value = given[name] if name in given else getattr(text, name, None)
    except RuntimeError:  # how transformers answers for a size that differs by layer
        value = "one for each layer"
    value = otherwise if value is None else value
    if not isinstance(value, int):
        whose = "layer" if name in given else "the target"
        raise ValueError(f"{whose} says {name}={value!r}; a number was expected: give layer.{name}")
    return value


def target_facts(target_config: PreTrainedConfig) -> dict[str, Any]:
    """The target facts a heads config copies, read from any Hugging Face causal LM config."""
    text = target_config.get_text_config(decoder=True)
    name = str(getattr(target_config, "name_or_path", "") or "")
    return {
        "target_name": Path(name).name if Path(name).exists() else name,  # no path of a machine in a heads folder
        "target_revision": str(getattr(target_config, "_commit_hash", None) or ""),
        "target_model_type": text.model_type,
        "target_hidden_size": int(text.hidden_size),
        "target_vocab_size": int(text.vocab_size),
        "target_num_layers": int(text.num_hidden_layers),
    }
