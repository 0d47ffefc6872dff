"""The resolved configuration of a run. Every default that a user can rely on is written here, once.

Instances are frozen; derived values are properties. Algorithm options are a model of their own, named by the
experiment (`Experiment.options`), and appear under the key `algorithm`. `realrl config` prints the descriptions. It
lists `rare` keys, which few users change, apart.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from realrl.errors import MAX_TEXT_CHARS, is_text

BackendName = Literal["native", "megatron", "deepspeed"]
BUILT_IN = "tiny"  # path of the random model, its tokenizer and the toy task, which no file holds
MAX_DEVICES = 1024  # of all nodes; planning is meant for so many
REASONING_TASKS = "reasoning_gym:"  # start of a dataset path that names tasks instead of a file


def key(default: Any, description: str, **limits: Any) -> Any:
    """Return the field of a key with its only default; `limits` are those of pydantic, such as ``gt=0``."""
    return Field(default, description=description, **limits)


def rare(default: Any, description: str, **limits: Any) -> Any:
    """Return the field of a `key` that few users change."""
    return Field(default, description=description, json_schema_extra={"advanced": True}, **limits)


_DEFAULT_INTERVAL_S = 600.0  # of checkpoints
_LEAST_PAUSES = 30  # by default they are so many times further apart than what they take


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

    lr: float = key(1e-5, "peak learning rate", gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = rare(
        (0.9, 0.95), "AdamW's decay rates of both moments"
    )
    eps: float = rare(1e-5, "AdamW's denominator term", gt=0)
    weight_decay: float = key(0.05, "decoupled weight decay; norms and biases have none", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = key("cosine", "how the learning rate falls after the warm-up")
    schedule_steps: int | None = rare(
        None,
        "steps over which warm-up and schedule go; null: those of the run, so that steps=10 is no part of steps=40",
        ge=1,
    )
    warmup_fraction: float = rare(0.02, "share of the schedule spent warming up", ge=0, lt=1)
    min_lr_fraction: float = rare(0.0, "final learning rate as a share of the peak", ge=0, le=1)
    clip_grad_norm: float = key(1.0, "gradients are clipped to this global norm", gt=0)
    zero_stage: int | None = rare(
        None,
        "what data-parallel ranks share out: 1 optimizer state, 2 also gradients, 3 also parameters; "
        "null: 0 with backend=native, else 1",
        ge=0,
        le=3,
    )
    offload: bool = rare(False, "keep optimizer state and master weights in host memory")


class LoRAConfig(Section):
    """Low-rank adapters: small matrices are trained beside the model's weights, which stay as they are."""

    rank: int = key(0, "train adapters of this rank instead of the model's weights; 0 trains the weights", ge=0)
    alpha: float = rare(16.0, "adapters count alpha / rank", gt=0)
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = rare(
        ("all-linear",),
        "layers that get an adapter, by name: q, k, v, o, gate, up, down (q_proj, ... mean the same)",
        min_length=1,
    )


class ModelConfigSection(Section):
    """One role's model."""

    path: str = key(
        BUILT_IN, "Hugging Face folder, or 'tiny' for a random model made on the spot from the seed", min_length=1
    )
    backend: BackendName = key("native", "what turns gradients into new parameters; the others need extras")
    optimizer: OptimizerConfig = OptimizerConfig()
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    router_aux_loss_coef: float | None = rare(
        None, "what the load-balancing loss of a model with experts counts; by default what its config.json says", ge=0
    )
    lora: LoRAConfig = LoRAConfig()


