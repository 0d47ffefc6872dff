from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.discovery import load_experiment
from realrl.experiment.models import with_precision
from realrl.experiment.planning import plan_run
from realrl.profiler.sizes import judging_call, probes_of, subjects_of, work_of

GB = 10**9


def plan_of(name, *overrides):
    experiment = load_experiment(name)
    return plan_run(with_precision(compose(experiment, ["precision=fp32", *overrides])), experiment)


@pytest.mark.parametrize("name", ["ppo", "sft", "dpo", "rw"])
@pytest.mark.parametrize("n_workers", [1, 2])
def test_every_class_has_enough_sizes(name, n_workers):
    subjects = subjects_of(plan_of(name), memory_bytes=8 * GB)
    probes = probes_of(subjects, n_workers=n_workers)
    counts = Counter(probe.kind for probe in probes)
    assert ("collectives" in counts) == (n_workers > 1)
    assert ("generate" in counts) == (name == "ppo")
    assert min(counts.values()) >= 6
    for probe in probes:
        if probe.kind in ("inference", "train_step", "generate"):
            config = subjects[probe.model].config
            assert probe.prompt_tokens + probe.response_tokens <= config.max_positions
            assert probe.n_layers <= config.n_layers
        if probe.model and probe.kind != "generate":
            assert probe.tokens <= subjects[probe.model].most_tokens


def test_batches_end_with_the_largest_of_the_run():
    for most, batches in ((1, {1}), (8, {1, 4, 8}), (64, {1, 4, 16, 64}), (200, {1, 4, 16, 64, 200})):
        subjects = subjects_of(plan_of("ppo", f"generation.max_batch_size={most}"), memory_bytes=8 * GB)
        probes = [probe for probe in probes_of(subjects, n_workers=1) if probe.kind == "generate"]
        assert {probe.n_sequences for probe in probes} == batches
        assert len({probe.n_layers for probe in probes}) == 2


def test_sizes_of_a_class_grow():
    probes = probes_of(subjects_of(plan_of("ppo"), memory_bytes=8 * GB), n_workers=2)
    for kind, some in groupby(probes, key=lambda probe: (probe.kind, probe.model, probe.n_layers)):
        assert all(work_of(a) <= work_of(b) for a, b in pairwise(some)), kind


@pytest.mark.parametrize("n_workers", [1, 2])
def test_passes_show_what_new_sizes_cost_and_what_workers_take_from_each_other(n_workers):
    probes = probes_of(subjects_of(plan_of("ppo"), memory_bytes=8 * GB), n_workers=n_workers)
    for kind in ("inference", "train_step"):
        of_kind = {probe for probe in probes if probe.kind == kind}
        new, alone = ({p for p in of_kind if getattr(p, name)} for name in ("is_new", "is_alone"))
        assert len(new) >= 3
        assert bool(alone) == (n_workers > 1)
        assert {replace(p, is_new=False, is_alone=False) for p in new | alone} < of_kind
    assert not any(p.is_new or p.is_alone for p in probes if p.kind not in ("inference", "train_step"))


def test_roles_of_one_shape_are_measured_once():
    assert list(subjects_of(plan_of("ppo"), memory_bytes=8 * GB)) == ["actor"]


def test_a_large_model_is_cut_to_what_fits():
    whole = subjects_of(plan_of("ppo"), memory_bytes=8 * GB)["actor"].config
    cut = subjects_of(plan_of("ppo"), memory_bytes=24 * 10**6)["actor"].config
    assert 2 <= cut.n_layers < whole.n_layers
    assert cut.hidden_size == whole.hidden_size


def test_a_model_that_fits_in_no_way_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)2 blocks of role 'actor' take .* of each device.*smaller model"):
        subjects_of(plan_of("ppo"), memory_bytes=10**6)


def test_responses_that_share_a_prompt_are_measured_where_the_engine_computes_it_once():
    for found in (plan_of("ppo"), plan_of("ppo", "cluster.device=cuda")):
        probes = probes_of(subjects_of(found, memory_bytes=8 * GB), n_workers=1)
        for kind in ("inference", "train_step"):
            shared = [probe for probe in probes if probe.kind == kind and probe.n_alike > 1]
            assert len(shared) >= 4
            assert all(probe.n_sequences % probe.n_alike == 0 for probe in shared)
            assert len({probe.n_layers for probe in shared}) == 2
    half = plan_of("ppo", "cluster.device=cuda", "precision=bf16")
    assert all(p.n_alike == 1 for p in probes_of(subjects_of(half, memory_bytes=8 * GB), n_workers=1))


def test_reward_functions_are_measured_where_they_read_responses_alone():
    assert judging_call(plan_of("ppo")) is None  # a model judges
    assert judging_call(plan_of("sft")) is None
    whole = plan_of("grpo", "algorithm.reward_function=realrl.data.tiny:toy_reward")
    assert judging_call(whole).name == "rew_inf"
    subjects = subjects_of(whole, memory_bytes=8 * GB)
    probes = [probe for probe in probes_of(subjects, n_workers=1, n_judged=4) if probe.kind == "rewards"]
    assert [probe.n_sequences // probe.n_alike for probe in probes] == [1, 4, 16, 32, 64, 128]
    assert {probe.n_alike for probe in probes} == {4}
    assert not any(probe.kind == "rewards" for probe in probes_of(subjects, n_workers=1))
