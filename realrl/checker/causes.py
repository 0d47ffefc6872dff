"""The usual causes of numbers that depend on the plan, each with what to write instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A kind of mistake.

    Attributes:
        name: short name, as in documents and JSON.
        says: what is wrong, as the end of a sentence that begins with the call.
        remedy: what to write instead.
    """

    name: str
    says: str
    remedy: str


UNREPEATABLE = Cause(
    "not-repeatable",
    "gives other numbers in a second run of the same plan: it reads the clock, a generator without seed, the "
    "order of a "
    "set or of files, an address or a process id",
    "Compute from the samples, ctx.seed and ctx.step alone; sort what has no order.",
)
GENERATOR = Cause(
    "rank-generator",
    "draws random numbers from a generator of its process, so that a sample's numbers depend on the samples "
    "before it and "
    "on the rank",
    "Draw from ctx.seed, ctx.step and the sample's id: seed a generator of its own for each sample, or use "
    "model.engine.generate, whose draws are counter-based.",
)
BY_POSITION = Cause(
    "by-position",
    "gives numbers that go with the place in the batch and not with the sample: a generator that is drawn "
    "from in the "
    "batch's order, an index, a cumulative count, or the sample beside it",
    "Let each sample's numbers follow from its own rows; for random ones seed a generator with ctx.seed, "
    "ctx.step and the "
    "sample's id (batch.ids).",
)
BY_ORDER = Cause(
    "order-dependent",
    "depends on the order of samples in the batch: the first or last of them, a running sum over the packed "
    "tensor, or "
    "neighbours across the border of two sequences",
    "Work on each sequence by itself (batch.sequences(key), batch.cu_seqlens(key)), or on sums over all samples.",
)
SIDE_CHANNEL = Cause(
    "undeclared-data",
    "reads what another call left in an attribute, a global or a shared object, in the order of that call: "
    "it is no key of "
    "the graph, so it does not follow its samples",
    "Return it as an output key of the call that makes it, and list it among the input_keys of this one.",
)
MEAN_LOSS = Cause(
    "mean-loss",
    "returns a mean over the micro-batch where a sum is wanted: it grows with the number of micro-batches and workers",
    "Return sums in LossOutput, divided by nothing: the engine divides by the count of the whole minibatch over all "
    "ranks (the `count` of train_minibatches).",
)
MEAN_STATISTIC = Cause(
    "mean-statistic",
    "gives statistics that are means over the micro-batch: they grow with the number of micro-batches and workers",
    "Put sums into LossOutput.stats, as for the loss; the engine divides them by the same count.",
)
PER_MICRO_BATCH = Cause(
    "per-micro-batch",
    "computes something from the micro-batch as a whole (a mean, standard deviation, maximum, rank or "
    "padding), which "
    "changes when the minibatch is cut",
    "Compute it before the loss, from the whole batch and all ranks (Moments.of(x, model.engine.all_reduce)), or for "
    "each sequence by itself.",
)
LOCAL_NORMALISER = Cause(
    "local-normaliser",
    "gives Engine.train_batch a normaliser that is its rank's own count",
    "Use train_minibatches(..., count=...), or reduce the count first: model.engine.all_reduce(torch.tensor([count])).",
)
LOCAL_METRIC = Cause(
    "rank-local-metric",
    "returns a metric of its rank's own samples: the workers return different numbers, and only one of them is logged",
    "In a piece: rollout.moments(x), rollout.maximum(x). In an interface: Moments.of(x, model.engine.all_reduce).mean, "
    "model.engine.all_reduce(x, 'max'), or record it: ctx.metrics.add(name, total, count).",
)
MEAN_OF_MEANS = Cause(
    "mean-of-means",
    "combines the workers' means (or adds them up), so that workers with few samples count as much as those with many",
    "Reduce sums and counts, and divide after that: Moments.of(x, model.engine.all_reduce), or "
    "ctx.metrics.add(name, total, count) with the number of values as count.",
)
PER_RANK = Cause(
    "per-rank",
    "computes something from its rank's own samples (a mean, standard deviation, maximum, whitening), which "
    "changes with "
    "the workers",
    "Take it over all workers. In a piece: rollout.moments(x), rollout.maximum(x). In an interface: "
    "Moments.of(x, model.engine.all_reduce), model.engine.all_reduce(x, 'max'), "
    "whiten(x, mask, model.engine.all_reduce).",
)
BY_RANK = Cause(
    "by-rank",
    "gives other numbers on other workers: it uses a rank, an environment variable, or which samples share the worker",
    "Let each sample's numbers follow from its own rows, ctx.seed and ctx.step.",
)
MASK = Cause(
    "mask-dropped",
    "counts rows that hold nothing: the baseline has zeros in rows of prompts, and other numbers there "
    "change the result",
    "Select before you compute: mask = response_mask(part); x[mask].sum().",
)
STATE = Cause(
    "state-between-steps",
    "keeps something between steps that depends on the plan: an attribute that each worker sets from its own "
    "samples, or "
    "that counts batches or micro-batches",
    "Update attributes from sums over all workers (model.engine.all_reduce), once per step, and return them in "
    "state_dict().",
)
ONE_STAGE = Cause(
    "on-one-stage",
    "uses what the loss or the function given to Engine.forward left behind: those run on the last pipeline "
    "stage only, "
    "and on each tensor-parallel rank",
    "Return it: as LossOutput.stats, which all ranks get, or as the function's result.",
)
NOT_SAVED = Cause(
    "state-not-saved",
    "keeps something from step to step that is not saved: a run that is stopped and resumed goes on without it",
    "Give it an attribute of the interface, return it in state_dict() and take it back in load_state_dict().",
)
CHANGED_INPUT = Cause(
    "changed-input",
    "changes its input tensors in place: later calls on the same worker see that, those on other workers do not",
    "Work on a copy: x = batch[key].clone(), or x = batch[key] - mean in the place of x -= mean.",
)
BY_BATCHES = Cause(
    "metric-of-pieces",
    "gives a metric made of numbers of its micro-batches or batches, such as the mean of their means or the last one",
    "Put sums into LossOutput.stats, or use ctx.metrics.add(name, total, count).",
)
FAILS = Cause(
    "fails",
    "fails where the baseline does not",
    "See the error; samples come in any number and order, on any rank, and only declared keys come with them.",
)
CAUSES = tuple(value for value in list(vars().values()) if isinstance(value, Cause))