class FieldNames(Section):
    """Names that a file has for the fields of a row; null: the name of the key. "a.b" is field b of the object a."""

    prompt: str | None = rare(None, "what the file calls the prompt", min_length=1)
    messages: str | None = rare(None, "what the file calls whole conversations", min_length=1)
    answer: str | None = rare(None, "what the file calls the answer", min_length=1)
    chosen: str | None = rare(None, "what the file calls the better answer of a pair", min_length=1)
    rejected: str | None = rare(None, "what the file calls the worse answer of a pair", min_length=1)
    label: str | None = rare(None, "what the file calls true for good answers, false for bad ones", min_length=1)
    id: str | None = rare(None, "what the file calls the name of a row", min_length=1)
    complete: str | None = rare(None, "what the file calls false for answers that are cut off", min_length=1)

    @property
    def given(self) -> dict[str, str]:
        """Field -> its name, for those that have another one."""
        return {field: name for field, name in self.model_dump().items() if name is not None}


class DatasetFile(Section):
    """One of several files of samples."""

    path: str = Field(description="as dataset.path, of this file alone", min_length=1)
    weight: float | None = key(
        None,
        "share of the samples, relative to the other files' weights; null for all of them: every row once an epoch",
        gt=0,
    )
    fields: FieldNames = FieldNames()


class DatasetConfig(Section):
    """Source of samples."""

    path: str = key(
        BUILT_IN,
        "JSON, JSONL or parquet file, a folder or pattern of them, a data set of the Hub that is in the local cache, "
        "'tiny' for the built-in toy task, or reasoning_gym:<task>?size=500",
        min_length=1,
    )
    files: dict[str, DatasetFile] = key(
        {}, "several files in the place of path: dataset.files.<name>=FILE, dataset.files.<name>.weight=2"
    )
    fields: FieldNames = FieldNames()
    max_prompt_tokens: int = key(256, "samples with longer prompts are dropped and counted", ge=1)
    max_answer_tokens: int = key(256, "samples with longer answers are dropped and counted", ge=1)
    chat_template: bool = key(False, "wrap prompts in the tokenizer's chat template")
    shuffle: bool = rare(True, "draw samples in a new order each epoch, made from the seed")

    @property
    def sources(self) -> dict[str, DatasetFile]:
        """The files by name, each with all names of its fields; a single one is called ""."""
        files = self.files or {"": DatasetFile(path=self.path)}
        return {
            name: file.model_copy(update={"fields": self.fields.model_copy(update=file.fields.given)})
            for name, file in files.items()
        }

    @property
    def paths(self) -> dict[str, str]:
        """Configuration key -> path of every source."""
        if not self.files:
            return {"dataset.path": self.path}
        return {f"dataset.files.{name}.path": file.path for name, file in self.files.items()}

    @property
    def described(self) -> str:
        """The paths, for messages."""
        return ", ".join(self.paths.values())


