"""Random and hand-made inputs of the master."""

import dataclasses

from hypothesis import reject
from hypothesis import strategies as st

from realrl.config.schema import RunConfig, SaveConfig
from realrl.errors import AllocationError, ConfigError, GraphError
from realrl.graph.build import build_graph, dataset_keys
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, OffloadHook, ParamReallocHook
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy, legal_meshes
from realrl.plan.fused_calls import fusion_of
from realrl.plan.hooks import Overlap, plan_hooks
from realrl.plan.memory.overlap import can_come_early, can_stay
from realrl.sched.calls import schedule_calls
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.track.track_plan import TrackPlan

INFERENCE, GENERATE, TRAIN = InterfaceType.INFERENCE, InterfaceType.GENERATE, InterfaceType.TRAIN_STEP


def strategies_of(n_devices, max_dp):
    """All strategies of a mesh whose data-parallel size is at most `max_dp`."""
    sizes = range(1, n_devices + 1)
    return [
        ParallelStrategy(dp, tp, n_devices // dp // tp)
        for dp in sizes
        for tp in sizes
        if n_devices % (dp * tp) == 0 and dp <= max_dp
    ]


def make_config(
    cluster, *, n_steps=3, epochs=1000, seed=7, shuffle=True, max_refill_rounds=0, moves_rows=False, eval_section=None
):
    """The part of a run's configuration that the master reads."""
    return RunConfig(
        experiment="x", steps=n_steps, epochs=epochs, seed=seed, max_refill_rounds=max_refill_rounds,
        dataset={"shuffle": shuffle}, eval=eval_section or {},
        cluster={"n_nodes": cluster.n_nodes, "n_devices_per_node": cluster.n_devices_per_node,
                 "data_plane": "collective" if moves_rows else "socket"},
    )  # fmt: skip


CONFIG_KEYS = ("n_steps", "epochs", "seed", "shuffle", "max_refill_rounds", "moves_rows")


def make_track(mfcs, allocations, config, *, hooks=None, fuse=(), dataset_rank=0, **fields):
    """A track from MFCs that read `prompt_ids`."""
    graph = build_graph(mfcs, ["prompt_ids"])
    calls = schedule_calls(graph, allocations, hooks=hooks, fusion=fusion_of(graph, fuse))
    return TrackPlan(calls, dataset_keys(graph), config, dataset_rank, **fields)


def make_plan(
    mfcs, allocations, cluster, *, save_every_steps=0, save_every_epochs=0, save_at_end=False,
    checkpoint_directory="", eval_section=None, evaluation=None, **settings,
):  # fmt: skip
    """A plan from MFCs that read `prompt_ids`; `settings` are of the configuration, or fields of the track."""
    config = make_config(
        cluster, eval_section=eval_section, **{key: settings.pop(key) for key in CONFIG_KEYS if key in settings}
    )
    return MasterPlan(
        make_track(mfcs, allocations, config, **settings), evaluation,
        SaveConfig(every_steps=save_every_steps, every_epochs=save_every_epochs, at_end=save_at_end),
        checkpoint_directory,
    )  # fmt: skip


def saved_every_step(plan):
    """The same plan with checkpoints."""
    return dataclasses.replace(plan, save=SaveConfig(every_steps=1, at_end=False))


def with_resume(plan, point):
    """The same plan, continued from a checkpoint."""
    return dataclasses.replace(plan, main=dataclasses.replace(plan.main, resume=point))


def on_all(mfcs, cluster, dp=None):
    """Every call data-parallel on all devices, or with `dp` and tensor-parallel for the rest."""
    mesh = next(mesh for mesh in legal_meshes(cluster) if mesh.n_devices == cluster.n_devices)
    dp = dp or cluster.n_devices
    allocation = Allocation(mesh, ParallelStrategy(dp, cluster.n_devices // dp, 1))
    return {mfc.name: allocation for mfc in mfcs}


def ppo(n_seqs=8, *, max_staleness=0, gen_n_seqs=None, min_n_seqs=None, n_minibatches=2):
    """Actor, critic, ref and reward; inference streams if `min_n_seqs` is given."""
    keys = ("input_ids", "rewards", "ref_logprobs", "values")
    stream = {"n_seqs": n_seqs, "min_n_seqs": min_n_seqs}
    train = {"n_seqs": n_seqs, "n_minibatches": n_minibatches}
    return [
        MFCDef("actor_gen", "actor", GENERATE, "x", ("prompt_ids",), ("input_ids",), n_seqs=gen_n_seqs or n_seqs,
               max_staleness=max_staleness),
        MFCDef("rew_inf", "reward", INFERENCE, "x", ("input_ids",), ("rewards",), log_return_value=True, **stream),
        MFCDef("ref_inf", "ref", INFERENCE, "x", ("input_ids",), ("ref_logprobs",), **stream),
        MFCDef("critic_inf", "critic", INFERENCE, "x", ("input_ids",), ("values",), max_staleness=max_staleness,
               **stream),
        MFCDef("actor_train", "actor", TRAIN, "x", keys, **train),
        MFCDef("critic_train", "critic", TRAIN, "x", keys, **train),
    ]  # fmt: skip


@st.composite
def plans(draw, max_staleness=2, drops=False, fuses=False):
    """Any graph of one to six calls, on any meshes of up to four devices, with any limits, hooks and protocols.

    With `drops` one or more calls drop samples, if the hooks allow it. With `fuses` two calls train together.
    """
    cluster = draw(st.sampled_from([Cluster(1, 1), Cluster(1, 2), Cluster(1, 4), Cluster(2, 2)]))
    step_size = draw(st.sampled_from([4, 6, 8]))
    divisors = [n for n in range(1, step_size + 1) if step_size % n == 0]
    mfcs, keys = [], ["prompt_ids"]
    for i in range(draw(st.integers(1, 4))):
        n_seqs = step_size if i == 0 else draw(st.sampled_from(divisors))
        reads = tuple(key for key in keys if draw(st.booleans())) or (keys[-1],)
        mfcs.append(
            MFCDef(
                f"call{i}", draw(st.sampled_from("abc")), INFERENCE, "x", reads, (f"k{i}",), n_seqs=n_seqs,
                min_n_seqs=draw(st.none() | st.integers(1, n_seqs)),
                max_staleness=draw(st.integers(0, max_staleness)), log_return_value=draw(st.booleans()),
                balanced_dp=draw(st.booleans()),
            )
        )  # fmt: skip
        keys.append(f"k{i}")
    shared = draw(st.sampled_from(divisors))
    for role in draw(st.sets(st.sampled_from("abc"), min_size=2 * fuses, max_size=2)):
        reads = tuple(key for key in keys if draw(st.booleans())) or (keys[-1],)
        n_seqs = shared if fuses else draw(st.sampled_from(divisors))
        n_minibatches = draw(st.integers(1, min(n_seqs, 3)))
        sizes = {"n_seqs": n_seqs, "n_minibatches": n_minibatches, "n_passes": draw(st.integers(1, 2))}
        mfcs.append(MFCDef(f"train_{role}", role, TRAIN, "x", reads, **sizes))
    mfcs = draw(with_dropping(mfcs)) if drops else mfcs
    mfcs = draw(with_hooks(mfcs))
    allocations = {}
    for mfc in mfcs:
        mesh = draw(st.sampled_from(list(legal_meshes(cluster))))
        smallest = min(mfc.n_seqs // mfc.n_minibatches, mfc.min_n_seqs or mfc.n_seqs)
        allocations[mfc.name] = Allocation(mesh, draw(st.sampled_from(strategies_of(mesh.n_devices, smallest))))
    fuse = draw(st.permutations([mfc.name for mfc in mfcs if mfc.is_train])) if fuses else ()
    if fuses:
        smallest = min(mfc.n_seqs // mfc.n_minibatches for mfc in mfcs if mfc.is_train)
        mesh = allocations[fuse[0]].mesh
        allocations |= dict.fromkeys(
            fuse, Allocation(mesh, draw(st.sampled_from(strategies_of(mesh.n_devices, smallest))))
        )
    mfcs = draw(st.permutations([draw(with_protocol(mfc, allocations[mfc.name])) for mfc in mfcs]))
    try:
        hooks = plan_hooks(build_graph(mfcs, ["prompt_ids"]), allocations)
        fusion_of(build_graph(mfcs, ["prompt_ids"]), fuse)
    except (AllocationError, ConfigError):  # it offloads what another call may be moving, or one waits for the other
        reject()
    return make_plan(
        mfcs, allocations, cluster, n_steps=draw(st.integers(1, 4)),
        dataset_rank=draw(st.integers(0, cluster.n_devices - 1)), shuffle=draw(st.booleans()),
        save_every_steps=draw(st.integers(0, 2)), save_at_end=draw(st.booleans()),
        checkpoint_directory="saves/.step_{step}.partial", moves_rows=draw(st.booleans()), max_refill_rounds=100,
        overlap=draw(overlaps(mfcs, hooks)), fuse=fuse,
    )  # fmt: skip


@st.composite
def overlaps(draw, mfcs, hooks):
    """Any parameters that may stay or come early, beside any calls."""
    names = sorted(mfc.name for mfc in mfcs)
    changed = {role for mfc in mfcs for role in mfc.changed_roles}
    staying = sorted(mfc.name for mfc in mfcs if can_stay(mfc.name, mfc.role, hooks))
    frozen = [mfc.name for mfc in mfcs if mfc.name in staying and mfc.role not in changed]
    early = [mfc.name for mfc in mfcs if not mfc.changed_roles and can_come_early(mfc.name, mfc.role, hooks)]
    some = st.sets(st.sampled_from(names)).map(frozenset)
    resident = draw(st.sets(st.sampled_from(frozen))) if frozen else set()
    stays = draw(st.sets(st.sampled_from(staying))) if staying else set()
    return Overlap(
        frozenset(stays), frozenset(resident), {name: draw(some | st.just(frozenset(names))) for name in early}
    )


@st.composite
def with_dropping(draw, mfcs):
    """The same calls, of which some drop samples."""
    names = [mfc.name for mfc in mfcs if not mfc.is_train]
    dropping = draw(st.sets(st.sampled_from(names), min_size=1, max_size=2))
    return [dataclasses.replace(mfc, may_drop=mfc.name in dropping) for mfc in mfcs]


@st.composite
def with_hooks(draw, mfcs):
    """The same calls with some hooks, as many as do not contradict each other."""
    roles = sorted({mfc.role for mfc in mfcs})
    for _ in range(draw(st.integers(0, 3))):
        i = draw(st.integers(0, len(mfcs) - 1))
        role, eta = ModelName(draw(st.sampled_from(roles))), draw(st.sampled_from([0.1, 1.0]))
        hook = draw(
            st.sampled_from(
                [OffloadHook(), ParamReallocHook(source=role, eta=eta), ParamReallocHook(target=role, eta=eta)]
            )
        )
        side = draw(st.sampled_from(["pre_hooks", "post_hooks"]))
        changed = list(mfcs)
        changed[i] = dataclasses.replace(mfcs[i], **{side: (*getattr(mfcs[i], side), hook)})
        try:
            build_graph(changed, ["prompt_ids"])
        except GraphError:
            continue
        mfcs = changed
    return mfcs


@st.composite
def with_protocol(draw, mfc, allocation):
    """The call with a protocol that gives every rank a sample."""
    smallest = min(mfc.n_seqs // mfc.n_minibatches, mfc.min_n_seqs or mfc.n_seqs)
    names = ["3D_PROTO", "ONE_TO_ALL", "3D_PP_ONLY"]
    names += ["DP_PROTO", "ALL_TO_ALL"] if allocation.mesh.n_devices <= smallest else []
    return mfc if mfc.is_train else dataclasses.replace(mfc, protocol=draw(st.sampled_from(names)))
