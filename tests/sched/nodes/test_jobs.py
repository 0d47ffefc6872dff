"""Environments as launchers leave them, and what is read from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import UsageError
from realrl.sched.nodes.jobs import Allocation, Job, allocation_of, job_of, without_job

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "night-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29400",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "243728385",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[01-03]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n01",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[02-03]",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n03",
    "SLURM_RESTART_COUNT": "5",
}
PODS = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "ppo-0.ppo", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        (TORCHRUN, Job(1, 4, id="torchrun-night-7-2", master_host="alpha", launcher="torchrun")),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, Job(1, 4, master_host="alpha", launcher="torchrun")),
        (MPIRUN, Job(2, 2, id="mpirun-243728385", launcher="mpirun")),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "3"}, Job(2, 2, id="mpirun-243728385", launcher="mpirun")),
        (HYDRA, Job(3, 2, local_rank=1, launcher="mpirun")),
        (BATCH, Job(0, 3, is_everywhere=False, master_host="n01", launcher="SLURM")),
        (STEP, Job(1, 2, local_rank=1, id="slurm-12-4-5", master_host="n02", launcher="SLURM")),
        (PODS, Job(1, 0, master_host="ppo-0.ppo", master_port=29500, launcher="Kubernetes")),
    ],
)
def test_each_launcher_tells_the_place_of_a_process(environment: dict[str, str], job: Job) -> None:
    assert job_of(environment) == job


def test_on_a_login_node_with_an_allocation_a_machine_has_no_number() -> None:
    environment = {name: value for name, value in BATCH.items() if name != "SLURMD_NODENAME"}
    assert job_of(environment) == Job(None, 3, is_everywhere=False, master_host="n01", launcher="SLURM")


def test_a_step_on_one_machine_has_the_number_of_that_machine_in_the_job() -> None:
    environment = {**BATCH, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n03"}
    job = job_of(environment)
    assert job is not None
    assert (job.index, job.n_machines, job.is_everywhere) == (2, 3, False)


@pytest.mark.parametrize("outer", [STEP, PODS, MPIRUN])
def test_the_launcher_that_is_closest_to_the_process_counts(outer: dict[str, str]) -> None:
    inner, alone = job_of({**outer, **TORCHRUN}), job_of(outer)
    assert inner is not None
    assert alone is not None
    assert (inner.launcher, inner.index, inner.others) == ("torchrun", 1, (alone.launcher,))
    both = job_of({**STEP, **MPIRUN})
    assert both is not None
    assert (both.launcher, both.others) == ("mpirun", ("SLURM",))


def test_nothing_is_no_job() -> None:
    assert job_of({"RANK": "0", "MASTER_ADDR": "here"}) is None
    assert allocation_of({}) is None


def test_the_allocation_has_hosts_and_the_least_cores() -> None:
    assert allocation_of(BATCH) == Allocation("12", ("n01", "n02", "n03"), 8, 1)
    assert allocation_of(STEP) == Allocation("12", ("n01", "n02", "n03"), 8, 4)
    assert allocation_of({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}) == Allocation("1", ("", ""))


def test_wrong_values_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="environment variable GROUP_RANK='x' is no number of a job"):
        job_of({**TORCHRUN, "GROUP_RANK": "x"})
    with pytest.raises(UsageError, match=r"environment variable SLURM_JOB_NODELIST: 'n\[' is no list of hosts"):
        job_of({**BATCH, "SLURM_JOB_NODELIST": "n["})


@given(st.dictionaries(st.sampled_from(sorted({**TORCHRUN, **MPIRUN, **STEP, **PODS, **HYDRA})), st.text(max_size=5)))
def test_any_environment_gives_a_job_or_an_error(environment: dict[str, str]) -> None:
    told = "environment variable"
    try:
        job_of(environment)
        allocation_of(environment)
    except UsageError as error:
        told = str(error)
    assert "environment variable" in told


def test_workers_do_not_inherit_the_ranks_of_torchrun() -> None:
    own = {"PATH": "/bin", "MASTERS": "2", "NCCL_DEBUG": "INFO"}
    assert without_job({**TORCHRUN, **own, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == own
    assert without_job({**own, "RANK": "3"}) == {**own, "RANK": "3"}
