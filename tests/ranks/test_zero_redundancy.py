"""Home and call share memory in real workers: no rank holds a byte of a role twice, and no number shows it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realrl.config.compose import compose
from realrl.config.serialize import dump_config
from realrl.data.sample import SequenceSample
from realrl.data.tiny import tiny_tokenizer
from realrl.engine.decoder_engine import DecoderEngine
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.experiment.run_plan import RunPlan
from realrl.model.decoder import Decoder
from realrl.model.files.hf import load_model, save_model
from realrl.model.init import random_model
from realrl.plan.parameters.realloc import ReallocPlan
from realrl.runtime.worker.hook_runner import HookRunner
from realrl.runtime.worker.model_worker import ModelWorker
from realrl.runtime.worker.roles import HostedRole
from realrl.sched.key_value import KeyValueClient
from realrl.sched.messages import HookTime, Initialize, KeySchema, Per, RunCall, RunHooks, SaveCheckpoint, Shutdown
from realrl.shape import MoEConfig, tiny_config
from tests.helpers.live_memory import bytes_alive
from tests.helpers.ranks import run_ranks

Tensors = dict[str, torch.Tensor]
Value = Callable[[Decoder, str], torch.Tensor]


@dataclass
class Rank:
    """A worker without a master: the test says what it does next."""

    worker: ModelWorker
    plan: RunPlan
    hooks: HookRunner
    n_requests: int = 0

    @classmethod
    def start(cls, rank: int, meeting: KeyValueClient, *overrides: str, n_ranks: int, experiment: str = "ppo") -> Rank:
        declared = load_experiment(experiment)
        here = ("preset=tiny", f"cluster.n_devices_per_node={n_ranks}", "cluster.device=cpu", f"n_seqs={4 * n_ranks}")
        config = compose(declared, [*here, *overrides], config_dir=config_dir(), reference=experiment)
        worker = ModelWorker(rank, meeting=meeting)
        worker.handle(Initialize(0, dump_config(config), ("",) * n_ranks))
        assert isinstance(worker._hooks, HookRunner)
        assert worker._plan is not None
        return cls(worker, worker._plan, worker._hooks)

    def hosted(self, call: str) -> HostedRole:
        """The role of a call."""
        return self.worker._roles[next(mfc.role for mfc in self.plan.mfcs if mfc.name == call)]

    def home(self, call: str) -> Tensors:
        engine = self.hosted(call).home_engine
        return {} if engine is None else dict(engine.decoder.named_shards())

    def bytes_alive(self, call: str) -> int:
        """Bytes of the storages under all parameters of a call's role."""
        visiting = self.hosted(call).visiting.values()
        return bytes_alive([*self.home(call).values(), *(t for tensors in visiting for t in tensors.values())])

    def moved(self, call: str) -> ReallocPlan:
        """The plan of the reallocation before a call."""
        return self.hooks._reallocs.of(self.plan.hooks_of(call).before[-1])  # type: ignore[arg-type]

    def run_hooks(self, call: str, when: HookTime = "before") -> None:
        self.n_requests += 1
        self.hooks.run(RunHooks(self.n_requests, self.n_requests, call, 1, when))

    def run_call(self, call: str, ids: tuple[str, ...], *, stays: bool = False) -> tuple[str, ...]:
        """Run a call on this rank's share of the samples, a train_step in two minibatches; returns the share."""
        allocation, rank = self.plan.allocation_of(call), self.worker.rank
        _, dp_rank, _ = allocation.strategy.coordinates(allocation.ranks.index(rank))
        share = ids[dp_rank :: allocation.strategy.dp]
        is_train = call.endswith("_train")
        minibatches = (share[::2], share[1::2]) if is_train else (share,)
        keeps = () if is_train else share
        self.n_requests += 1
        n = self.n_requests
        self.worker.handle(RunCall(n, n, call, 1, minibatches, (), n_steps=3, keeps=keeps, keeps_parameters=stays))
        return share

    def save(self, folder: Path) -> None:
        self.n_requests += 1
        (reply,) = self.worker.handle(SaveCheckpoint(self.n_requests, 1, str(folder)))
        reply.result()  # type: ignore[union-attr]

    def assert_holds(self, call: str, home: Value, away: Value | None = None) -> None:
        """Assert that the role's home has these values, and what was brought for the call has the others.

        Args:
            away: None if nothing was brought for the call.
        """
        hosted = self.hosted(call)
        assert (call in hosted.visiting) == (away is not None)
        sides: list[tuple[Decoder, Mapping[str, torch.Tensor], Value]] = []
        if hosted.home_engine is not None:
            sides.append((hosted.home_engine.decoder, self.home(call), home))
        if away is not None:
            sides.append((hosted.decoder(self.plan.allocation_of(call)), hosted.visiting[call], away))
        for decoder, tensors, value in sides:
            assert tensors.keys() == decoder.specs.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, value(decoder, name).to(tensor.dtype)), (call, name)

    def end(self) -> None:
        self.worker.handle(Shutdown(self.n_requests + 1))


