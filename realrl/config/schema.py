"""The resolved configuration of a run. Every default that a user can rely on is written here, once.

Instances are frozen; derived values are properties. Algorithm options are a model of their own, named by the
experiment (`Experiment.options`), and appear under the key `algorithm`. `realrl config` prints the descriptions. It
lists keys marked `ADVANCED`, which few users change, apart.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict

from realrl.errors import MAX_TEXT_CHARS, is_text

BackendName = Literal["native", "megatron", "deepspeed"]
BUILT_IN = "tiny"  # path of the random model, its tokenizer and the toy task, which no file holds
MAX_DEVICES = 1024  # of all nodes; planning is meant for so many
REASONING_TASKS = "reasoning_gym:"  # start of a dataset path that names tasks instead of a file
ADVANCED: JsonDict = {"advanced": True}


class Section(BaseModel):
    """Base of all configuration sections: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_impossible(cls, value: object, info: ValidationInfo) -> object:
        """pydantic would read true as 1, and would take any text and any whole number."""
        if isinstance(value, str) and not is_text(value):
            raise ValueError(f"text needs valid Unicode without NUL, and at most {MAX_TEXT_CHARS} characters")
        if isinstance(value, int) and abs(value) >= 2**64:
            raise ValueError("a whole number of so many digits is impossible")
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("true and false are no numbers")
        return value


class OptimizerConfig(Section):
    """AdamW with a warm-up and a schedule; no weight decay on norms and biases."""

    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's decay rates of both moments", json_schema_extra=ADVANCED
    )
    eps: float = Field(1e-5, gt=0, description="AdamW's denominator term", json_schema_extra=ADVANCED)
    weight_decay: float = Field(0.05, ge=0, description="decoupled weight decay; norms and biases have none")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="how the learning rate falls after the warm-up"
    )
    warmup_fraction: float = Field(
        0.02, ge=0, lt=1, description="share of all optimizer steps spent warming up", json_schema_extra=ADVANCED
    )
    min_lr_fraction: float = Field(
        0.0, ge=0, le=1, description="final learning rate as a share of the peak", json_schema_extra=ADVANCED
    )
    clip_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this global norm")
    zero_stage: int | None = Field(
        None,
        ge=0,
        le=3,
        description="what data-parallel ranks share out: 1 optimizer state, 2 also gradients, 3 also parameters; "
        "null: 0 with backend=native, else 1",
        json_schema_extra=ADVANCED,
    )
    offload: bool = Field(
        False, description="keep optimizer state and master weights in host memory", json_schema_extra=ADVANCED
    )


class LoRAConfig(Section):
    """Low-rank adapters: small matrices are trained beside the model's weights, which stay as they are."""

    rank: int = Field(
        0, ge=0, description="train adapters of this rank instead of the model's weights; 0 trains the weights"
    )
    alpha: float = Field(16.0, gt=0, description="adapters count alpha / rank", json_schema_extra=ADVANCED)
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ("all-linear",),
        min_length=1,
        description="layers that get an adapter, by name: q, k, v, o, gate, up, down (q_proj, ... mean the same)",
        json_schema_extra=ADVANCED,
    )


class ModelConfigSection(Section):
    """One role's model."""

    path: str = Field(
        BUILT_IN,
        min_length=1,
        description="Hugging Face folder, or 'tiny' for a random model made on the spot from the seed",
    )
    backend: BackendName = Field(
        "native", description="what turns gradients into new parameters; the others need extras"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    activation_checkpointing: bool = Field(
        False,
        description="recompute activations in the backward pass: less memory, more time",
    )
    router_aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="what the load-balancing loss of a model with experts counts; by default what its config.json says",
        json_schema_extra=ADVANCED,
    )
    lora: LoRAConfig = LoRAConfig()


class DatasetConfig(Section):
    """Source of samples."""

    path: str = Field(
        BUILT_IN,
        min_length=1,
        description="JSON, JSONL or parquet file, 'tiny' for the built-in toy task, or reasoning_gym:<task>?size=500",
    )
    max_prompt_tokens: int = Field(256, ge=1, description="samples with longer prompts are dropped and counted")
    max_answer_tokens: int = Field(256, ge=1, description="samples with longer answers are dropped and counted")
    chat_template: bool = Field(False, description="wrap prompts in the tokenizer's chat template")
    shuffle: bool = Field(
        True, description="draw samples in a new order each epoch, made from the seed", json_schema_extra=ADVANCED
    )


