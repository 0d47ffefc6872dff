"""The probes of a profile: sizes around those of an experiment, from small to large.

Invariants of `probes_of`:
    - every class has at least six probes, unless one worker has nobody to send to;
    - no sequence is longer than the model's positions, and no probe has more tokens than `most_tokens` allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from realrl.data.kinds import DatasetKind
from realrl.errors import ConfigError
from realrl.experiment.models import role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.memory.plan import show_bytes
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.samples.prefixes import is_worth_sharing
from realrl.shape import DecoderConfig
from realrl.sim.probes import Kind, Probe, Way, cut_to

_TRAINED_BYTES, _FROZEN_BYTES = 24, 8  # of a parameter: with masters, gradients, moments and a copy; without
_TOKEN_BYTES = 80  # of a hidden channel in a block: what a backward pass keeps
_SHARE = 0.4  # of a device's memory, for parameters and for activations
_COPIES = tuple(n << 24 for n in (1, 2, 3, 4, 6, 8))  # larger than most caches, as parameters are
_MOST_NEW, _FEW = 8, (2, 4)  # sequences of probes with new sizes, and of those by one worker
_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_SAMPLES = (1, 4, 16, 32, 64, 128)
_LEAST_PROBES = 6  # of a class
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16384)


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        config: its shape, cut to as many blocks as fit.
        trains, generates: True if it is measured in training, in generation.
        prompt_tokens, response_tokens: lengths of the experiment's sequences.
        shares_prompts: True if the engine computes a prompt once for several responses.
        max_rows: most responses that are decoded together.
        most_tokens: most tokens of a probe, by the memory.
    """

    config: DecoderConfig
    trains: bool
    generates: bool
    prompt_tokens: int
    response_tokens: int
    shares_prompts: bool
    max_rows: int
    most_tokens: int


def subjects_of(plan: RunPlan, *, memory_bytes: int) -> dict[str, Subject]:
    """Return the models to measure by role: one for each shape, trained if some role of that shape is.

    Args:
        memory_bytes: of each worker's device.

    Raises:
        ConfigError: no role has a model, or two blocks of one do not fit the memory.
    """
    generating = {mfc.role for mfc in plan.mfcs if mfc.interface_type is InterfaceType.GENERATE}
    found: dict[DecoderConfig, str] = {}
    configs = role_configs(plan)
    for name in sorted(configs, key=lambda name: (name not in generating, not plan.roles[name].trainable)):
        shape = replace(configs[name], head="lm", lora=None, tied_embeddings=True)
        found.setdefault(shape, name)
    if not found:
        raise ConfigError(
            f"no role of experiment '{plan.experiment.name}' has a model to measure",
            remedy="Profile another experiment.",
        )
    return {
        name: _subject(plan, name, configs[name], generates=name in generating, memory_bytes=memory_bytes)
        for name in found.values()
    }


