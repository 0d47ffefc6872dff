"""Checks of tokenizers, chat templates, datasets and lengths."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realrl.config.schema import BUILT_IN
from realrl.data.chat_template import render
from realrl.data.datasets import Dataset, load_dataset
from realrl.data.kinds import DatasetKind
from realrl.data.readers import READERS
from realrl.data.tokenizer import encode_batch
from realrl.doctor.findings import Finding, Status
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.errors import DataError
from realrl.experiment.evaluation import held_out_data
from realrl.graph.mfc import InterfaceType
from realrl.plan.memory.load import RowLengths
from realrl.runtime.processes.preflight import check_vocabularies

ROUND_TRIPS = ("The quick brown fox, 3.14!", "  two  spaces\n\tand a tab", "Größe, 大小, размер, 🙂")
CONVERSATION = ({"role": "user", "content": "What is two and three?"}, {"role": "assistant", "content": "Five."})
_N_BINS = 8


@dataclass(frozen=True)
class Histogram:
    """Lengths of the dataset's texts: (shortest, longest, number of texts) of each bin."""

    what: str
    bins: tuple[tuple[int, int, int], ...]


def check_tokenizers(run: RunUnderCheck) -> Iterator[Finding]:
    """Check that each role's tokenizer loads, and that texts survive a round trip."""
    for path, roles in _by_path(run).items():
        tokenizer = run.tokenizer(path)
        changed = [text for text in ROUND_TRIPS if not _survives(tokenizer, text)]
        who = ", ".join(roles)
        if changed:
            yield Finding(
                Status.WARNING,
                f"{path} ({who}): {len(tokenizer)} tokens, but {changed[0]!r} comes back as "
                f"{_round_trip(tokenizer, changed[0])!r}",
                "Rewards that read text see it changed like this; rewards that read ids do not.",
            )
        else:
            yield Finding(Status.OK, f"{path} ({who}): {len(tokenizer)} tokens, round trip")


def _by_path(run: RunUnderCheck) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in run.plan.roles:
        found.setdefault(run.config.models[name].path, []).append(name)
    return found


def _round_trip(tokenizer: Any, text: str) -> str:
    [ids] = encode_batch(tokenizer, [text], with_start=False)
    decoded: str = tokenizer.decode(ids, skip_special_tokens=True)
    return decoded


def _survives(tokenizer: Any, text: str) -> bool:
    """Return True if a text comes back; a space that some tokenizers put in front of every text does not count."""
    decoded = _round_trip(tokenizer, text)
    return text in (decoded, decoded.removeprefix(" "))


# ---------------------------------------------------------------- stop tokens and chat template


def check_stop_tokens(run: RunUnderCheck) -> Iterator[Finding]:
    """Check that end-of-sequence tokens of generating roles are in the vocabulary, and stop a response."""
    for name in _generating_roles(run):
        path, model = run.config.models[name].path, run.models[name]
        tokenizer = run.tokenizer(path)
        stops = tuple(dict.fromkeys((tokenizer.eos_token_id, *run.config.generation.stop_ids)))
        shown = ", ".join(f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in stops if i < len(tokenizer))
        outside = [i for i in stops if i >= model.vocab_size]
        missing = [i for i in _model_ends(path, model.eos_token_ids) if i not in stops]
        if outside:
            yield Finding(
                Status.PROBLEM,
                f"{name}: stop tokens {outside} are outside of the model's vocabulary of {model.vocab_size}",
                "Check generation.stop_ids and the tokenizer's end-of-sequence token.",
            )
        elif missing:
            ends = ", ".join(f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in missing)
            message = f"{name} stops at {shown}, but the model's own files end responses at {ends} too"
            yield Finding(Status.WARNING, message, f"Set generation.stop_ids=[{','.join(map(str, missing))}].")
        else:
            yield Finding(Status.OK, f"{name} stops at {shown}")


def _generating_roles(run: RunUnderCheck) -> list[str]:
    calls = [mfc for mfc in run.plan.mfcs if mfc.interface_type is InterfaceType.GENERATE]
    return list(dict.fromkeys(mfc.role for mfc in calls if mfc.role in run.models))


