"""Recipe: one YAML file is one run. Unknown keys are refused by name; ``key=value`` overrides go on top.

The recipe ends at the door: the loop takes plain arguments out of it and hands no config objects on.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headstart.heads import DraftHeads, family


class Part(BaseModel):
    """A section of a recipe; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class HeadsPart(Part):
    """Which heads, and their shape."""

    family: str = "medusa"
    """Key of ``headstart.heads.FAMILIES``."""
    num_draft_heads: int = Field(default=4, ge=1)
    """Guesses after the root on the longest path."""
    num_draft_layers: int | None = Field(default=None, ge=1)
    """Residual blocks a head (Medusa, Hydra)."""
    features: list[int] | None = None
    """Layers the heads read, as hidden_states indices; null = what the family is published with."""
    layer: dict[str, Any] | None = None
    """Sizes of the draft's decoder layer that differ from the target's, named as in a Llama config (EAGLE, Hydra)."""
    unroll: int | None = Field(default=None, ge=1)
    """Steps on their own output that EAGLE heads are trained for."""
    fc_norm: bool | None = None
    """EAGLE-3.1: a norm for each feature stream."""
    norm_output: bool | None = None
    """EAGLE-3.1: the next step reads the output after its norm."""
    norm_before_residual: bool | None = None
    """EAGLE-3: the residual goes on from the fused feature after its norm."""
    residual_last: bool | None = None
    """EAGLE-3: start in the target's output space; of the engines, vLLM alone loads such heads (with ``fc_norm``)."""
    step_path: bool | None = None
    """EAGLE-3: a matrix beside the attention into the residual; of the engines, vLLM alone loads such heads."""
    prefix_attention: bool | None = None
    """Hydra++: a decoder layer over the prefix before the heads."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Hydra++: dropout in its blocks."""
    feature_noise: float | None = Field(default=None, ge=0)
    """EAGLE-1: noise on the features in training, published with 0.2."""
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Most frequent tokens of the training answers that the heads can say; null = all, through the target's output."""

    @model_validator(mode="after")
    def _options_are_the_familys(self) -> HeadsPart:
        known = {"num_draft_heads", *family(self.family).options}
        unknown = sorted(self.options().keys() - known)
        if unknown:
            raise ValueError(f"{self.family} heads have no {', '.join(unknown)}; they have {', '.join(sorted(known))}")
        return self

    def options(self) -> dict[str, Any]:
        """What is given to ``from_target``, beside the draft vocabulary."""
        return self.model_dump(exclude={"family", "draft_vocab_size"}, exclude_none=True)


class DataPart(Part):
    """What is trained on. Paths are relative to the recipe's folder, or to the working folder."""

    train: list[str] = Field(min_length=1)
    """Files or folders of conversations with answers (messages, ShareGPT or prompt and answer)."""
    heldout: list[str] = []
    """Files of prompts that evaluation decodes; never trained on."""
    validate_rows: int = Field(default=0, ge=0)
    """Training rows put aside, the last ones: their answers are guessed at every evaluation, and never trained on."""
    max_length: int = Field(default=512, ge=8)
    """Tokens a row; longer ones are cut and counted."""
    packing: bool = False
    """Several conversations in a line of ``max_length`` tokens, apart from each other, in place of padding."""
    licenses: dict[str, str] = {}
    """Licences of the training data by file name, for the model card."""
    remember: bool = False
    """Keep the target's features in memory: later epochs need no forward of the target."""
    cache: str | None = None
    """Keep them in this folder (as ``out``, from the working folder), for every run on this target and these rows."""
    cache_layers: list[int] | None = None
    """Layers to keep beside those these heads read, as hidden_states indices, so that families share the cache."""
    cache_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of what is kept; auto = the target's, bfloat16 halves what a float32 target needs and rounds it."""
    train_on: Literal["assistant", "all"] = "assistant"
    """"all" supervises user and system tokens too."""

    @model_validator(mode="after")
    def _kept_in_one_place(self) -> DataPart:
        if self.remember and self.cache is not None:
            raise ValueError(f"remember=true and cache={self.cache}: features are kept in memory or on disk, not both")
        return self