def _subject(plan: RunPlan, name: str, config: DecoderConfig, *, generates: bool, memory_bytes: int) -> Subject:
    trains = plan.roles[name].trainable
    each, room = _TRAINED_BYTES if trains else _FROZEN_BYTES, _SHARE * memory_bytes
    n_layers = config.n_layers
    while n_layers > 2 and each * _n_parameters(cut_to(config, n_layers)) > room:
        n_layers = max(2, n_layers * 2 // 3)
    cut = cut_to(config, min(n_layers, config.n_layers))
    if each * _n_parameters(cut) > room:
        raise ConfigError(
            f"{cut.n_layers} blocks of role '{name}' take {show_bytes(each * _n_parameters(cut))}, and a profile uses "
            f"{show_bytes(int(room))} of each device",
            remedy="Profile a smaller model of the same family: times follow its products and bytes.",
        )
    is_generating = any(mfc.interface_type is InterfaceType.GENERATE for mfc in plan.mfcs)
    dataset, generation = plan.config.dataset, plan.config.generation
    response = generation.max_new_tokens if is_generating else dataset.max_answer_tokens
    prompt = max(1, min(dataset.max_prompt_tokens, cut.max_positions // 2))
    return Subject(
        config=cut,
        trains=trains,
        generates=generates,
        prompt_tokens=prompt,
        response_tokens=max(2, min(response, cut.max_positions - prompt)),
        shares_prompts=cut.moe is None and (plan.config.cluster.device != "cuda" or cut.dtype == "float32"),
        max_rows=generation.max_batch_size,
        most_tokens=max(64, int(room / (_TOKEN_BYTES * cut.hidden_size * cut.n_layers))),
    )


def _n_parameters(config: DecoderConfig) -> int:
    return sum(spec.n_elements for spec in parameter_specs(config))


def judging_call(plan: RunPlan) -> MFCDef | None:
    """Return a call of reward functions that reads nothing but responses and their prompts; None if there is none."""
    known = {"input_ids", "prompt_mask", "metadata"}
    for mfc in plan.mfcs:
        keys = {mfc.input_key_remap.get(key, key) for key in mfc.input_keys}
        is_judging = plan.home_of(mfc.role) is None and mfc.interface_type is InterfaceType.INFERENCE
        if is_judging and "input_ids" in keys <= known and plan.experiment.dataset is DatasetKind.PROMPT:
            return mfc
    return None


def probes_of(subjects: Mapping[str, Subject], *, n_workers: int, n_judged: int = 0) -> list[Probe]:
    """Return all probes, class by class; those of a model from few blocks to many, then from little work to much.

    Args:
        n_judged: responses to a prompt that reward functions judge; 0 if there are none.
    """
    probes: list[Probe] = []
    if n_workers > 1:
        ways: tuple[Way, ...] = ("all_reduce", "all_gather", "send")
        probes += [Probe("collectives", way=way, n_bytes=n) for n in _BYTES for way in ways]
        probes += [Probe("reallocs", name, n) for name, subject in subjects.items() for n in _moved(subject)]
    probes += [Probe("copies", n_bytes=n) for n in _COPIES]
    rows = [*((1, n) for n in _BYTES), *((n, n * _BYTES[0]) for n in _SAMPLES[1:])]
    probes += _ascending(Probe("rows", n_sequences=n, n_bytes=n_bytes) for n, n_bytes in rows)
    prompt, response = next((s.prompt_tokens, s.response_tokens) for s in subjects.values())
    probes += [Probe("calls", "", 0, n, prompt, response) for n in _SAMPLES]
    if n_judged:
        probes += [Probe("rewards", "", 0, n * n_judged, prompt, response, n_judged) for n in _SAMPLES]
    for name, subject in subjects.items():
        if subject.config.moe is None:
            probes += [
                Probe("products", name, subject.config.n_layers, 1, n) for n in _TOKENS if n <= subject.most_tokens
            ]
    for name, subject in subjects.items():
        if subject.generates:
            probes += _ascending(_generate(name, subject))
    for kind in ("inference", "train_step"):
        for name, subject in subjects.items():
            if kind == "inference" or subject.trains:
                some = [*_passes(kind, name, subject)]
                deep = [probe for probe in some if probe.n_layers == subject.config.n_layers]
                small = [p for p in deep if p.n_sequences <= _MOST_NEW and p.prompt_tokens <= subject.prompt_tokens]
                some += [replace(p, is_new=True) for p in small[::2]]
                usual = [p for p in small if p.n_sequences in _FEW and p.prompt_tokens == subject.prompt_tokens]
                some += [replace(p, is_alone=True) for p in usual if n_workers > 1]
                probes += _ascending([*some, *_forks(kind, name, subject)])
    return probes


def _ascending(probes: Iterable[Probe]) -> list[Probe]:
    return sorted(dict.fromkeys(probes), key=lambda probe: (probe.n_layers, work_of(probe)))


def work_of(probe: Probe) -> float:
    """Return a number that grows about as the seconds of a probe do within its class."""
    if probe.kind == "generate":
        return probe.n_layers * probe.response_tokens * (16.0 + probe.n_sequences) + probe.tokens
    return float(probe.n_bytes or max(1, probe.tokens) * max(1, probe.n_layers))


def _moved(subject: Subject) -> list[int]:
    """Return numbers of blocks that are moved between layouts; nothing is computed with them."""
    most = max(_LEAST_PROBES, subject.config.n_layers)
    return [math.ceil(most * i / _LEAST_PROBES) for i in range(1, _LEAST_PROBES + 1)]


def _depths(subject: Subject) -> tuple[int, int]:
    return subject.config.n_layers, max(1, subject.config.n_layers // 3)


def _passes(kind: str, name: str, subject: Subject) -> Iterator[Probe]:
    """Yield numbers of sequences, and fewer or more tokens in each, for the whole model and for a third of its blocks.

    Equally many tokens in sequences of several lengths tell products and attention apart, depths tell blocks and the
    rest apart.
    """
    deep, shallow = _depths(subject)
    prompt, response = subject.prompt_tokens, subject.response_tokens
    sizes = [(n, prompt, response) for n in (1, 2, 4, 8, 16, 32, 64, 256)]
    sizes += [(n, max(1, prompt // 4), max(2, response // 4)) for n in (1, 4, 16, 64)]
    sizes += [
        (n, 4 * prompt, 4 * response) for n in (1, 2, 4) if 4 * (prompt + response) <= subject.config.max_positions
    ]
    for n_layers in dict.fromkeys((deep, shallow)):
        for i, (n, p, r) in enumerate(sizes):
            if n * (p + r) <= subject.most_tokens and (n_layers == deep or i % 3 == 1):
                yield Probe("train_step" if kind == "train_step" else "inference", name, n_layers, n, p, r)


def _forks(kind: Kind, name: str, subject: Subject) -> Iterator[Probe]:
    """Yield samples of several sequences with one prompt, where the engine computes it once."""
    deep, shallow = _depths(subject)
    prompt, response = subject.prompt_tokens, subject.response_tokens
    for n_layers, n, alike in ((deep, 8, 8), (deep, 16, 4), (deep, 32, 8), (deep, 64, 8), (shallow, 32, 8)):
        is_shared = is_worth_sharing(prompt, [prompt + response] * alike, subject.config.hidden_size)
        if subject.shares_prompts and is_shared and n * (prompt + response) <= subject.most_tokens:
            yield Probe(kind, name, n_layers, n, prompt, response, alike)


def _generate(name: str, subject: Subject) -> Iterator[Probe]:
    """Yield batches and lengths; the shortest responses show the prefill."""
    deep, shallow = _depths(subject)
    prompt, response = subject.prompt_tokens, subject.response_tokens
    batches = sorted({n for n in (1, 4, 16, 64) if n < subject.max_rows} | {subject.max_rows})
    for n in batches:
        for made in dict.fromkeys((2, max(2, response // 4), response)):
            for n_layers in (deep, shallow) if n == batches[len(batches) // 3] else (deep,):
                yield Probe("generate", name, n_layers, n, prompt, made)
        if 4 * (prompt + response) <= subject.config.max_positions:
            yield Probe("generate", name, deep, n, 4 * prompt, response)