def _model_ends(path: str, from_config: Sequence[int]) -> list[int]:
    """Return the end-of-sequence tokens in a model's config.json and generation_config.json."""
    ends = list(from_config)
    file = Path(path) / "generation_config.json"
    if path != BUILT_IN and file.is_file():
        try:
            named = json.loads(file.read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, KeyError, TypeError):  # the run does not read it
            named = []
        ends += [end for end in (named if isinstance(named, list) else [named]) if isinstance(end, int)]
    return list(dict.fromkeys(ends))


def check_chat_template(run: RunUnderCheck) -> list[Finding]:
    """Check that a prompt's tokens begin those of the whole conversation, so that training and generation agree."""
    tokenizer = run.reading_tokenizer
    is_used = run.config.dataset.chat_template or _has_messages(run)
    if tokenizer.chat_template is None:
        if not is_used:
            return [Finding(Status.OK, "the tokenizer has none, and none is used")]
        message = "prompts are to be wrapped in a chat template, and the tokenizer has none"
        remedy = "Use plain strings with dataset.chat_template=false, or add a chat_template to the tokenizer."
        return [Finding(Status.PROBLEM, message, remedy)]
    use = "" if is_used else " (not used: prompts are plain text)"
    try:
        texts = [render(tokenizer, CONVERSATION[:1]), render(tokenizer, CONVERSATION, asks=False)]
    except DataError as error:
        message = f"{error.message}{use}"
        remedy = "Correct the tokenizer's chat_template." if is_used else ""
        return [Finding(Status.PROBLEM if is_used else Status.OK, message, remedy)]
    for said, text, status in zip(CONVERSATION, texts, (Status.PROBLEM, Status.WARNING), strict=True):
        if is_used and said["content"] not in text:
            message = f"the template loses text: {said['content']!r} of the {said['role']} is not in what it renders"
            return [Finding(status, message, "Correct the tokenizer's chat_template.")]
    prompt, whole = encode_batch(tokenizer, texts, with_start=False)
    if whole[: len(prompt)] != prompt:
        n_equal = next(i for i, pair in enumerate(zip([*prompt, -1], [*whole, -2])) if pair[0] != pair[1])
        message = (
            f"the prompt's {len(prompt)} tokens are no beginning of the conversation's {len(whole)}: token "
            f"{n_equal} differs{use}"
        )
        remedy = (
            "The template renders a finished answer in another way than it begins one; responses of earlier turns "
            "are not seen as they were generated."
        )
        return [Finding(Status.WARNING, message, remedy) if is_used else Finding(Status.OK, message)]
    end = whole[len(prompt) :]
    stops = {tokenizer.eos_token_id, *run.config.generation.stop_ids}
    if is_used and _generating_roles(run) and not stops.intersection(end):
        message = f"a finished answer ends with {tokenizer.decode(end[-2:])!r}, which holds no stop token"
        return [Finding(Status.WARNING, message, "Add the token that closes an answer to generation.stop_ids.")]
    return [Finding(Status.OK, f"the prompt's {len(prompt)} tokens begin the conversation's {len(whole)}{use}")]


def _has_messages(run: RunUnderCheck) -> bool:
    """Return True if the first row's prompt is a list of messages."""
    path = Path(run.config.dataset.path)
    reader = READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        return False
    first = next(reader(path), None)
    return first is not None and isinstance(first.fields.get("prompt"), list)


# ---------------------------------------------------------------- dataset


def check_dataset(run: RunUnderCheck) -> list[Finding]:
    """Check that the dataset, and validation data if there is any, is readable and long enough for a step."""
    dataset = run.dataset
    findings = [_about(run.config.dataset.path, dataset, run.plan.samples_per_step)]
    if run.plan.evaluation is not None:
        config = held_out_data(run.config)
        held_out = load_dataset(config, run.kind, run.reading_tokenizer, is_held_out=True)
        findings.append(_about(f"eval.path: {config.path}", held_out, 1))
    return findings


def _about(path: str, dataset: Dataset, n_needed: int) -> Finding:
    n_kept, n_dropped = len(dataset), dataset.n_dropped
    longest = max(dataset.prompt_lens)
    message = f"{path}: {n_kept} rows, {n_dropped} dropped; prompts of {min(dataset.prompt_lens)} to {longest} tokens"
    if dataset.kind is not DatasetKind.PROMPT:
        message += f", whole sequences of up to {max(map(max, dataset.seqlens))}"
    if n_kept < n_needed:
        remedy = "Lower n_seqs, or give more rows."
        return Finding(Status.PROBLEM, f"{message}; a step needs {n_needed} rows", remedy)
    if n_dropped > n_kept:
        return Finding(Status.WARNING, f"{message}; {'; '.join(dataset.notes)}", "Raise the limits of dataset.*.")
    return Finding(Status.OK, message)