class GenerationConfig(Section):
    """Sampling of responses."""

    n_responses: int = key(1, "responses per prompt; they share one prefill", ge=1)
    max_new_tokens: int = key(32, "longest response; without a stop token it counts as truncated", ge=1)
    min_new_tokens: int = rare(0, "no stop token before this many tokens", ge=0)
    temperature: float = key(1.0, "divides the logits; 0 takes the likeliest token", ge=0)
    top_k: int = key(0, "sample among the k likeliest tokens; 0 means all", ge=0)
    top_p: float = key(1.0, "sample among the likeliest tokens of this total probability", gt=0, le=1)
    stop_ids: tuple[Annotated[int, Field(ge=0)], ...] = rare(
        (), "token ids that end a response, besides the EOS of tokenizer and model"
    )
    max_batch_size: int = rare(64, "responses that are decoded together on one worker", ge=1)
    cuda_graphs: bool = rare(
        True, "launch a decode step as a whole, on CUDA and without tensor parallelism; false: kernel by kernel"
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        return self


class AllocationConfig(Section):
    """Devices of each call, and its strategy on them."""

    mode: str = key(
        "data",
        "data, tensor, pipeline, split, standalone, heuristic, auto (as realrl plan finds), manual (all in calls), or "
        "a strategy for all calls, such as d2t2; allocation=X is short for it",
        min_length=1,
    )
    calls: dict[str, str] = key(
        {},
        "strategy and place of single calls: allocation.calls.<call>=d8@0:0-7 (node:devices) or d16@0-1 (whole nodes)",
    )
    offload: tuple[str, ...] = key(
        (), "roles whose parameters go to host memory after their last call of a step, until they are needed"
    )
    fuse: tuple[str, ...] = rare(
        (), "two train_step calls that train at the same time on one mesh, and fill each other's pipeline bubbles"
    )
    offload_frozen: bool = rare(False, "the same for every role that is not trained and shares devices with others")
    overlap: bool = rare(
        False, "parameters come while other calls compute, and stay for a call's next batch, where the memory allows it"
    )


class CallConfig(Section):
    """Settings of one call; a null key takes the algorithm's setting of the call, or else the run's."""

    n_mbs: int | None = rare(None, "micro-batches per minibatch and worker", ge=1)
    max_tokens_per_mb: int | None = rare(None, "token budget of a micro-batch, instead of n_mbs", ge=1)
    min_n_seqs: int | None = rare(
        None, "the call starts when so many of its samples are there; as many as n_seqs waits for all", ge=1
    )
    balanced_dp: bool | None = rare(
        None, "data-parallel ranks get equally many samples, instead of equally many tokens"
    )
    protocol: str | None = rare(
        None,
        "how samples are divided over the ranks of the mesh: 3D_PROTO, DP_PROTO, ALL_TO_ALL, ONE_TO_ALL, "
        "3D_PP_ONLY, 3D_ALL_MICRO_DP, or one of your own",
        min_length=1,
    )
    max_staleness: int | None = rare(None, "the call runs so many train_steps ahead of the training of its role", ge=0)
    virtual_stages: int | None = rare(
        None,
        "chunks of blocks on each pipeline stage of a train_step (interleaved 1F1B); null: as its strategy says, or 1",
        ge=1,
    )


class ClusterConfig(Section):
    """The machines."""

    n_nodes: int = key(
        1,
        "number of machines; more than one need launcher=external, slurm or ray; in a job the number of its machines",
        ge=1,
        le=MAX_DEVICES,
    )
    n_devices_per_node: int = key(1, "accelerators of each machine; on the CPU, worker processes", ge=1, le=MAX_DEVICES)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "'auto' takes CUDA where every worker of a node has a device")
    hardware: str = rare(
        "", "the machine, for plans and predictions: a name of configs/hardware, or a file; empty: this one's, if known"
    )
    device_memory_gb: float | None = rare(
        None,
        "memory of a device, in 1e9 bytes, by which colocate, heuristic, split and standalone cut models; null: that "
        "of this machine's accelerators, and not known on CPUs",
        gt=0,
    )
    shares_devices: bool = rare(
        False,
        "for tests on few GPUs: workers share them in turn, and what they send each other goes through host memory",
    )
    data_plane: Literal["socket", "collective"] = rare(
        "socket", "how rows move between workers: pulled over sockets, or sent by torch.distributed (gloo, NCCL)"
    )
    device_rows_gb: float = rare(
        1.0,
        "memory of an accelerator, in 1e9 bytes, for outputs of calls that later calls read; the oldest above it go to "
        "host memory",
        ge=0,
    )
    master_port: int = rare(
        0,
        "port that the master listens on; 0 takes a socket file that only its user can open, or with "
        "launcher=external a free port",
        ge=0,
        le=65535,
    )
    master_address: str = rare(
        "", "address at which machines join with launcher=external; empty: this machine's on its default route"
    )
    join_file: str = rare(
        "",
        "file for `realrl node --join`, with the run's key; empty: one in ~/.cache/realrl, unless REALRL_KEY is set",
    )
    ray_address: str = rare(
        "", "HOST:PORT of the Ray cluster of launcher=ray; empty: RAY_ADDRESS, or the cluster of this machine"
    )
    ray_cpus: int | None = rare(
        None, "CPUs of each machine that launcher=ray asks Ray for; null: one for each worker", ge=1
    )
    lease_s: float = rare(
        10.0, "a machine that hears nothing of the master for so long ends its workers", ge=2, le=3600
    )
    start_timeout_s: float = rare(
        300.0, "time in which enough machines must join, at the start and after the loss of one", ge=1
    )
    worker_timeout_s: float = rare(120.0, "a worker or master that is silent for so long counts as lost", ge=2)
    collective_timeout_s: float = rare(
        3600.0, "a worker that waits for others in a collective for so long fails; more than the longest call", ge=2
    )
    check_replicas_every_steps: int = rare(
        100,
        "compare the parameters of data-parallel workers by a hash after every so many train_steps of a role; 0 means "
        "never",
        ge=0,
    )

    @property
    def n_needed_per_node(self) -> int:
        """CUDA devices that the workers of one node need at least."""
        return 1 if self.shares_devices else self.n_devices_per_node

    @property
    def device_rows_bytes(self) -> int:
        """`device_rows_gb` in bytes."""
        return int(self.device_rows_gb * 1e9)


