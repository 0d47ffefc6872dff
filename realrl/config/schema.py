"""The resolved configuration of a run. Every default that a user can rely on is written here, once.

Instances are frozen; derived values are properties. Algorithm options are a model of their own, named by the
experiment (`Experiment.options`), and appear under the key `algorithm`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all configuration sections: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class OptimizerConfig(Section):
    """AdamW with a warm-up and a schedule; no weight decay on norms and biases."""

    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_fraction: float = Field(0.02, ge=0, lt=1)
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    clip_grad_norm: float = Field(1.0, gt=0)


class ModelConfigSection(Section):
    """One role's model.

    `path` is a Hugging Face folder, or `"tiny"` for a random model made on the spot from the run's seed.
    """

    path: str = "tiny"
    backend: Literal["native"] = "native"
    optimizer: OptimizerConfig = OptimizerConfig()
    activation_checkpointing: bool = False


class DatasetConfig(Section):
    """Where samples come from: JSON, JSONL or parquet, or `"tiny"` for the built-in toy task."""

    path: str = "tiny"
    max_prompt_tokens: int = Field(256, ge=1)
    max_answer_tokens: int = Field(256, ge=1)
    chat_template: bool = False
    shuffle: bool = True


class GenerationConfig(Section):
    """How responses are sampled."""

    n_responses: int = Field(1, ge=1)
    max_new_tokens: int = Field(32, ge=1)
    min_new_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    stop_ids: tuple[int, ...] = ()
    max_batch_size: int = Field(64, ge=1)


class AllocationConfig(Section):
    """Which devices each call runs on, and how it is spread over them."""

    mode: str = "data"
    calls: dict[str, str] = {}


class ClusterConfig(Section):
    """The machines; `device` "auto" takes CUDA when it is there."""

    n_nodes: int = Field(1, ge=1)
    n_devices_per_node: int = Field(1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    worker_timeout_s: float = Field(120.0, gt=0)


class SaveConfig(Section):
    """When checkpoints are written; 0 means only at the end. `keep` checkpoints stay on disk."""

    every_steps: int = Field(0, ge=0)
    keep: int = Field(2, ge=1)
    at_end: bool = True


class EvalConfig(Section):
    every_steps: int = Field(0, ge=0)


class RecoverConfig(Section):
    retries: int = Field(0, ge=0)


class RunConfig(Section):
    """A whole run."""

    experiment: str
    preset: str = ""
    steps: int = Field(10, ge=1)
    epochs: int = Field(1_000_000, ge=1)
    seed: int = Field(1, ge=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    n_seqs: int = Field(32, ge=1)
    n_mbs: int | None = Field(None, ge=1)
    max_tokens_per_mb: int | None = Field(None, ge=1)
    run_dir: str = ""
    resume: str = "never"
    launcher: Literal["local", "inline"] = "local"
    dataset: DatasetConfig = DatasetConfig()
    models: dict[str, ModelConfigSection] = {}
    generation: GenerationConfig = GenerationConfig()
    algorithm: Any = None
    allocation: AllocationConfig = AllocationConfig()
    cluster: ClusterConfig = ClusterConfig()
    save: SaveConfig = SaveConfig()
    eval: EvalConfig = EvalConfig()
    recover: RecoverConfig = RecoverConfig()
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
