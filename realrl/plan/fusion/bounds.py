"""Lower bounds: what no schedule of a problem can beat.

Latency. Take any device and some of the pipelines on it. Before their first task there, one of them has to get there;
after their last one, one has to get back; and all their work is done in between:

    min over them of the head + sum of their work + min over them of the tail

where head and tail are the times of a micro-batch before its first task on the device, and after its last one. The
largest value over devices and subsets bounds the latency; so does the longest way of a single micro-batch.

Memory at a latency L. Let stage s of a pipeline take w for a micro-batch's forward and backward, head H and tail T, and
let D = L - H - T - M w be the time that its device may do without the pipeline between them. The k-th forward
at s starts no later than H + D + (k - 1) w, or the rest would be late. So the k-th forward of a stage j before s starts
no later than its own head plus D + (k - 1) w. The first backward at j cannot start earlier than its head plus f plus
the way R to the last stage and back. So the micro-batches with D + (k - 1) w < f + R are in flight at once: as many as
(f + R - D) / w, rounded up. Besides, a device holds a micro-batch of each of its pipelines at some time.
"""

from __future__ import annotations

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


def memory_bound(problem: Problem, latency: int) -> int:
    """Return units of the highest peak that no schedule of this latency can go below."""
    bound = 0
    for p in range(problem.n_pipelines):
        stages = [s for s in range(problem.n_stages) if problem.pipeline[s] == p]
        alone = [
            sum(problem.activation[s] for s in stages if d in problem.devices[s]) for d in range(problem.n_devices)
        ]
        bound = max(bound, *alone)
        heads = _heads(problem)
        for s in stages:
            work = problem.duration[2 * s] + problem.duration[2 * s + 1]
            tail = problem.path[2 * s + 1] - problem.duration[2 * s + 1]
            spare = latency - heads[s] - tail - problem.n_micro_batches[s] * work
            for j in stages[: problem.position[s] + 1]:
                way = problem.path[2 * j] - problem.path[2 * j + 1]  # from the start of the forward to the backward's
                n_in_flight = min(problem.n_micro_batches[j], -(-(way - spare) // work))
                bound = max(bound, n_in_flight * problem.activation[j])
    return bound


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