def values(seed: int) -> Value:
    """Make elements that depend on the name of a parameter and on their place in the whole model alone."""

    def value(decoder: Decoder, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        return torch.randn(decoder.specs[name].shape, generator=generator)[decoder.place_of(name)]

    return value


def fill(engine: DecoderEngine | None, value: Value) -> None:
    """Overwrite the parameters of a home, and the masters of a frozen one."""
    for name, tensor in {} if engine is None else engine.kept_tensors().items():
        tensor.data.copy_(value(engine.decoder, name.removeprefix("master of ")))


def model_folder(folder: Path, **changes: Any) -> str:
    """Make a folder of the built-in model with other sizes."""
    tokenizer = tiny_tokenizer()
    save_model(random_model(replace(tiny_config(len(tokenizer)), **changes), 1), folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---------------------------------------------------------------- bytes


def _bring(
    rank: int, n_ranks: int, meeting: KeyValueClient, overrides: tuple[str, ...], n_times: int
) -> list[tuple[int, int, float]]:
    """Bring the actor's parameters into the layout of generation and drop them again.

    Returns:
        For each time: the bytes of the role's parameters alive on this rank, those that the plan says, and the same
        number as a share of the model.
    """
    here, call = Rank.start(rank, meeting, *overrides, n_ranks=n_ranks), "actor_gen"
    actor, moved, known = here.hosted(call), here.moved(call), values(0)
    fill(actor.home_engine, known)
    own, is_away = here.bytes_alive(call), here.plan.allocation_of(call) in actor.models
    found = []
    for _ in range(n_times):
        here.run_hooks(call)
        alive = here.bytes_alive(call)
        found.append((alive, moved.peak_bytes(rank), alive / moved.source_layout.model_bytes))
        here.assert_holds(call, known, known if is_away else None)
        if is_away:
            actor.send_home(call)
        assert here.bytes_alive(call) == own
        assert all(p.is_contiguous() for p in here.home(call).values())
        here.assert_holds(call, known)
    here.end()
    return found


LAYOUTS = (
    "allocation=d4 allocation.calls.actor_train=t4 allocation.calls.actor_gen=d2t2",  # nested by tp
    "allocation=d4 allocation.calls.actor_train=t2p2 allocation.calls.actor_gen=d2p2",  # by part of the split
    "allocation=d4 allocation.calls.actor_train=p4 allocation.calls.actor_gen=d2p2",  # by pp
    "allocation=d4 allocation.calls.actor_train=t2p2 allocation.calls.actor_gen=d4",  # by both
    "allocation=d4 allocation.calls.actor_train=d2t2 allocation.calls.actor_gen=t4",  # the home is the larger one
    "allocation=d4 allocation.calls.actor_train=t4 allocation.calls.actor_gen=p4",  # by nothing, in part
    "allocation=d4 allocation.calls.actor_train=t2@0:0-1 allocation.calls.actor_gen=d4",  # of some ranks
)


@pytest.mark.parametrize(
    "layouts", [pytest.param(one, marks=[] if i in (3, 4, 6) else pytest.mark.slow) for i, one in enumerate(LAYOUTS)]
)
def test_no_byte_is_there_twice(layouts: str) -> None:
    for of_rank in run_ranks(4, _bring, tuple(layouts.split()), 2, joined=False, timeout_s=110.0):
        for alive, planned, _ in of_rank:
            assert alive == planned


EXPERTS = {"family": "mixtral", "intermediate_size": 48, "moe": MoEConfig(n_experts=4, top_k=2, intermediate_size=48)}


@pytest.mark.parametrize(
    ("model", "layouts", "settings"),
    [
        ({}, LAYOUTS[0], "models.actor.lora.rank=3 precision=bf16"),  # of two dtypes
        pytest.param({}, LAYOUTS[3], "models.actor.lora.rank=3", marks=pytest.mark.slow),
        ({**EXPERTS, "tied_embeddings": False}, LAYOUTS[3], ""),
        pytest.param(EXPERTS, LAYOUTS[0], "", marks=pytest.mark.slow),
        pytest.param({"tied_embeddings": True}, LAYOUTS[2], "", marks=pytest.mark.slow),  # both ends hold it
        pytest.param({"tied_embeddings": False}, LAYOUTS[2], "", marks=pytest.mark.slow),
    ],
)
def test_adapters_experts_and_tied_embeddings(
    model: dict[str, Any], layouts: str, settings: str, tmp_path: Path
) -> None:
    path = f"models.actor.path={model_folder(tmp_path, **model)}"
    for of_rank in run_ranks(4, _bring, (path, *layouts.split(), *settings.split()), 2, joined=False, timeout_s=110.0):
        for alive, planned, _ in of_rank:
            assert alive == planned


def _check_half(n_ranks: int, *overrides: str) -> None:
    for of_rank in run_ranks(n_ranks, _bring, overrides, 1, joined=False, timeout_s=200.0):
        for alive, planned, share in of_rank:
            assert alive == planned
            assert share == pytest.approx(0.5, abs=0.01)  # norms are on every rank


def test_eight_ranks_trained_as_1_4_2_and_generating_as_1_2_2_2_hold_half_of_the_model() -> None:
    _check_half(8, "allocation=d8", "allocation.calls.actor_train=d2t4", "allocation.calls.actor_gen=d4t2")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sixteen_ranks_trained_as_1_8_2_and_generating_on_tensor_pairs_hold_half_of_the_model(tmp_path: Path) -> None:
    path = model_folder(tmp_path, n_heads=8, n_kv_heads=8, head_dim=16)
    layouts = ("allocation=d16", "allocation.calls.actor_train=d2t8", "allocation.calls.actor_gen=d8t2")
    _check_half(16, f"models.actor.path={path}", *layouts)


@pytest.mark.parametrize("n_times", [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.slow)])
def test_many_times_leave_nothing_behind(n_times: int) -> None:
    overrides = tuple(LAYOUTS[0].split())
    for of_rank in run_ranks(4, _bring, overrides, n_times, joined=False, timeout_s=110.0):
        assert len(set(of_rank)) == 1


# ---------------------------------------------------------------- numbers

SCHEMAS = {
    "prompt_ids": KeySchema("int64", Per.TOKEN),
    "input_ids": KeySchema("int64", Per.TOKEN),
    "prompt_mask": KeySchema("bool", Per.TOKEN),
    "truncated": KeySchema("bool", Per.SEQUENCE),
    "rewards": KeySchema("float32", Per.SEQUENCE),
}
PROMPTS, ANSWERS = (tuple(f"{epoch}/{i}" for i in range(8)) for epoch in (1, 2))


def rows(keys: tuple[str, ...], ids: tuple[str, ...], n_sequences: int) -> SequenceSample:
    """Make sequences of 9 tokens, 4 of them of the prompt; what is not in `SCHEMAS` is a log-probability."""
    generator = torch.Generator().manual_seed(0)
    make: dict[str, Callable[[], torch.Tensor]] = {
        "prompt_ids": lambda: torch.randint(97, 122, (4,), generator=generator),
        "input_ids": lambda: torch.randint(97, 122, (9,), generator=generator),
        "prompt_mask": lambda: torch.arange(9) < 4,
        "truncated": lambda: torch.tensor(False),
        "rewards": lambda: torch.rand((), generator=generator),
    }
    found = {}
    for key in keys:
        one = make.get(key, lambda: -torch.rand(8, generator=generator))
        schema = SCHEMAS.get(key, KeySchema("float32", Per.TRANSITION))
        found[key] = (schema, [[one() for _ in range(n_sequences)] for _ in ids])
    return SequenceSample.from_lists(ids, found)


def _train(
    rank: int, n_ranks: int, meeting: KeyValueClient, overrides: tuple[str, ...]
) -> tuple[list[bool], list[str], list[str]]:
    """Train three times with a generation before each: with shared memory, and from the same state with copies.

    Returns:
        Whether memory was shared, for both ways; the parameters that training did not change; and all that the two ways
        differ in of responses, parameters, moments and masters.
    """
    here = Rank.start(rank, meeting, *overrides, n_ranks=n_ranks, experiment="grpo")
    actor, home = here.hosted("actor_gen"), here.home("actor_gen")
    assert actor.home_engine is not None
    here.worker.store.put(rows(("prompt_ids",), PROMPTS, 1))
    (train,) = (mfc for mfc in here.plan.mfcs if mfc.is_train)
    here.worker.store.put(rows(train.input_keys, ANSWERS, 2))
    actor.set_schedule_end(3)
    first, state = {name: p.detach().clone() for name, p in home.items()}, deepcopy(actor.home_engine.state_dict())

    def receive_copies(call: str, parameters: Mapping[str, torch.Tensor], shared: list[torch.Tensor]) -> None:
        HostedRole.receive(actor, call, parameters, shared)
        copies = {name: tensor.clone() for name, tensor in parameters.items()}
        actor.send_home(call)
        HostedRole.receive(actor, call, copies, [])

    is_shared: list[bool] = []
    outcomes: list[Tensors] = []
    for receive in (actor.receive, receive_copies):
        actor.receive = receive  # type: ignore[method-assign]
        for name, p in home.items():
            p.data.copy_(first[name])
        actor.home_engine.load_state_dict(state)
        found: Tensors = {}
        shares = False
        for step in range(3):
            here.run_hooks("actor_gen")
            shares |= any(p.untyped_storage().nbytes() > p.nbytes for p in home.values())
            share = here.run_call("actor_gen", PROMPTS, stays=step == 1)
            found[f"input_ids {step}"] = here.worker.store.get(share, ("input_ids",))["input_ids"]
            here.run_call("actor_train", ANSWERS)
        for name, kept in deepcopy(actor.home_engine.state_dict())["parameters"].items():
            found |= {f"{name} {key}": torch.as_tensor(value) for key, value in kept.items()}
        found |= {name: p.detach().clone() for name, p in home.items()}
        is_shared.append(shares)
        outcomes.append(found)
    here.end()
    ours, theirs = outcomes
    assert ours.keys() == theirs.keys()
    unchanged = [name for name in first if torch.equal(ours[name], first[name])]
    return is_shared, unchanged, [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


@pytest.mark.parametrize(
    "settings",
    [
        f"precision=fp32 {LAYOUTS[0]}",
        "precision=bf16 allocation=d4 allocation.calls.actor_train=d2t2 models.actor.optimizer.zero_stage=1",
        pytest.param(f"precision=fp32 {LAYOUTS[3]} models.actor.lora.rank=3", marks=pytest.mark.slow),
        pytest.param(f"precision=bf16 {LAYOUTS[5]}", marks=pytest.mark.slow),
    ],
)
def test_training_after_generation_has_the_bits_of_a_run_with_copies(settings: str) -> None:
    """In bf16 with float32 masters; each of two data-parallel ranks has half of them, with ZeRO-1."""
    sizes = ("generation.n_responses=2", "generation.max_new_tokens=6", "models.actor.optimizer.lr=0.01")
    overrides = (*settings.split(), *sizes, "algorithm.kl_loss_coef=0")
    for is_shared, unchanged, differing in run_ranks(4, _train, overrides, joined=False, timeout_s=110.0):
        assert is_shared == [True, False]
        assert all("lora" in settings and "lora" not in name for name in unchanged)
        assert not differing


# ---------------------------------------------------------------- checkpoints


def _save(rank: int, n_ranks: int, meeting: KeyValueClient, overrides: tuple[str, ...], folder: Path) -> None:
    """Save before, while and after the parameters of one or two calls are there."""
    here = Rank.start(rank, meeting, *overrides, n_ranks=n_ranks, experiment="grpo")
    actor, known = here.hosted("actor_gen"), values(0)
    fill(actor.home_engine, known)
    here.worker.store.put(rows(("prompt_ids",), PROMPTS, 1))
    own = here.bytes_alive("actor_gen")
    here.save(folder / "before")
    here.run_hooks("actor_gen")
    here.run_call("actor_gen", PROMPTS, stays=True)
    here.save(folder / "while one is there")
    here.run_hooks("actor_inf")
    here.save(folder / "while both are there")
    for call in ("actor_gen", "actor_inf"):
        here.assert_holds(call, known, known)
    actor.send_home("actor_gen")
    here.save(folder / "while the other is there")
    assert here.bytes_alive("actor_inf") == here.moved("actor_inf").peak_bytes(rank)
    here.assert_holds("actor_inf", known, known)
    actor.send_home("actor_inf")
    assert here.bytes_alive("actor_gen") == own
    here.end()


@pytest.mark.parametrize(
    "layouts",
    [
        "allocation=d4 allocation.calls.actor_train=t4 allocation.calls.actor_gen=d2t2",
        pytest.param(
            "allocation=t2p2 allocation.calls.actor_train=d2t2 allocation.calls.actor_gen=d4 "
            "models.actor.optimizer.zero_stage=1 models.actor.lora.rank=3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_holds_the_values_of_the_home_while_calls_have_them_too(layouts: str, tmp_path: Path) -> None:
    """With `max_staleness`, generation stays a while, and `actor_inf` comes in a third layout beside it."""
    run_ranks(
        4,
        _save,
        (*layouts.split(), "max_staleness=1", "generation.n_responses=2"),
        tmp_path,
        joined=False,
        timeout_s=110.0,
    )
    saved = {
        folder.name: {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in tmp_path.iterdir()
    }
    before = saved.pop("before")
    assert len(saved) == 3
    for files in saved.values():
        assert files == before
    if "lora" in layouts:  # whose adapters are merged
        return
    decoder = load_model(str(tmp_path / "before" / "actor"), head="lm", device=torch.device("cpu"))
    for name, p in decoder.named_shards():
        assert torch.equal(p, values(0)(decoder, name)), name


# ---------------------------------------------------------------- averages

AGAIN = '''
"""Averages into a reference that two calls read, in layouts of their own."""

from dataclasses import replace

from realrl_experiments.ppo_ref_ema import EXPERIMENT as PARENT


def mfcs(config):
    calls = PARENT.mfcs(config)
    again = {"name": "ref_again", "output_keys": ("again",), "output_key_remap": {"logprobs": "again"}}
    return [*calls, *(replace(call, **again) for call in calls if call.name == "ref_inf")]


EXPERIMENT = PARENT.variant("again", "a reference that two calls read", mfcs=mfcs)
'''


def _average(rank: int, n_ranks: int, meeting: KeyValueClient, overrides: tuple[str, ...], experiment: str) -> None:
    here, call = Rank.start(rank, meeting, *overrides, n_ranks=n_ranks, experiment=experiment), "ref_again"
    old, new = values(0), values(1)
    is_half = here.plan.config.precision == "bf16"

    def mixed(decoder: Decoder, name: str) -> torch.Tensor:
        goal = new(decoder, name)
        return torch.lerp(old(decoder, name), goal.bfloat16().float() if is_half else goal, 0.25)

    ref, actor = here.hosted(call), here.hosted("actor_train")
    fill(ref.home_engine, old)
    fill(actor.home_engine, new)
    own, moved = here.bytes_alive(call), here.moved(call)
    for expected, is_written in ((old, True), (mixed, False)):
        here.run_hooks("actor_gen")  # the source of the average is a view too
        here.run_hooks(call)
        assert here.bytes_alive(call) == moved.peak_bytes(rank)
        here.assert_holds(call, expected, expected)
        if is_written:
            here.run_hooks("actor_train", "after")
            here.assert_holds("actor_gen", new, new)
        else:
            ref.send_home(call)
        actor.send_home("actor_gen")
        assert here.bytes_alive(call) == own
        here.assert_holds(call, mixed)
    here.end()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_what_calls_read_of_a_role_is_gone_when_it_is_averaged_into(precision: str, tmp_path: Path) -> None:
    """In bf16 its masters move, and the parameters follow."""
    file = tmp_path / "again.py"
    file.write_text(AGAIN)
    layouts = ("ref_inf=t4", "ref_again=d2t2", "actor_train=t2p2", "actor_gen=d2p2")
    overrides = ("allocation=d4", *(f"allocation.calls.{layout}" for layout in layouts))
    settings = (*overrides, f"precision={precision}", "algorithm.ref_ema_eta=0.25")
    run_ranks(4, _average, settings, str(file), joined=False, timeout_s=110.0)
