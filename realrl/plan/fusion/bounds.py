"""Lower bounds: what no schedule of a problem can beat.

Latency. Take any device and some of the pipelines on it. Before their first task there, one of them has to get there;
after their last one, one has to get back; and all their work is done in between:

    min over them of the head + sum of their work + min over them of the tail

where head and tail are the times of a micro-batch before its first task on the device, and after its last one. The
largest value over devices and subsets bounds the latency; so does the longest way of a single micro-batch.

Memory at a latency L. Suppose that stage j never has more than q micro-batches in flight. Its backward of micro-batch k
cannot end before c(k), the most, over stages s at or after j, of

    head(s) + (k + 1) work(s) + way from the end of s's backward to the end of j's

for s has done as many micro-batches by then. Read backwards in time, its forward of micro-batch k has to start by
L - d(k)
with d(k) the most, over the same stages, of

    way from the start of j's forward to that of s's + (M - k) work(s) + tail(s)

And the forward of micro-batch k + q cannot start before the backward of micro-batch k has ended, W or more after the
start of its forward, with W the way from there to the end of j and back. So for every n from 1 on

    c(k) + (n - 1) W + d(k + n q)  <=  L

The least q that contradicts none of these bounds the peak: q micro-batches of stage j. As functions of k and n the
left sides bend upwards, so the first and the last k and n decide. Besides, a device holds a micro-batch of each of its
pipelines at some time.
"""

from __future__ import annotations

from functools import lru_cache

from realrl.plan.fusion.problem import Problem


def latency_bound(problem: Problem) -> int:
    """Return ticks that no schedule can go below."""
    bound = max(problem.path)
    for device in range(problem.n_devices):
        own = _on_device(problem, device)
        # the smallest head and tail of the best subset belong to one of its pipelines each; with these given, the
        # subset is all pipelines whose head and tail are no smaller
        for head in {head for head, _, _ in own}:
            for tail in {tail for _, _, tail in own}:
                work = sum(w for h, w, t in own if h >= head and t >= tail)
                if work:
                    bound = max(bound, head + work + tail)
    return bound


@lru_cache(maxsize=256)
def memory_bound(problem: Problem, latency: int) -> int:
    """Return units of the highest peak that no schedule of this latency can go below."""
    bound = 0
    for p in range(problem.n_pipelines):
        stages = [s for s in range(problem.n_stages) if problem.pipeline[s] == p]
        alone = [
            sum(problem.activation[s] for s in stages if d in problem.devices[s]) for d in range(problem.n_devices)
        ]
        bound = max(bound, *alone)
        for j in stages:
            bound = max(bound, _least_in_flight(problem, j, latency) * problem.activation[j])
    return bound


def _least_in_flight(problem: Problem, j: int, latency: int) -> int:
    """Return micro-batches that stage j has to have in flight at once: more than any number that is refuted.

    Numbers are halved: a refuted one refutes smaller ones.
    """
    refuted, least = 0, problem.n_micro_batches[j]
    while least - refuted > 1:
        middle = (refuted + least) // 2
        if _is_refuted(problem, j, middle, latency):
            refuted = middle
        else:
            least = middle
    return refuted + 1


def _is_refuted(problem: Problem, j: int, q: int, latency: int) -> bool:
    """Return True if q micro-batches in flight at stage j are too few for the latency."""
    heads, path, duration, m = _heads(problem), problem.path, problem.duration, problem.n_micro_batches[j]
    own = [s for s in range(j, problem.n_stages) if problem.pipeline[s] == problem.pipeline[j]]
    work = {s: duration[2 * s] + duration[2 * s + 1] for s in own}
    tail = {s: path[2 * s + 1] - duration[2 * s + 1] for s in own}
    way = path[2 * j] - tail[j]

    def ended(k: int) -> int:
        return max(heads[s] + (k + 1) * work[s] + tail[s] - tail[j] for s in own)

    def needed(k: int) -> int:
        return max(heads[s] - heads[j] + (m - k) * work[s] + tail[s] for s in own)

    for n in {1, (m - 1) // q}:
        for k in {0, m - 1 - n * q}:
            if ended(k) + (n - 1) * way + needed(k + n * q) > latency:
                return True
    return False


def _heads(problem: Problem) -> list[int]:
    """Return for each stage the ticks before its forward of a pipeline's first micro-batch."""
    heads: list[int] = []
    for stage in range(problem.n_stages):
        before = heads[-1] + problem.duration[2 * stage - 2] if problem.position[stage] else 0
        heads.append(before)
    return heads


def _on_device(problem: Problem, device: int) -> list[tuple[int, int, int]]:
    """Return head, work and tail of each pipeline on a device."""
    heads, own = _heads(problem), []
    for p in range(problem.n_pipelines):
        stages = [s for s in range(problem.n_stages) if problem.pipeline[s] == p and device in problem.devices[s]]
        if stages:
            work = sum(
                problem.n_micro_batches[s] * (problem.duration[2 * s] + problem.duration[2 * s + 1]) for s in stages
            )
            tails = [problem.path[2 * s + 1] - problem.duration[2 * s + 1] for s in stages]
            own.append((min(heads[s] for s in stages), work, min(tails)))
    return own
