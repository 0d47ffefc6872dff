"""Additions of a run plan to an experiment: micro-batching, checks of roles, where the dataset lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.config.schema import ModelConfigSection, RunConfig
from realrl.errors import AllocationError, AssetError, ConfigError, GraphError
from realrl.experiment.declaration import Experiment, Role
from realrl.experiment.discovery import load_experiment
from realrl.experiment.models import notes_of_models, role_configs
from realrl.experiment.planning import check_models_fit, plan_run
from realrl.graph.mfc import MFCDef
from realrl.plan.groups import GroupKind
from realrl.plan.hooks import CallHooks, Realloc
from realrl.plan.protocols import CallLayout, register_protocol, transfer_protocol
from realrl.plan.samples.transfer import Share
from realrl.runtime.worker.reallocs import Reallocs


def config(experiment: Experiment, **settings: object) -> RunConfig:
    models = dict.fromkeys(experiment.roles, ModelConfigSection())
    return RunConfig(
        experiment=experiment.name, algorithm=experiment.options(), models=models, **settings  # type: ignore[arg-type]
    )  # fmt: skip


def with_calls(experiment: Experiment, **changes: object) -> Experiment:
    return replace(experiment, mfcs=lambda c: [replace(mfc, **changes) for mfc in experiment.calls(c)], adds=())


def with_generation(experiment: Experiment, **changes: object) -> Experiment:
    def mfcs(config: RunConfig) -> list[MFCDef]:
        return [replace(m, **changes) if m.name == "actor_gen" else m for m in experiment.calls(config)]  # type: ignore[arg-type]

    return replace(experiment, mfcs=mfcs, adds=())


def test_calls_take_the_micro_batching_of_the_run_unless_they_say_their_own() -> None:
    sft = load_experiment("sft")
    plan = plan_run(config(sft, max_tokens_per_mb=100), sft)
    assert [mfc.max_tokens_per_mb for mfc in plan.mfcs] == [100]
    plan = plan_run(config(sft, max_tokens_per_mb=100), with_calls(sft, n_mbs=3))
    assert [(mfc.n_mbs, mfc.max_tokens_per_mb) for mfc in plan.mfcs] == [(3, None)]
    with pytest.raises(ConfigError, match="sets both n_mbs and max_tokens_per_mb"):
        plan_run(config(sft), with_calls(sft, n_mbs=3, max_tokens_per_mb=5))


def test_ppo_on_two_devices() -> None:
    ppo = load_experiment("ppo")
    plan = plan_run(
        config(ppo, cluster={"n_devices_per_node": 2}, allocation={"mode": "split"}), ppo
    )  # fmt: skip
    assert plan.n_workers == 2
    assert plan.dataset_rank == plan.role_ranks("actor")[0] == plan.role_ranks("ref")[0]
    assert plan.role_ranks("critic") != plan.role_ranks("actor")
    assert plan.samples_per_step == 32


def test_parameters_live_where_they_are_trained() -> None:
    ppo = load_experiment("ppo")
    calls = {"actor_gen": "d2@0:0-1", "critic_inf": "d1@0:0"}
    settings = {"allocation": {"mode": "t2", "calls": calls}, "cluster": {"n_devices_per_node": 2}}
    plan = plan_run(config(ppo, **settings), ppo)
    assert str(plan.home_of("actor")) == "d1t2p1@0:0-1"
    assert [str(a) for a in plan.allocations_of("actor")] == ["d1t2p1@0:0-1", "d2t1p1@0:0-1"]
    assert [str(a) for a in plan.allocations_of("critic")] == ["d1t2p1@0:0-1", "d1t1p1@0:0"]
    assert plan.role_ranks("critic") == (0, 1)
    assert plan.changed_roles == {"actor", "critic"}
    assert {name for name, hooks in plan.hooks.items() if hooks.before} == {"actor_gen", "critic_inf"}


HYBRID: dict[str, object] = {  # training d2t4, generation d4t2
    "allocation": {"mode": "d2t4", "calls": {"actor_gen": "d4t2"}},
    "cluster": {"n_devices_per_node": 8},
}


def test_generation_takes_the_rank_order_of_the_hybrid_engine() -> None:
    """HybridFlow (2024), section 5: 1-4-2 to 1-2-2-2 (p-t-d) gives the tensor groups [1,3][2,4][5,7][6,8] (from 1)."""
    ppo = load_experiment("ppo")
    plan = plan_run(config(ppo, **HYBRID), ppo)
    assert plan.process_groups == plan_run(config(ppo, **HYBRID), ppo).process_groups
    assert plan.allocations["actor_gen"].order == (0, 2, 1, 3, 4, 6, 5, 7)
    assert [name for name, allocation in plan.allocations.items() if allocation.order is not None] == ["actor_gen"]
    tensor = [g.ranks for g in plan.process_groups if g.kind is GroupKind.TP and g.n_ranks == 2]
    assert tensor == [(0, 2), (1, 3), (4, 6), (5, 7)]
    (hook,) = plan.hooks["actor_gen"].before
    assert isinstance(hook, Realloc)
    assert hook.target_allocation == plan.allocations["actor_gen"] in plan.allocations_of("actor")
    reallocs = Reallocs(plan, role_configs(plan))
    plain = replace(hook, target_allocation=replace(hook.target_allocation, order=None))
    assert reallocs.of(hook).total_bytes < reallocs.of(plain).total_bytes


def test_a_rank_order_respects_the_protocol_of_the_call() -> None:
    ppo = load_experiment("ppo")
    with_protocol = with_generation(ppo, protocol="3D_ALL_MICRO_DP")
    plan = plan_run(config(ppo, **HYBRID), with_protocol)
    assert plan.allocations["actor_gen"].order == (0, 2, 1, 3, 4, 6, 5, 7)
    register_protocol("PLAIN_ORDER_ONLY", plain_only, transfer_protocol("3D_PROTO").collect)
    plan = plan_run(config(ppo, **HYBRID), with_generation(ppo, protocol="PLAIN_ORDER_ONLY"))
    assert plan.allocations["actor_gen"].order is None


def plain_only(ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout) -> Sequence[Share]:
    if layout.allocation.order is not None:
        raise AllocationError("PLAIN_ORDER_ONLY knows the plain order only")
    return transfer_protocol("3D_PROTO").distribute(ids, token_counts, layout)


def test_a_model_that_cannot_be_read_has_no_rank_order(tmp_path: Path) -> None:
    ppo = load_experiment("ppo")
    models = dict.fromkeys(ppo.roles, ModelConfigSection(path=str(tmp_path)))
    plan = plan_run(config(ppo, **HYBRID).model_copy(update={"models": models}), ppo)
    assert {allocation.order for allocation in plan.allocations.values()} == {None}
    with pytest.raises(AssetError):
        check_models_fit(plan)


def test_a_reward_function_has_no_home() -> None:
    ppo = load_experiment("ppo")
    options = ppo.options(reward_function="realrl.data.tiny:toy_reward")
    settings = {"cluster": {"n_devices_per_node": 2}, "allocation": {"mode": "t2"}}
    plan = plan_run(config(ppo, **settings).model_copy(update={"algorithm": options}), ppo)
    assert plan.home_of("reward") is None
    assert [str(a) for a in plan.allocations_of("reward")] == ["d1t2p1@0:0-1"]


def test_a_filter_moves_no_parameters() -> None:
    dapo = load_experiment("dapo")
    overrides = ["cluster.n_devices_per_node=2", "allocation=t2", "allocation.calls.filter=d2"]
    plan = plan_run(compose(dapo, overrides), dapo)
    assert str(plan.allocations["filter"]) == "d2t1p1@0:0-1"
    assert plan.hooks["filter"] == CallHooks()
    assert [str(allocation) for allocation in plan.allocations_of("actor")] == ["d1t2p1@0:0-1"]


def test_roles_are_offloaded_after_their_last_call() -> None:
    ppo = load_experiment("ppo")
    plan = plan_run(config(ppo, allocation={"offload": ("critic", "ref")}), ppo)
    offloads = {name: [hook.role for hook in hooks.after] for name, hooks in plan.hooks.items() if hooks.after}
    assert offloads == {"critic_train": ["critic"], "ref_inf": ["ref"]}
    with pytest.raises(ConfigError, match=r"no role 'rev'.*\n.*Did you mean 'ref'"):
        plan_run(config(ppo, allocation={"offload": ("rev",)}), ppo)


def test_only_calls_that_do_not_train_stream() -> None:
    ppo = load_experiment("ppo")
    plan = plan_run(config(ppo, min_n_seqs=4), ppo)
    assert {mfc.name: mfc.min_n_seqs for mfc in plan.mfcs if mfc.is_train} == dict.fromkeys(
        ("actor_train", "critic_train")
    )
    assert {mfc.min_n_seqs for mfc in plan.mfcs if not mfc.is_train} == {4}
    plan = plan_run(config(ppo, min_n_seqs=400), ppo)
    assert {mfc.min_n_seqs for mfc in plan.mfcs if not mfc.is_train} == {32}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"aktor": Role(trainable=True)}, "runs role 'actor', which experiment 'sft' does not declare. Did you mean"),
        ({"actor": Role(trainable=False)}, "role 'actor' of experiment 'sft' is frozen, but a train_step call uses it"),
        (
            {"actor": Role(trainable=True), "judge": Role(trainable=False)},
            "role 'judge' of experiment 'sft' has no call",
        ),
    ],
)
def test_roles_and_calls_must_fit(roles: dict[str, Role], message: str) -> None:
    sft = load_experiment("sft")
    with pytest.raises(GraphError, match=message):
        plan_run(config(sft), replace(sft, roles=roles))


def test_a_head_that_no_checkpoint_holds_is_noted(tmp_path: Path) -> None:
    lm, scalar = tmp_path / "lm", tmp_path / "scalar"
    for folder, kind in ((lm, "LlamaForCausalLM"), (scalar, "LlamaForSequenceClassification")):
        folder.mkdir()
        shape = {"architectures": [kind], "model_type": "llama", "vocab_size": 300, "hidden_size": 8}
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        (folder / "config.json").write_text(json.dumps(shape | sizes))
    ppo = load_experiment("ppo")

    def notes(**paths: Path) -> tuple[str, ...]:
        run = config(ppo)
        models = run.models | {role: ModelConfigSection(path=str(path)) for role, path in paths.items()}
        return notes_of_models(plan_run(run.model_copy(update={"models": models}), ppo))

    [note] = notes(actor=lm, critic=lm, reward=scalar)
    assert note.startswith(f"models.critic.path={lm} is a language model: the value head of role 'critic'")
    assert notes(actor=lm, critic=scalar) == ()
    assert notes() == ()


def test_a_sampler_that_is_not_there_is_refused_where_responses_are_all() -> None:
    experiment = load_experiment("gen")
    with pytest.raises(ConfigError, match=r"algorithm\.sampler=sampel: there is no sampler 'sampel'.* 'sample'"):
        plan_run(compose(experiment, ["algorithm.sampler=sampel"]), experiment)
