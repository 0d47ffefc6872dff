"""Instances of fused pipelines: the published rows, and random ones."""

from __future__ import annotations

from random import Random

from realrl.plan.fusion.instance import Instance, Model, on_block
from realrl.plan.fusion.problem import UNLIMITED, Problem

# stages of A and B, micro-batches, forward and backward of each, activations
ROWS = (
    (8, 4, 8, 4, 5, 10, 4, 8, 1.95, 2),
    (8, 4, 16, 8, 5, 10, 4, 8, 1.95, 2),
    (8, 4, 32, 16, 5, 10, 4, 8, 1.95, 2),
    (8, 8, 8, 8, 5, 10, 2, 4, 1.95, 1),
    (8, 8, 16, 16, 5, 10, 2, 4, 1.95, 1),
    (8, 8, 32, 32, 5, 10, 2, 4, 1.95, 1),
    (16, 8, 16, 8, 2, 4, 2, 4, 1.64, 2),
    (16, 8, 32, 16, 2, 4, 2, 4, 1.64, 2),
    (16, 8, 64, 32, 2, 4, 2, 4, 1.64, 2),
    (16, 16, 16, 16, 2, 4, 1, 2, 1.64, 1),
    (16, 16, 32, 32, 2, 4, 1, 2, 1.64, 1),
    (16, 16, 64, 64, 2, 4, 1, 2, 1.64, 1),
)
SERIAL = (309, 477, 813, 315, 483, 819, 276, 420, 708, 279, 423, 711)
BOUNDS = (225, 372, 708, 225, 366, 702, 186, 330, 618, 186, 318, 606)


def row(number: int) -> Instance:
    """Return a published row, from 1."""
    n_a, n_b, m_a, m_b, f_a, b_a, f_b, b_b, memory_a, memory_b = ROWS[number - 1]
    a = Model("A", n_a, m_a, f_a, b_a, memory_a)
    return on_block([a, Model("B", n_b, m_b, f_b, b_b, memory_b, is_reversed=True)])


def unlimited(problem: Problem) -> tuple[int, ...]:
    """Return caps that never bind."""
    return (UNLIMITED,) * problem.n_devices


def random_instance(random: Random) -> Instance:
    """Return an instance of a random kind, with caps that bind or without."""
    kind = random.choice(("pair", "pair", "copies", "three", "wide"))
    if kind == "copies":
        scale = random.choice((1, 2))
        sizes, widths = [2 * scale, 3 * scale], [1, 1]  # three copies of the first, two of the second
    elif kind == "wide":
        width = random.choice((2, 4))
        n_wide = random.choice((1, 2))
        sizes, widths = [n_wide * width, n_wide], [1, width]
    else:
        n_stages = random.randint(1, 5)
        sizes = [n_stages] * (3 if kind == "three" else 2)
        widths = [1] * len(sizes)
    models = [
        _random_model(random, "ABC"[i], n_stages, width, is_reversed=random.random() < 0.5)
        for i, (n_stages, width) in enumerate(zip(sizes, widths, strict=True))
    ]
    instance = on_block(models)
    if random.random() < 0.5:
        return instance
    least = instance.least_caps
    return instance.with_caps([cap * random.choice((1, 1, 1.3, 2, 4)) for cap in least])


def _random_model(random: Random, name: str, n_stages: int, width: int, *, is_reversed: bool) -> Model:
    times = [random.choice((1.0, 2.0, random.uniform(0.5, 4.0))) for _ in range(n_stages)]
    if random.random() < 0.5:  # an embedding that takes no time to speak of, and a head that does
        times[0], times[-1] = 0.7 * times[0], 2.5 * times[-1]
    ratio = random.uniform(1, 3)
    memory = [random.choice((0.0, 1.0, 1.95, random.uniform(0.1, 3))) for _ in range(n_stages)]
    n_micro_batches = random.randint(1, 7)
    return Model(name, n_stages, n_micro_batches, times, [ratio * t for t in times], memory, width, is_reversed)