class OptimPart(Part):
    """AdamW and its schedule, counted in optimizer steps."""

    lr: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps in which the learning rate rises linearly from zero."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls afterwards, to zero at the last step."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    batch_size: int = Field(default=8, ge=1)
    """Rows a forward, on each process."""
    accumulation: int = Field(default=1, ge=1)
    """Forwards an optimizer step."""
    epochs: float = Field(default=1.0, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    """Ends the run earlier than ``epochs`` where given."""
    fit_batches: int = Field(default=0, ge=0)
    """Micro-batches from which the heads' start is solved by least squares before the first step (Medusa with a draft
    vocabulary)."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of the heads' matmuls; weights, losses and optimizer stay float32."""
    recompute: bool = False
    """Activation checkpointing: the heads' activations are made again in backward, less memory for more time."""
    compile: bool = False
    """torch.compile of the heads' loss."""


class LossPart(Part):
    """How a guess is compared with the target's law."""

    divergence: Literal["soft_ce", "kl", "lk_alpha", "lk"] = "soft_ce"
    """"lk" and "lk_alpha" aim at acceptance itself, alpha = sum_v min(p_v, q_v)."""
    depth_decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of a depth, as a factor per depth (Medusa: 0.8)."""
    depths: list[tuple[float, int]] = [(0.0, 1 << 10)]
    """From which share of the run on how many depths of a recurrent family are unrolled, at most all it has."""
    regression: float = Field(default=0.0, ge=0)
    """Weight of what a family learns beside the law (EAGLE-1: the next feature itself)."""

    @field_validator("depths")
    @classmethod
    def _begins_at_zero(cls, depths: list[tuple[float, int]]) -> list[tuple[float, int]]:
        shares = [share for share, _ in depths]
        if (
            not depths
            or shares != sorted(set(shares))
            or shares[0] != 0
            or shares[-1] >= 1
            or min(d for _, d in depths) < 1
        ):
            raise ValueError(
                "pairs of share and depths were expected, shares rising from 0.0 to below 1, depths from 1"
            )
        return depths


class JointPart(Part):
    """Medusa-2: the heads of an earlier run and a LoRA on the target learn together. The text becomes that of the
    adapted target, which a KL divergence holds near the original."""

    heads: str
    """``out/heads`` of an earlier run on the same target, relative to the working folder: heads first, then both."""
    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=16, gt=0)
    """The LoRA's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.05, ge=0, lt=1)
    modules: list[str] | None = Field(default=None, min_length=1)
    """Names of the target's layers that are adapted; null = every linear layer but the output."""
    scale: float = Field(default=0.01, gt=0)
    """Weight c of the heads' loss beside the target's own."""
    schedule: Literal["sine", "linear", "constant"] = "sine"
    """How that weight rises to ``scale`` over the run."""
    lr: float = Field(default=1e-4, gt=0)
    """Of the LoRA; the heads keep optim.lr."""


class EveryPart(Part):
    """Intervals, all in optimizer steps; 0 = only at the end."""

    log: int = Field(default=10, ge=1)
    evaluate: int = Field(default=500, ge=0)
    """Eight prompts of 64 tokens cost as much as 20 small steps (the log tells the share): 4% of the time at 500."""
    save: int = Field(default=200, ge=0)
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept, beside the one with the best evaluation."""


class EvaluatePart(Part):
    """Evaluation decodes the held-out prompts with the real tree decoder."""

    max_new_tokens: int = Field(default=64, ge=1)
    nodes: int = Field(default=16, ge=1)
    """Nodes a pass, root included."""


class WandbPart(Part):
    """Tracking on Weights & Biases, when asked for; a run that goes on is the same run there."""

    project: str
    name: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"


class Recipe(Part):
    """A whole run."""

    target: str
    """``smollm2``, a folder, or a Hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the frozen target."""
    device_map: str | None = None
    """Spreads the target over the devices of a single process, as in transformers ("auto"); null = whole on each."""
    out: str
    """Folder of the run: heads, checkpoints, log.jsonl."""
    seed: int = 0
    resume: bool = True
    """Go on from the last complete checkpoint in ``out``."""
    heads: HeadsPart = HeadsPart()
    data: DataPart
    optim: OptimPart = OptimPart()
    loss: LossPart = LossPart()
    joint: JointPart | None = None
    every: EveryPart = EveryPart()
    evaluate: EvaluatePart = EvaluatePart()
    wandb: WandbPart | None = None
    tensorboard: bool = False
    """Numbers and drafts for TensorBoard, in ``out/tensorboard``."""

    @model_validator(mode="after")
    def _heldout_is_not_trained_on(self) -> Recipe:
        both = sorted(set(self.data.train) & set(self.data.heldout))
        if both:
            raise ValueError(f"{both} is named in data.train and in data.heldout; evaluation needs prompts of its own")
        return self

    @model_validator(mode="after")
    def _joint_has_what_it_needs(self) -> Recipe:
        if self.joint is None:
            return self
        if "heads" in self.model_fields_set:
            raise ValueError("with joint, the heads are those of joint.heads, whatever their shape: drop section heads")
        if self.data.remember or self.data.cache is not None:
            raise ValueError("data.remember and data.cache keep features of a frozen target; joint trains it: drop it")
        if self.optim.fit_batches:
            raise ValueError("optim.fit_batches would solve anew for heads that joint.heads has trained: drop it")
        return self

    @model_validator(mode="after")
    def _regression_has_a_regressor(self) -> Recipe:
        nothing = family(self.heads.family).extra is DraftHeads.extra
        if self.loss.regression and nothing and self.joint is None:  # with joint, the heads are not known yet
            raise ValueError(f"{self.heads.family} heads regress nothing: set loss.regression to 0")
        return self

    def digest(self) -> str:
        """What must stay the same for a run to go on. Left out: where, how often, and the paths of the data and of the
        heads that joint training begins with, whose contents the run compares itself."""
        left: dict[str, Any] = dict.fromkeys(("out", "resume", "every", "wandb", "tensorboard", "evaluate"), True)
        data = {"train", "heldout", "licenses", "cache", "cache_layers"}
        paths = {"data": data, "joint": {"heads"} if self.joint else True}
        how = {"optim": {"recompute", "compile"}}
        same = self.model_dump(exclude=left | paths | how)
        return hashlib.sha256(yaml.safe_dump(same, sort_keys=True).encode()).hexdigest()[:16]
