"""Calls as a worker makes them, on made-up samples: one that computes nothing, and the run's reward functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

import torch

from realrl.algo.api import CallContext, Model, ModelInterface
from realrl.algo.resolve import resolve_interface
from realrl.data.datasets import Dataset, load_dataset
from realrl.data.rows import SampleStore
from realrl.data.sample import SequenceSample
from realrl.data.tokenizer import load_tokenizer
from realrl.engine.groups import Communicator
from realrl.engine.weightless import WeightlessEngine
from realrl.experiment.run_plan import RunPlan
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName
from realrl.profiler.caches import sweep_caches
from realrl.profiler.sizes import judging_call
from realrl.runtime.worker.call_runner import CallRunner
from realrl.runtime.worker.roles import HostedRole, role_tokenizer
from realrl.sched.messages import KeySchema, Per, RunCall
from realrl.sim.probes import Probe

_TOKENS, _FLAGS, _NUMBERS = KeySchema("int64", Per.TOKEN), KeySchema("bool", Per.TOKEN), KeySchema("float32", Per.TOKEN)
_SEED = 1
_IDLE = "nothing to compute"  # no call of an experiment has such a name


class CallBench:
    """A worker's runner of calls, with roles that have no parameters.

    Args:
        world: the group of all workers.
    """

    def __init__(self, plan: RunPlan, world: Communicator, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._numbers = count()
        self._store = SampleStore()
        self._put: tuple[str, ...] = ()  # ids of samples
        first, judging = plan.mfcs[0], judging_call(plan)
        keys = ("input_ids", "prompt_mask")
        idle = MFCDef(_IDLE, first.role, InterfaceType.INFERENCE, _IDLE, keys, ("numbers",))
        self._mfcs = {"calls": idle} if judging is None else {"calls": idle, "rewards": judging}
        allocation = plan.allocations[first.name]
        roles: dict[str, HostedRole] = {}
        for mfc in self._mfcs.values():
            tokenizer = load_tokenizer(plan.config.models[mfc.role].path)
            model = Model(ModelName(mfc.role), WeightlessEngine(mfc.role, device), tokenizer)
            interface = _Idle() if mfc is idle else resolve_interface(mfc.interface)
            interfaces = {**(roles[mfc.role].interfaces if mfc.role in roles else {}), mfc.name: interface}
            roles[mfc.role] = HostedRole(plan.roles[mfc.role], {allocation: model}, None, interfaces, (mfc,))
        mfcs = tuple(self._mfcs.values())
        allocations = {mfc.name: allocation for mfc in mfcs}
        own = replace(plan, mfcs=mfcs, allocations=allocations, evaluation=None, fusion=None)
        self._runner = CallRunner(own, roles, self._store, world=world, client=None, peers=(), device=device)

    def call(self, probe: Probe) -> Callable[[], float]:
        """Return a function that makes the call of a probe, and gives its seconds; the samples are there already.

        What the last call left in the processor's caches is not, as after a model's passes.
        """
        mfc = self._mfcs[probe.kind]
        batch = self._samples(probe, mfc)
        self._store.free(self._put)
        self._store.put(batch)
        self._put = batch.ids

        def run() -> float:
            sweep_caches()
            number = next(self._numbers)
            request = RunCall(number, number, mfc.name, 1, (batch.ids,), (), n_steps=1, keeps=batch.ids)
            start_s = time.perf_counter()
            self._runner.run(request)
            return time.perf_counter() - start_s

        return run

    def _samples(self, probe: Probe, mfc: MFCDef) -> SequenceSample:
        """Return the samples of a call, with random responses; what is judged has prompts of the dataset."""
        generator, n_words = torch.Generator().manual_seed(_SEED), len(self._tokenizer)

        def words(n: int) -> torch.Tensor:
            return torch.randint(n_words, (n,), generator=generator)

        ids = tuple(map(str, range(probe.n_sequences // probe.n_alike)))
        if probe.kind == "calls":
            given, prompts = None, [words(probe.prompt_tokens) for _ in ids]
        else:
            given = self._dataset.samples(ids, [i % len(self._dataset) for i in range(len(ids))])
            prompts = given.samples("prompt_ids")
        responses = [[words(probe.response_tokens) for _ in range(probe.n_alike)] for _ in ids]
        tokens = [[torch.cat([p, r]) for r in own] for p, own in zip(prompts, responses, strict=True)]
        masks = [[torch.arange(len(t)) < len(p) for t in own] for p, own in zip(prompts, tokens, strict=True)]
        batch = SequenceSample.from_lists(ids, {"input_ids": (_TOKENS, tokens), "prompt_mask": (_FLAGS, masks)})
        if given is not None:
            batch = batch.update(given.select(ids, ["metadata"]))
        names = {seen: key for key, seen in mfc.input_key_remap.items()}
        keys = [key for key in batch.keys if names.get(key, key) in mfc.input_keys]
        return batch.select(ids, keys).remap({key: names[key] for key in keys if key in names}).to(self._device)

    @cached_property
    def _tokenizer(self) -> Any:
        return role_tokenizer(self._plan)

    @cached_property
    def _dataset(self) -> Dataset:
        return load_dataset(self._plan.config.dataset, self._plan.experiment.dataset, self._tokenizer)


class _Idle(ModelInterface):
    """inference: `input_ids` -> `numbers`, a zero for each token."""

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        zeros = torch.zeros(batch.n_rows("input_ids"), device=batch["input_ids"].device)
        return batch.derive("input_ids", {"numbers": (_NUMBERS, zeros)})
