"""What PPO decides from the resolved configuration before anything starts. Importing this module imports no torch."""

from __future__ import annotations

from realrl.algo.loading import require_module
from realrl.config.algorithms import PPOOptions
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.graph.mfc import InterfaceRef


def check_ppo(config: RunConfig) -> None:
    """Refuse values that are possible one by one but not together.

    Raises:
        ConfigError: fewer samples than minibatches, greedy sampling, or a reward function in a missing module.
    """
    options: PPOOptions = config.algorithm
    if options.n_minibatches > config.n_seqs:
        raise ConfigError(
            f"algorithm.n_minibatches={options.n_minibatches} is more than n_seqs={config.n_seqs}: "
            "a minibatch would have no sample",
            remedy="Lower algorithm.n_minibatches or raise n_seqs.",
        )
    if config.generation.temperature == 0.0:
        raise ConfigError(
            "generation.temperature=0 samples greedily, and PPO cannot learn from responses that never vary",
            remedy="Set generation.temperature above 0.",
        )
    if options.reward_function is not None:
        require_module(options.reward_function, "algorithm.reward_function")


def reward_interface(config: RunConfig) -> InterfaceRef:
    """The reward model, or `algorithm.reward_function` with its limits.

    Under launcher=inline the function runs in the one process that there is, so that a debugger stops in it.
    """
    options: PPOOptions = config.algorithm
    if options.reward_function is None:
        return InterfaceRef("reward_model")
    return InterfaceRef(
        "function_reward",
        {
            "function": options.reward_function,
            "reads": options.reward_reads,
            "timeout_s": options.reward_timeout_s,
            "concurrency": options.reward_concurrency,
            "on_failure": options.reward_on_failure,
            "in_process": config.launcher == "inline",
        },
    )
