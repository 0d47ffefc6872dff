"""The worker of a profile: makes a model, and times probes between barriers of all workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property, lru_cache

import msgspec
import torch

from realrl.algo.api import ForwardOutput, LossOutput, MicroBatching
from realrl.algo.packed import response_mask
from realrl.config.schema import GenerationConfig, OptimizerConfig
from realrl.cpu import linear
from realrl.data.rows import SampleStore, decode_rows, encode_rows
from realrl.data.sample import SequenceSample
from realrl.doctor.memory import device_capacity, kernels_of
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import ALONE, Communicator, Groups, GroupSettings
from realrl.engine.parameters.realloc import Reallocator
from realrl.experiment.discovery import load_run
from realrl.experiment.models import DTYPES
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.model.dtypes import torch_dtype
from realrl.model.init import random_model
from realrl.model.lora import add_adapters
from realrl.plan.groups import process_groups
from realrl.plan.memory.formulas.local import Kernels
from realrl.profiler.caches import sweep_caches
from realrl.profiler.calls import CallBench
from realrl.profiler.machine import REPETITION, SECONDS, Machine
from realrl.profiler.sizes import Subject, subjects_of
from realrl.runtime.transport.base import SampleClient
from realrl.sched.key_value import KeyValueClient
from realrl.sched.messages import (
    CallDone,
    Goodbye,
    Initialize,
    KeySchema,
    Per,
    Ready,
    Reply,
    Request,
    RunCall,
    Shutdown,
)
from realrl.sim.costs.moves import realloc_of
from realrl.sim.probes import Probe, cut_to, moved_between, varied

_MOST_ROWS = 64
_MOST_IN_A_ROW = 8  # collectives of a repetition
_N_PRODUCTS, _WIDTH = 2, 256  # of matrices, and their size, that a rank computes between two
_TOKENS, _FLAGS = KeySchema("int64", Per.TOKEN), KeySchema("bool", Per.TOKEN)


class ProfileWorker:
    """Answers `RunCall`, whose only minibatch holds a `Probe` as JSON, with the seconds that it took.

    Args:
        rank: global rank.
        client: client that pulls rows from other workers.
        meeting: key-value store through which the workers' groups are made.
    """

    def __init__(self, rank: int, client: SampleClient, *, meeting: KeyValueClient | None = None) -> None:
        self.rank = rank
        self._client, self._meeting = client, meeting
        self._world: Communicator = ALONE
        self._groups: Groups | None = None
        self._peers: tuple[str, ...] = ()
        self._subjects: dict[str, Subject] = {}
        self._device = torch.device("cpu")
        self._plan: RunPlan | None = None
        self._made: tuple[tuple[str, int], DecoderEngine] | None = None
        self._warmed: tuple[str, tuple[str, int] | None] | None = None  # kind, and engine of the last probe
        self._n_new: dict[Probe, int] = {}  # repetitions so far

    def fetch(self, keys: Sequence[str], ids: Sequence[str]) -> bytes:
        """Encode rows of as many tokens as the key says."""
        devices.use_one_thread()
        return encode_rows(_rows(len(ids), int(keys[0])).get(ids, keys))

    def handle(self, request: Request) -> list[Reply]:
        """Execute one request."""
        match request:
            case Initialize():
                return [self._initialize(request)]
            case RunCall():
                return [self._measure(request)]
            case Shutdown():
                if self._groups is not None:
                    self._groups.destroy()
                return [Goodbye(self.rank, request.seq)]
            case _:
                raise TypeError(f"a profile has no {type(request).__name__}")

    def _initialize(self, request: Initialize) -> Ready:
        experiment, config = load_run(request.run)
        plan = self._plan = plan_run(config, experiment)
        self._peers = request.peers
        device = self._device = devices.resolve_device(config.cluster.device)
        torch.manual_seed(config.seed)
        planned = process_groups((), plan.cluster)
        self._groups = Groups.create(
            planned,
            rank=self.rank,
            world_size=plan.n_workers,
            meeting=self._meeting,
            device=device,
            timeout_s=config.cluster.worker_timeout_s,
            settings=GroupSettings(
                collective_timeout_s=config.cluster.collective_timeout_s, through_host=config.cluster.shares_devices
            ),
        )
        self._world = self._groups[planned[0]]
        memory = device_capacity(config, device)
        self._subjects = subjects_of(plan, memory_bytes=memory)
        name, subject = next(iter(self._subjects.items()))
        self._engine(name, subject.config.n_layers)
        dtype = torch_dtype(DTYPES[config.precision])
        kernels: Kernels = kernels_of(device, dtype, n_rows=_MOST_ROWS)
        machine = Machine(devices.device_name(device), device.type, memory, asdict(kernels))
        return Ready(self.rank, request.seq, (), 0, (msgspec.json.encode(machine).decode(),))

    def _measure(self, request: RunCall) -> CallDone:
        metrics = {}
        for text in (text for minibatch in request.minibatches for text in minibatch):
            probe = msgspec.json.decode(text, type=Probe)
            work = self._work(probe)
            if self._warmed != (probe.kind, self._made_for):  # memory that only the first call takes, and code
                work(0)()
                self._warmed = probe.kind, self._made_for
            world = ALONE if probe.is_alone else self._world
            n, begin_s = max(1, request.n_steps), time.perf_counter()
            metrics[SECONDS] = statistics.median(self._time(work(self._next_number(probe)), world) for _ in range(n))
            metrics[REPETITION] = (time.perf_counter() - begin_s) / n
        return CallDone(self.rank, request.seq, request.dispatch_id, request.call, request.step, None, metrics, ())

    def _next_number(self, probe: Probe) -> int:
        """Return the number of a repetition's size: 0, or where sizes are to be new, one more each time."""
        if not probe.is_new:
            return 0
        self._n_new[probe] = self._n_new.get(probe, 0) + 1
        return self._n_new[probe]

    def _time(self, work: Callable[[], object], world: Communicator) -> float:
        devices.synchronize(self._device)
        world.barrier()
        start_s = time.perf_counter()
        own_s = work()
        devices.synchronize(self._device)
        return own_s if isinstance(own_s, float) else time.perf_counter() - start_s

    # ------------------------------------------------------------ work

    @cached_property
    def _calls(self) -> CallBench:
        assert self._plan is not None
        return CallBench(self._plan, self._world, self._device)

    @property
    def _made_for(self) -> tuple[str, int] | None:
        """Model and number of blocks of the engine that is there."""
        return None if self._made is None else self._made[0]

    def _work(self, probe: Probe) -> Callable[[int], Callable[[], object]]:
        """Return a function of the repetition's number, which gives what is timed: the probe's work, done once."""
        match probe.kind:
            case "collectives":
                return _always(self._in_a_row(self._collective(probe)))
            case "copies":
                source = torch.zeros(probe.n_bytes, dtype=torch.uint8, device=self._device)
                target = devices.to_host(source)
                return _always(lambda: target.copy_(source))
            case "rows":
                peer = self._peers[(self.rank + 1) % len(self._peers)]
                return _always(self._pull(peer, probe))
            case "reallocs":
                return _always(self._realloc(probe))
            case "calls" | "rewards":
                return _always(self._calls.call(probe))
        engine = self._engine(probe.model, probe.n_layers)
        if probe.kind == "products":
            return _always(self._products(engine, probe.tokens))
        if probe.kind == "generate":
            return _always(self._generation(engine, probe))
        return lambda number: self._pass(engine, probe, self._sequences(engine, probe, number))

    def _pull(self, peer: str, probe: Probe) -> Callable[[], float]:
        """Return a function that fetches rows of another worker as a call does, and gives its seconds."""
        n = probe.n_sequences
        key, ids, store = str(probe.n_bytes // n // torch.int64.itemsize), tuple(map(str, range(n))), SampleStore()

        def pull() -> float:
            sweep_caches()
            start_s = time.perf_counter()
            store.put(decode_rows(self._client.pull(peer, (key,), ids)).to(self._device))
            return time.perf_counter() - start_s

        return pull

    def _realloc(self, probe: Probe) -> Callable[[], float]:
        """Return a function that brings a model from the first worker to all, and gives its seconds."""
        model = cut_to(self._subjects[probe.model].config, probe.n_layers)
        plan = realloc_of(model, *moved_between(self._world.n_ranks))
        reallocator = Reallocator(plan, self._world, self.rank, self._device)
        held = None
        if self.rank in plan.source_layout:
            held = {
                spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)
                for spec in plan.source_layout.specs
            }

        def move() -> float:
            sweep_caches()
            self._world.barrier()
            start_s = time.perf_counter()
            reallocator.run(held)
            devices.synchronize(self._device)
            return time.perf_counter() - start_s

        return move

    def _pass(self, engine: DecoderEngine, probe: Probe, batch: SequenceSample) -> Callable[[], object]:
        is_scalar = engine.decoder.config.is_scalar
        if probe.kind == "inference":
            result = _score if is_scalar else _logprobs
            return lambda: engine.forward(batch, result, micro_batching=MicroBatching())
        loss, n_tokens = _score_loss if is_scalar else _logprobs_loss, float(probe.n_sequences * probe.response_tokens)
        return lambda: engine.train_batch(batch, loss, normaliser=n_tokens, micro_batching=MicroBatching())

    def _in_a_row(self, collective: Callable[[], object]) -> Callable[[], float]:
        """Return a function that meets again and again, as models do, computing in between; it gives its seconds.

        Equal work is not done in equal time, so that a rank waits for the others, here as in a model.
        """
        matrix = torch.randn(_WIDTH, _WIDTH, device=self._device)

        def work() -> float:
            used_s = 0.0
            for _ in range(_MOST_IN_A_ROW):
                for _ in range(_N_PRODUCTS):
                    matrix.mm(matrix)
                devices.synchronize(self._device)
                start_s = time.perf_counter()
                collective()
                devices.synchronize(self._device)
                used_s += time.perf_counter() - start_s
            return used_s / _MOST_IN_A_ROW

        return work

    def _collective(self, probe: Probe) -> Callable[[], object]:
        n, world = self._world.n_ranks, self._world
        each = probe.n_bytes // n if probe.way == "all_gather" else probe.n_bytes
        sent = torch.zeros(max(1, each // 4), device=self._device)
        if probe.way == "all_reduce":
            return lambda: world.all_reduce_(sent)
        if probe.way == "all_gather":
            return lambda: world.all_gather(sent)
        received, following, preceding = torch.empty_like(sent), (self.rank + 1) % n, (self.rank - 1) % n
        return lambda: world.exchange([(following, sent)], [(preceding, received)]).wait()

    def _products(self, engine: DecoderEngine, n_tokens: int) -> Callable[[], object]:
        decoder = engine.decoder
        matrices = [
            parameter.detach()
            for name, parameter in decoder.named_shards()
            if isinstance(decoder.specs[name].layer, int) and parameter.ndim == 2
        ]
        widths = {matrix.shape[1] for matrix in matrices}
        inputs = {n: torch.randn(n_tokens, n, dtype=decoder.dtype, device=self._device) for n in widths}

        def multiply() -> None:
            for matrix in matrices:
                linear(inputs[matrix.shape[1]], matrix)

        return multiply

    def _generation(self, engine: DecoderEngine, probe: Probe) -> Callable[[], object]:
        n, made = probe.n_sequences, probe.response_tokens
        generation = GenerationConfig(max_new_tokens=made, min_new_tokens=made, max_batch_size=n)
        prompts = [[self._tokens(engine, probe.prompt_tokens)] for _ in range(n)]
        batch = SequenceSample.from_lists(tuple(map(str, range(n))), {"prompt_ids": (_TOKENS, prompts)})
        return lambda: engine.generate(batch, generation, seed=1, step=1, eos_id=0)

    def _sequences(self, engine: DecoderEngine, probe: Probe, number: int) -> SequenceSample:
        """Return the sequences of a probe; those of another `number` have some tokens more or fewer in all.

        Prompts are up to a quarter longer or shorter than the probe says, since those of a run differ in length, and
        so are responses that share one.
        """
        change = (number + 1) // 2 * (1 if number % 2 else -1)
        most, tokens, masks = engine.decoder.config.max_positions, [], []
        for i in range(probe.n_sequences // probe.n_alike):
            n_prompt = max(1, min(varied(probe.prompt_tokens, i), most - probe.response_tokens))
            prompt = self._tokens(engine, n_prompt)
            tokens.append([])
            masks.append([])
            for j, n_made in enumerate(probe.responses):
                n_made = max(1, min(n_made + (0 if i or j else change), most - n_prompt))
                tokens[-1].append(torch.cat([prompt, self._tokens(engine, n_made)]))
                masks[-1].append(torch.tensor([True] * n_prompt + [False] * n_made))
        ids = tuple(map(str, range(len(tokens))))
        return SequenceSample.from_lists(ids, {"input_ids": (_TOKENS, tokens), "prompt_mask": (_FLAGS, masks)})

    def _tokens(self, engine: DecoderEngine, n: int) -> torch.Tensor:
        return torch.randint(1, engine.decoder.config.vocab_size, (n,))

    def _engine(self, name: str, n_layers: int) -> DecoderEngine:
        """Return a role's engine, cut to some blocks, with random parameters; only the last one is kept."""
        if self._made is not None and self._made[0] == (name, n_layers):
            return self._made[1]
        self._made = None
        devices.release_cached_memory(self._device)
        assert self._plan is not None
        run, subject = self._plan.config, self._subjects[name]
        config = cut_to(subject.config, n_layers)
        compute = DTYPES[run.precision]
        whole = replace(config, lora=None, dtype="float32" if subject.trains and config.lora is None else compute)
        decoder = random_model(whole, run.seed, device=self._device)
        if config.lora is not None:
            add_adapters(decoder, config.lora, seed=run.seed)
        decoder.activation_checkpointing = False
        engine = DecoderEngine(
            decoder,
            role=name,
            optimizer=OptimizerConfig() if subject.trains else None,
            compute_dtype=torch_dtype(compute),
        )
        self._made = (name, n_layers), engine
        return engine


@lru_cache(maxsize=1)
def _rows(n: int, n_tokens: int) -> SampleStore:
    """Return a store of samples whose key is their number of tokens."""
    key, store = str(n_tokens), SampleStore()
    tokens = [[torch.zeros(n_tokens, dtype=torch.int64)] for _ in range(n)]
    store.put(SequenceSample.from_lists(tuple(map(str, range(n))), {key: (_TOKENS, tokens)}))
    return store


def _always(work: Callable[[], object]) -> Callable[[int], Callable[[], object]]:
    return lambda _: work


def _score(out: ForwardOutput, part: SequenceSample) -> torch.Tensor:
    return out.scores()


def _logprobs(out: ForwardOutput, part: SequenceSample) -> torch.Tensor:
    return out.logprobs(1.0, mask=response_mask(part))


def _score_loss(out: ForwardOutput, part: SequenceSample) -> LossOutput:
    return LossOutput(out.scores().square().sum())


def _logprobs_loss(out: ForwardOutput, part: SequenceSample) -> LossOutput:
    return LossOutput(-_logprobs(out, part).sum())
