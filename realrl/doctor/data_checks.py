"""Checks of tokenizers, chat templates, datasets and lengths."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.config.paths import find_data_files
from realrl.data.chat_template import render
from realrl.data.kinds import ANSWER_FIELDS, DatasetKind
from realrl.data.readers import READERS
from realrl.data.tokenizer import encode_batch
from realrl.doctor.findings import Finding, Status
from realrl.doctor.run_under_check import RunUnderCheck, naming
from realrl.errors import AssetError, DataError
from realrl.graph.mfc import InterfaceType
from realrl.plan.memory.load import RowLengths

if TYPE_CHECKING:
    import torch

    from realrl.data.datasets import Dataset

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
        with naming(f"models.{roles[0]}.path"):
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
    """Check that end-of-sequence tokens of generating roles are in the vocabulary."""
    for name in _generating_roles(run):
        path, model = run.config.models[name].path, run.models[name]
        tokenizer = run.tokenizer(path)
        asked = (tokenizer.eos_token_id, *run.config.generation.stop_ids)
        stops = dict.fromkeys((*asked, *(end for end in model.eos_token_ids if 0 <= end < model.vocab_size)))
        shown = ", ".join(f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in stops if i < len(tokenizer))
        outside = [i for i in dict.fromkeys(asked) if i >= model.vocab_size]
        if outside:
            yield Finding(
                Status.PROBLEM,
                f"{name}: stop tokens {outside} are outside of the model's vocabulary of {model.vocab_size}",
                "Check generation.stop_ids and the tokenizer's end-of-sequence token.",
            )
        else:
            yield Finding(Status.OK, f"{name} stops at {shown}")


def _generating_roles(run: RunUnderCheck) -> list[str]:
    calls = [mfc for mfc in run.plan.mfcs if mfc.interface_type is InterfaceType.GENERATE]
    return list(dict.fromkeys(mfc.role for mfc in calls if mfc.role in run.models))


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
    generating = _generating_roles(run)
    stops = {tokenizer.eos_token_id, *run.config.generation.stop_ids}
    stops.update(*(run.models[name].eos_token_ids for name in generating))
    if is_used and generating and not stops.intersection(end):
        message = f"a finished answer ends with {tokenizer.decode(end[-2:])!r}, which holds no stop token"
        return [Finding(Status.WARNING, message, "Add the token that closes an answer to generation.stop_ids.")]
    return [Finding(Status.OK, f"the prompt's {len(prompt)} tokens begin the conversation's {len(whole)}{use}")]


def _has_messages(run: RunUnderCheck) -> bool:
    """Return True if the first row of a file holds messages."""
    for source in run.config.dataset.sources.values():
        path = Path(find_data_files(source.path)[0])
        reader = READERS.get(path.suffix.lower())
        first = None if reader is None or not path.is_file() else next(reader(path), None)
        names = [source.fields.given.get(field, field) for field in ("prompt", "messages", "chosen", *ANSWER_FIELDS)]
        if first is not None and any(isinstance(first.fields.get(name), list) for name in names):
            return True
    return False


# ---------------------------------------------------------------- dataset


def check_dataset(run: RunUnderCheck) -> list[Finding]:
    """Check that the dataset, and validation data if there is any, is readable."""
    trains = any(mfc.is_train for mfc in run.plan.mfcs)
    needed = {"dataset": run.plan.samples_per_step} if trains else {}
    paths: dict[str, list[str]] = {}
    for key, path, _ in run.sources:
        paths.setdefault(key.partition(".")[0], []).append(f"{key}={path}")
    return [_about(", ".join(paths[name]), rows, needed.get(name, 1)) for name, rows in run.datasets.items()]


def _about(what: str, dataset: Dataset, n_needed: int) -> Finding:
    n_kept, n_dropped = len(dataset), dataset.n_dropped
    longest = max(dataset.prompt_lens)
    message = f"{what}: {n_kept} rows, {n_dropped} dropped; prompts of {min(dataset.prompt_lens)} to {longest} tokens"
    if dataset.kind is not DatasetKind.PROMPT:
        message += f", whole sequences of up to {max(map(max, dataset.seqlens))}"
    if n_kept < n_needed:
        times = math.ceil(n_needed / n_kept)
        message += f"; a step takes {n_needed} samples, so that each row comes up to {times} times in it"
        return Finding(Status.WARNING, message, "Lower n_seqs, or give more rows.")
    if n_dropped > n_kept:
        return Finding(Status.WARNING, f"{message}; {'; '.join(dataset.notes)}", "Raise the limits of dataset.*.")
    return Finding(Status.OK, message)


def check_steps(run: RunUnderCheck) -> list[Finding]:
    """Check that the data fill a step, and that a checkpoint to continue from was made with the same rows."""
    if run.config.eval.only:
        return [Finding(Status.OK, "one pass over the validation data")]
    main = run.beginning[1].main
    last = main.last_step(main.cursor(run.dataset.row_ids, run.dataset.digest))
    return [Finding(Status.OK, f"steps {main.first_step} to {last}")]


def row_lengths(dataset: Dataset, tokenizer: Any = None) -> RowLengths:
    """Return the token counts of a dataset, for memory; with a tokenizer, those of answers to prompts too."""
    longest = [max(lens) for lens in dataset.seqlens]
    n_sequences = max(map(len, dataset.seqlens), default=1)
    answers: list[int] = []
    if tokenizer is not None and dataset.kind is DatasetKind.PROMPT:
        rows = dataset.samples(dataset.row_ids, range(len(dataset))).samples("metadata")
        from realrl.data.datasets import answer_in

        texts = [answer_in(bytes(row.tolist())) for row in rows]
        answers = [len(tokens) + 1 for tokens in encode_batch(tokenizer, texts, with_start=False)]
    return RowLengths(dataset.prompt_lens, [sum(lens) for lens in dataset.seqlens], longest, n_sequences, answers)


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
    generating = run.plan.generating_roles
    new = run.config.generation.max_new_tokens if generating else 0
    longest = max(_longest(dataset, new) for dataset in run.datasets.values())
    what = f"a prompt of {longest - new} tokens and {new} new ones" if new else "a prompt with its answer"
    limit = "generation.max_new_tokens" if new else "dataset.max_answer_tokens"
    remedy = f"Lower dataset.max_prompt_tokens or {limit}."
    findings = []
    for name, model in run.models.items():
        if model.max_positions >= longest:
            continue
        is_limit = name in generating or model.learned_positions
        message = f"{what} make {longest} tokens, and the model of role '{name}' has {model.max_positions} positions"
        message += "" if is_limit else ", beyond which it was not trained"
        findings.append(Finding(Status.PROBLEM if is_limit else Status.WARNING, message, remedy))
    fewest = min((model.max_positions for model in run.models.values()), default=0)
    enough = Finding(Status.OK, f"{what} make {longest} tokens at most; the models have {fewest} positions or more")
    return findings or [enough]


def _longest(dataset: Dataset, n_new: int) -> int:
    return max(dataset.prompt_lens) + n_new if n_new else max(map(max, dataset.seqlens))


def check_vocabulary(run: RunUnderCheck) -> list[Finding]:
    """Check that all models know the tokens that they may be given: the dataset's, and those that a role generates.

    The dataset's role itself may know fewer tokens than its tokenizer, which often has added tokens that no text
    contains.

    Raises:
        AssetError: a role knows too few tokens.
    """
    reader, n_tokens = run.plan.dataset_role, len(run.reading_tokenizer)
    largest = max(dataset.max_token_id for dataset in run.datasets.values())
    sizes = {name: model.vocab_size for name, model in run.models.items()}
    for name, n_known in sizes.items():
        n_needed = largest + 1 if name == reader else n_tokens
        if n_known < n_needed:
            raise AssetError(
                f"models.{name}.path={run.config.models[name].path} knows {n_known} tokens, but the tokenizer of "
                f"'{reader}' gives ids up to {n_needed - 1}",
                remedy=f"All roles must have the vocabulary of '{reader}': set models.{name}.path to such a model.",
            )
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no model"
    message = f"{shown}; the tokenizer has {n_tokens}"
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
    return [tokens[0][: int(masks[0].long().cumprod(0).sum())] for tokens, masks in firsts]
