"""The runs of a check: a baseline, and variants that differ from it in one thing each.

Invariants:
    - a variant's configuration differs from the baseline's in launcher, workers, strategy, micro-batches, or a stop and
      a resume, alone;
    - the baseline has one worker, and one micro-batch for each minibatch;
    - what the user set for models, data and the algorithm stays, but for the sizes in `checked_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from realrl.config.schema import AllocationConfig, CallConfig, ClusterConfig, ModelConfigSection, RunConfig
from realrl.experiment.planning import first_steps

N_STEPS = 2
N_SEQS = 11  # odd, so that two workers or micro-batches never get equally many
N_NEW_TOKENS = 12
EPS = 1e-3
_STOP_EVERY = 9  # one token of so many ends a response
_MOST_STOPS = 4096
_TIMEOUT_S = 90.0
_RECORDER = "realrl.checker.recorder:"


@dataclass(frozen=True)
class Variant:
    """One run.

    Attributes:
        name: short name.
        what: what differs from the baseline.
        mode: allocation of all calls.
        n_mbs: micro-batches of each minibatch and worker.
        is_inline: it runs in the process of the check.
        host: class of its workers.
        is_resumed: it stops after the first step, and another process goes on from its checkpoint.
    """

    name: str
    what: str
    n_workers: int = 1
    mode: str = "data"
    n_mbs: int = 1
    is_inline: bool = True
    host: str = f"{_RECORDER}CheckedWorker"
    is_resumed: bool = False

    @property
    def keeps_layout(self) -> bool:
        """True if every worker holds whole parameters, as in the baseline."""
        return self.mode == "data"


BASELINE = Variant("baseline", "one worker, one micro-batch")
TWO_MBS = Variant("micro-batches-2", "two micro-batches", n_mbs=2)
FOUR_MBS = Variant("micro-batches-4", "four micro-batches", n_mbs=4)
REVERSED = Variant("reversed", "samples of each call in reverse", host=f"{_RECORDER}ReversedWorker")
SHUFFLED = Variant("shuffled", "samples in another order for each call", host=f"{_RECORDER}ShuffledWorker")
SPOILT = Variant("junk", "junk in rows of prompts that a key leaves at 0", host=f"{_RECORDER}SpoiltWorker")
AGAIN = Variant("again", "the same once more, in another process", is_inline=False)
RESUMED = Variant("resumed", "saved after a step, resumed in another process", is_resumed=True)
DATA = Variant("data-2", "two data-parallel workers", n_workers=2, is_inline=False)
TENSOR = Variant("tensor-2", "two tensor-parallel workers", n_workers=2, mode="tensor", is_inline=False)
PIPELINE = Variant("pipeline-2", "two pipeline stages", n_workers=2, mode="pipeline", is_inline=False)
VARIANTS = (BASELINE, TWO_MBS, FOUR_MBS, REVERSED, SHUFFLED, SPOILT, AGAIN, RESUMED, DATA, TENSOR, PIPELINE)
IN_MICRO_BATCHES = (TWO_MBS.name, FOUR_MBS.name)
IN_ORDERS = (REVERSED.name, SHUFFLED.name)
ON_ENGINES = (TENSOR.name, PIPELINE.name)


def checked_config(config: RunConfig, named: Collection[str], vocab_sizes: Iterable[int] = ()) -> RunConfig:
    """Return the configuration that all runs of a check begin with: two short steps on the CPU in float32.

    AdamW's denominator term is large, so that an update is nearly proportional to the gradient: rounding stays
    rounding, where plain AdamW makes of a gradient near zero a step of full size.

    Args:
        config: what the user composed.
        named: keys that the user set, which stay: ``n_seqs``, ``generation.max_new_tokens``, ``generation.stop_ids``,
            ``algorithm.n_minibatches``.
        vocab_sizes: sizes of the vocabularies of roles that generate; stop tokens are drawn from them, so that
            responses differ in length.
    """
    changes: dict[str, object] = {
        "plan": "",
        "precision": "fp32",
        "run_dir": "",
        "resume": "never",
        "track": (),
        "max_staleness": 0,
        "n_mbs": None,
        "max_tokens_per_mb": None,
        "min_n_seqs": None,
        "calls": {},
        "allocation": AllocationConfig(),
        "generation": config.generation.model_copy(update=_shorter(config, named, vocab_sizes)),
        "recover": config.recover.model_copy(update={"retries": 0}),
    }
    if "n_seqs" not in named:
        changes["n_seqs"] = N_SEQS
        if "algorithm.n_minibatches" not in named and hasattr(config.algorithm, "n_minibatches"):
            changes["algorithm"] = config.algorithm.model_copy(update={"n_minibatches": 1})
    changes["models"] = {
        name: section.model_copy(
            update={
                "backend": "native",
                "optimizer": section.optimizer.model_copy(update={"eps": EPS, "zero_stage": None, "offload": False}),
            }
        )
        for name, section in config.models.items()
    }
    short = first_steps(config.model_copy(update=changes), N_STEPS)
    return short.model_copy(update={"save": short.save.model_copy(update={"n_generations": 0, "generations_path": ""})})


def _shorter(config: RunConfig, named: Collection[str], vocab_sizes: Iterable[int]) -> dict[str, object]:
    generation, changes = config.generation, dict[str, object]()
    n_new = generation.max_new_tokens
    if "generation.max_new_tokens" not in named:
        n_new = min(n_new, N_NEW_TOKENS)
        changes["max_new_tokens"] = n_new
        changes["min_new_tokens"] = min(generation.min_new_tokens, n_new)
    if "generation.stop_ids" not in named:
        size = min(vocab_sizes, default=0)
        stride = max(_STOP_EVERY, size // _MOST_STOPS)
        changes["stop_ids"] = tuple(dict.fromkeys((*generation.stop_ids, *range(stride // 2, size, stride))))
    return changes


def configs_of(variant: Variant, base: RunConfig, cut: Iterable[str], run_dir: str) -> tuple[RunConfig, ...]:
    """Return the configurations of one run, which are several where it stops and goes on.

    Args:
        base: result of `checked_config`.
        cut: calls that are cut into micro-batches: those of roles with weights.
        run_dir: folder of the run.
    """
    whole = base.model_copy(
        update={
            "run_dir": run_dir,
            "launcher": "inline" if variant.is_inline else "local",
            "allocation": AllocationConfig(mode=variant.mode),
            "calls": {call: CallConfig(n_mbs=variant.n_mbs) for call in cut},
            "cluster": ClusterConfig(
                n_devices_per_node=variant.n_workers, device="cpu", collective_timeout_s=_TIMEOUT_S
            ),
        }
    )
    if not variant.is_resumed:
        return (whole,)
    models = {name: _scheduled(section) for name, section in whole.models.items()}  # one schedule for both parts
    save = whole.save.model_copy(update={"at_end": True})
    begun = whole.model_copy(update={"models": models, "steps": 1, "save": save})
    return begun, whole.model_copy(update={"models": models, "launcher": "local", "resume": "auto"})


def _scheduled(section: ModelConfigSection) -> ModelConfigSection:
    """Return a role's section whose learning rate follows the schedule of a whole check."""
    n_steps = section.optimizer.schedule_steps or N_STEPS
    return section.model_copy(update={"optimizer": section.optimizer.model_copy(update={"schedule_steps": n_steps})})