class GenerationConfig(Section):
    """Sampling of responses."""

    n_responses: int = Field(1, ge=1, description="responses per prompt; they share one prefill")
    max_new_tokens: int = Field(32, ge=1, description="longest response; without a stop token it counts as truncated")
    min_new_tokens: int = Field(
        0, ge=0, description="no stop token before this many tokens", json_schema_extra=ADVANCED
    )
    temperature: float = Field(1.0, ge=0, description="divides the logits; 0 takes the likeliest token")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0 means all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this total probability")
    stop_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="token ids that end a response, besides the tokenizer's EOS", json_schema_extra=ADVANCED
    )
    max_batch_size: int = Field(
        64, ge=1, description="responses that are decoded together on one worker", json_schema_extra=ADVANCED
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        return self


class AllocationConfig(Section):
    """Devices of each call, and its strategy on them."""

    mode: str = Field(
        "data",
        min_length=1,
        description="data, tensor, pipeline, split, standalone, heuristic, manual (all in calls), or a strategy for "
        "all calls, such as d2t2; allocation=X is short for it",
    )
    calls: dict[str, str] = Field(
        {},
        description="strategy and place of single calls: allocation.calls.<call>=d8@0:0-7 (node:devices) or "
        "d16@0-1 (whole nodes)",
    )
    offload: tuple[str, ...] = Field(
        (),
        description="roles whose parameters go to host memory after their last call of a step, until they are needed",
    )
    offload_frozen: bool = Field(
        False,
        description="the same for every role that is not trained and shares devices with others",
        json_schema_extra=ADVANCED,
    )


class CallConfig(Section):
    """Settings of one call; a null key takes the algorithm's setting of the call, or else the run's."""

    n_mbs: int | None = Field(
        None, ge=1, description="micro-batches per minibatch and worker", json_schema_extra=ADVANCED
    )
    max_tokens_per_mb: int | None = Field(
        None, ge=1, description="token budget of a micro-batch, instead of n_mbs", json_schema_extra=ADVANCED
    )
    min_n_seqs: int | None = Field(
        None,
        ge=1,
        description="the call starts when so many of its samples are there; as many as n_seqs waits for all",
        json_schema_extra=ADVANCED,
    )
    balanced_dp: bool | None = Field(
        None,
        description="data-parallel ranks get equally many samples, instead of equally many tokens",
        json_schema_extra=ADVANCED,
    )
    protocol: str | None = Field(
        None,
        min_length=1,
        description="how samples are divided over the ranks of the mesh: 3D_PROTO, DP_PROTO, ALL_TO_ALL, ONE_TO_ALL, "
        "3D_PP_ONLY, 3D_ALL_MICRO_DP, or one of your own",
        json_schema_extra=ADVANCED,
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="the call runs so many train_steps ahead of the training of its role",
        json_schema_extra=ADVANCED,
    )


class ClusterConfig(Section):
    """The machines."""

    n_nodes: int = Field(1, ge=1, le=MAX_DEVICES, description="number of machines")
    n_devices_per_node: int = Field(
        1, ge=1, le=MAX_DEVICES, description="accelerators of each machine; on the CPU, worker processes"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="'auto' takes CUDA when it is there")
    data_plane: Literal["socket", "collective"] = Field(
        "socket",
        description="how rows move between workers: pulled over sockets, or sent by torch.distributed (gloo, NCCL)",
        json_schema_extra=ADVANCED,
    )
    master_port: int = Field(
        0, ge=0, le=65535, description="port the master listens on; 0 takes a free one", json_schema_extra=ADVANCED
    )
    worker_timeout_s: float = Field(
        120.0,
        ge=2,
        description="a worker that is silent for so long is reported as lost",
        json_schema_extra=ADVANCED,
    )

    @property
    def n_devices(self) -> int:
        """Devices of all nodes: the number of workers."""
        return self.n_nodes * self.n_devices_per_node


class SaveConfig(Section):
    """Times of checkpoints, and the ones that are kept."""

    every_steps: int = Field(0, ge=0, description="write a checkpoint every so many steps; 0 means only at the end")
    every_epochs: int = Field(
        0, ge=0, description="write one after every so many passes over the dataset", json_schema_extra=ADVANCED
    )
    every_s: float = Field(
        0.0,
        ge=0,
        description="write one after the step in which so many seconds have passed since the last; 0 means never",
        json_schema_extra=ADVANCED,
    )
    keep: int = Field(
        2, ge=1, description="checkpoints that stay on disk; older ones are deleted", json_schema_extra=ADVANCED
    )
    keep_best: str = Field(
        "",
        description="a metric, such as eval/reward: the checkpoint of the step where it was best stays too",
        json_schema_extra=ADVANCED,
    )
    best_is: Literal["max", "min"] = Field(
        "max", description="whether a high or a low value of save.keep_best is better", json_schema_extra=ADVANCED
    )
    at_end: bool = Field(True, description="write a checkpoint after the last step", json_schema_extra=ADVANCED)
    generations_every_steps: int = Field(
        1, ge=1, description="write responses to generations.jsonl every so many steps", json_schema_extra=ADVANCED
    )
    n_generations: int | None = Field(
        4,
        ge=0,
        description="prompts of a step whose responses go to generations.jsonl; 0 for none, null for all",
        json_schema_extra=ADVANCED,
    )
    generations_path: str = Field(
        "", description="file of the responses; empty: generations.jsonl in run_dir", json_schema_extra=ADVANCED
    )

    @property
    def is_on(self) -> bool:
        """True if any checkpoint is written."""
        return self.at_end or self.every_steps > 0 or self.every_epochs > 0 or self.every_s > 0


class EvalConfig(Section):
    """Evaluation of the models on rows that they are not trained on."""

    every_steps: int = Field(0, ge=0, description="evaluate after every so many steps; 0 means never")
    at_start: bool = Field(False, description="evaluate before the first step too", json_schema_extra=ADVANCED)
    path: str = Field(
        "",
        description="validation data, in the dataset's format; empty: other rows of the toy task, if trained on that",
    )
    n_seqs: int | None = Field(
        None, ge=1, description="evaluate on so many rows, the first ones; null means all", json_schema_extra=ADVANCED
    )
    n_responses: int = Field(
        1, ge=1, description="responses per prompt; pass@k needs k of them", json_schema_extra=ADVANCED
    )
    temperature: float | None = Field(
        None,
        ge=0,
        description="of sampling; 0 takes the likeliest token, null what generation.temperature says",
        json_schema_extra=ADVANCED,
    )
    pass_threshold: float = Field(
        0.5, description="a response passes if its reward is more than this", json_schema_extra=ADVANCED
    )
    only: bool = Field(
        False, description="evaluate once and train nothing: what realrl eval does", json_schema_extra=ADVANCED
    )

    @property
    def is_on(self) -> bool:
        """True if a training run is evaluated."""
        return self.every_steps > 0 or self.at_start


class RecoverConfig(Section):
    """Recovery after a failure."""

    retries: int = Field(
        2,
        ge=0,
        description="restarts of the run, in all, from the last checkpoint after a worker or the master was lost; "
        "errors that would come again end the run",
    )


class RunConfig(Section):
    """A whole run.

    `algorithm` is an instance of the experiment's options; `models` has an entry for every role.
    """

    experiment: str = Field(description="registered name, file or module of the experiment")
    preset: str = Field("", description="ready-made settings (configs/preset), or a YAML file of your own")
    steps: int = Field(10, ge=1, description="traversals of the graph, in all")
    epochs: int = Field(
        1_000_000,
        ge=1,
        description="passes over the dataset; the run ends at `steps` or here",
        json_schema_extra=ADVANCED,
    )
    seed: int = Field(1, ge=0, lt=2**63, description="everything random follows from it")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="of computation; master weights are always fp32"
    )
    n_seqs: int = Field(32, ge=1, le=1_000_000, description="samples per step")
    min_n_seqs: int | None = Field(
        None,
        ge=1,
        description="a call that does not train starts when so many of its samples are there; null waits for all",
        json_schema_extra=ADVANCED,
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="generation runs so many train_steps ahead of training; 0 waits for the newest parameters",
    )
    max_refill_rounds: int = Field(
        10,
        ge=0,
        description="how often a step may load further samples in the place of those that its calls drop",
        json_schema_extra=ADVANCED,
    )
    n_mbs: int | None = Field(
        None,
        ge=1,
        description="micro-batches per minibatch and worker; null means one, or with p pipeline stages p, and 2p in "
        "training",
    )
    max_tokens_per_mb: int | None = Field(None, ge=1, description="token budget of a micro-batch, instead of n_mbs")
    run_dir: str = Field(
        "", description="folder of the run's results; empty means a new one, runs/<experiment>/<date>_<time>"
    )
    resume: str = Field(
        "never",
        min_length=1,
        description="never; auto: from the newest whole checkpoint in run_dir, if there is any; or the folder of one",
    )
    launcher: Literal["local", "inline"] = Field(
        "local", description="local: a process per device; inline: all in this process, for a debugger"
    )
    dataset: DatasetConfig = DatasetConfig()
    models: dict[str, ModelConfigSection] = {}
    generation: GenerationConfig = GenerationConfig()
    algorithm: Any = None
    allocation: AllocationConfig = AllocationConfig()
    calls: dict[str, CallConfig] = Field(
        {},
        description="settings of single calls, in the place of what the run and the algorithm say: "
        "calls.<call>.n_mbs=2; null takes them back",
        json_schema_extra=ADVANCED,
    )
    cluster: ClusterConfig = ClusterConfig()
    save: SaveConfig = SaveConfig()
    eval: EvalConfig = EvalConfig()
    recover: RecoverConfig = RecoverConfig()
    track: tuple[Literal["tensorboard", "wandb"], ...] = Field((), description="also send metrics there")

    def staleness_of(self, *calls: str) -> int:
        """Return how many train_steps a call runs ahead of training: its setting in `calls`, or else `max_staleness`.

        The first of several calls that has a setting decides. An algorithm whose maths depends on the lead of a call
        uses this.
        """
        own = (self.calls[call].max_staleness for call in calls if call in self.calls)
        return next((lead for lead in own if lead is not None), self.max_staleness)