def row_lengths(dataset: Dataset) -> RowLengths:
    """Return the token counts of a dataset, for memory."""
    longest = [max(lens) for lens in dataset.seqlens]
    n_sequences = max(map(len, dataset.seqlens), default=1)
    return RowLengths(dataset.prompt_lens, [sum(lens) for lens in dataset.seqlens], longest, n_sequences)


def histograms(dataset: Dataset) -> list[Histogram]:
    """Return the lengths of prompts and, where the rows have any, of answers."""
    found = [Histogram("prompt tokens", _bins(dataset.prompt_lens))]
    if dataset.kind is not DatasetKind.PROMPT:
        answers = [n - p for p, lens in zip(dataset.prompt_lens, dataset.seqlens, strict=True) for n in lens]
        found.append(Histogram("answer tokens", _bins(answers)))
    return found


def _bins(lengths: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return at most `_N_BINS` bins of equal width."""
    ordered = sorted(lengths)
    low, high = ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // _N_BINS))
    edges = range(low, high + 1, width)
    return tuple(
        (edge, min(edge + width - 1, high), bisect_left(ordered, edge + width) - bisect_left(ordered, edge))
        for edge in edges
    )


# ---------------------------------------------------------------- lengths and vocabularies


def check_lengths(run: RunUnderCheck) -> list[Finding]:
    """Check that prompts, with their responses or answers, fit into the positions of every model."""
    generating = set(_generating_roles(run))
    new = run.config.generation.max_new_tokens if generating else 0
    dataset = run.dataset
    longest = max(dataset.prompt_lens) + new if new else max(map(max, dataset.seqlens))
    what = f"prompts of up to {max(dataset.prompt_lens)} tokens and {new} new ones" if new else "prompts with answers"
    limit = "generation.max_new_tokens" if new else "dataset.max_answer_tokens"
    remedy = f"Lower dataset.max_prompt_tokens or {limit}."
    findings = []
    for name, model in run.models.items():
        if model.max_positions >= longest:
            continue
        is_limit = name in generating or model.learned_positions
        message = f"{what} make up to {longest} tokens, {name} has {model.max_positions} positions"
        message += "" if is_limit else ", beyond which it was not trained"
        findings.append(Finding(Status.PROBLEM if is_limit else Status.WARNING, message, remedy))
    fewest = min((model.max_positions for model in run.models.values()), default=0)
    enough = Finding(Status.OK, f"{what} make up to {longest} tokens; the models have {fewest} positions or more")
    return findings or [enough]


def check_vocabulary(run: RunUnderCheck) -> list[Finding]:
    """Check that all models know the tokens that they may be given."""
    tokenizer = run.reading_tokenizer
    check_vocabularies(run.plan, run.dataset, n_tokens=len(tokenizer))
    sizes = {name: model.vocab_size for name, model in run.models.items()}
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no model"
    message = f"{shown}; the tokenizer has {len(tokenizer)}"
    if len(set(sizes.values())) < 2:
        return [Finding(Status.OK, message)]
    remedy = "Make sure that all models were trained with one tokenizer; padded vocabularies are harmless."
    return [Finding(Status.WARNING, f"sizes differ: {message}", remedy)]


def some_prompts(run: RunUnderCheck, n: int) -> list[torch.Tensor]:
    """Return the token ids of up to n prompts, spread over the dataset."""
    dataset = run.dataset
    n = min(n, len(dataset))
    rows = [i * len(dataset) // n for i in range(n)]
    ids = [str(row) for row in rows]
    sample = dataset.samples(ids, rows)
    if dataset.kind is DatasetKind.PROMPT:
        return list(sample.samples("prompt_ids"))
    firsts = zip(sample.sequences("input_ids"), sample.sequences("prompt_mask"), strict=True)
    return [tokens[0][masks[0]] for tokens, masks in firsts]