class SaveConfig(Section):
    """Times of checkpoints, and the ones that are kept."""

    every_steps: int = key(0, "write a checkpoint every so many steps; 0 means only at the end", ge=0)
    every_epochs: int = rare(0, "write one after every so many passes over the dataset", ge=0)
    every_s: float | None = rare(
        None,
        "write one after the step in which so many seconds have passed since the last; 0 means never; null: 600, or 30 "
        "times what the last one took, if neither every_steps nor every_epochs is set and at_end is",
        ge=0,
    )
    keep: int = rare(2, "checkpoints that stay on disk; older ones are deleted", ge=1)
    keep_best: str = rare(
        "", "a metric, such as eval/reward/mean: the checkpoint of the step where it was best stays too"
    )
    best_is: Literal["max", "min"] = rare("max", "whether a high or a low value of save.keep_best is better")
    at_end: bool = rare(True, "write a checkpoint after the last step")
    generations_every_steps: int = rare(1, "write responses to generations.jsonl every so many steps", ge=1)
    n_generations: int | None = rare(
        4, "prompts of a step whose responses go to generations.jsonl; 0 for none, null for all", ge=0
    )
    generations_path: str = rare("", "file of the responses; empty: generations.jsonl in run_dir")

    @property
    def is_clocked_by_default(self) -> bool:
        """True if nobody set when checkpoints on the way are written, so that the clock asks for them."""
        return self.every_s is None and self.at_end and not self.every_steps and not self.every_epochs

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints that the clock asks for, apart from what they cost; 0 for none."""
        return self.interval_after(0.0)

    def interval_after(self, took_s: float) -> float:
        """Return `interval_s` after a checkpoint that took so many seconds; the default one grows with that."""
        if not self.is_clocked_by_default:
            return self.every_s or 0.0
        return max(_DEFAULT_INTERVAL_S, _LEAST_PAUSES * took_s)

    @property
    def is_regular(self) -> bool:
        """True if checkpoints are written before the last step, too."""
        return bool(self.every_steps or self.every_epochs or self.interval_s)

    @property
    def writes(self) -> bool:
        """True if a run that trains is saved at all; an interrupted one is then saved too."""
        return self.at_end or self.is_regular


class EvalConfig(Section):
    """Evaluation of the models on rows that they are not trained on."""

    every_steps: int = key(0, "evaluate after every so many steps; 0 means never", ge=0)
    at_start: bool = rare(False, "evaluate before the first step too")
    path: str = key(
        "", "validation data, in the dataset's format; empty: other rows of the toy task, if trained on that"
    )
    n_seqs: int | None = rare(None, "evaluate on so many rows, the first ones; null means all", ge=1)
    n_responses: int = rare(1, "responses per prompt; pass@k needs k of them", ge=1)
    temperature: float | None = rare(
        None, "of sampling; 0 takes the likeliest token, null what generation.temperature says", ge=0
    )
    pass_threshold: float = rare(0.5, "a response passes if its reward is more than this")
    only: bool = rare(False, "evaluate once and train nothing: what realrl eval does")

    @property
    def is_on(self) -> bool:
        """True if a training run is evaluated."""
        return self.every_steps > 0 or self.at_start


class RecoverConfig(Section):
    """Recovery after a failure."""

    retries: int = key(
        2,
        "restarts of the run, in all, from the last checkpoint after a worker or the master was lost; "
        "errors that would come again end the run",
        ge=0,
    )


class RunConfig(Section):
    """A whole run.

    `algorithm` is an instance of the experiment's options; `models` has an entry for every role.
    """

    experiment: str = Field(description="registered name, file or module of the experiment")
    preset: str = key("", "ready-made settings (configs/preset), or a YAML file of your own")
    plan: str = rare("", "file that realrl plan wrote: the calls run where it says, with its settings")
    steps: int = key(10, "traversals of the graph, in all", ge=1)
    epochs: int = rare(1_000_000, "passes over the dataset; the run ends at `steps` or here", ge=1)
    seed: int = key(1, "everything random follows from it", ge=0, lt=2**63)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto",
        "of computation; auto: bf16 on CUDA devices that have it, fp32 elsewhere; master weights are always fp32",
    )
    n_seqs: int = key(32, "samples per step", ge=1, le=1_000_000)
    min_n_seqs: int | None = rare(
        None, "a call that does not train starts when so many of its samples are there; null waits for all", ge=1
    )
    max_staleness: int = key(
        0, "generation runs so many train_steps ahead of training; 0 waits for the newest parameters", ge=0
    )
    max_refill_rounds: int = rare(
        10, "how often a step may load further samples in the place of those that its calls drop", ge=0
    )
    n_mbs: int | None = key(
        None,
        "micro-batches per minibatch and worker; null means one, or with p pipeline stages p, and 2p in training",
        ge=1,
    )
    max_tokens_per_mb: int | None = key(None, "token budget of a micro-batch, instead of n_mbs", ge=1)
    run_dir: str = key("", "folder of the run's results; empty means a new one, runs/<experiment>/<date>_<time>")
    resume: str = key(
        "never",
        "never; auto: from the newest whole checkpoint in run_dir, if there is any; or the folder of one",
        min_length=1,
    )
    launcher: Literal["local", "inline", "external", "slurm", "ray"] = key(
        "local",
        "local: a process per device of this machine; external: the same on each machine that joins by `realrl node`; "
        "slurm: on each machine of the job in which this is typed; ray: on machines of a Ray cluster; "
        "inline: all in this process, for a debugger",
    )
    dataset: DatasetConfig = DatasetConfig()
    models: dict[str, ModelConfigSection] = {}
    generation: GenerationConfig = GenerationConfig()
    algorithm: Any = None
    allocation: AllocationConfig = AllocationConfig()
    calls: dict[str, CallConfig] = rare(
        {},
        "settings of single calls, in the place of what the run and the algorithm say: "
        "calls.<call>.n_mbs=2; null takes them back",
    )
    cluster: ClusterConfig = ClusterConfig()
    save: SaveConfig = SaveConfig()
    eval: EvalConfig = EvalConfig()
    recover: RecoverConfig = RecoverConfig()
    track: tuple[Literal["tensorboard", "wandb"], ...] = key((), "also send metrics there")
    show: tuple[str, ...] = rare((), "further metrics that the line of each step shows, such as actor/entropy")

    @property
    def is_on_machines(self) -> bool:
        """True if agents start the workers, on machines that join the run."""
        return self.launcher not in ("local", "inline")

    def staleness_of(self, *calls: str) -> int:
        """Return how many train_steps a call runs ahead of training: its setting in `calls`, or else `max_staleness`.

        The first of several calls that has a setting decides. An algorithm whose maths depends on the lead of a call
        uses this.
        """
        own = (self.calls[call].max_staleness for call in calls if call in self.calls)
        return next((lead for lead in own if lead is not None), self.max_staleness)
