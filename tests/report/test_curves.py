"""Thinned curves say nothing false."""

import math

from hypothesis import given
from hypothesis import strategies as st

from realrl.report.curves import LEAST_BUCKETS, MOST_BUCKETS, Grid, curves_of, grid_of, rounded, totals_of
from tests.report.folders import steps

VALUES = st.floats(-1e300, 1e300, allow_nan=False) | st.none()


def listed(curve, key):
    values = curve.get(key, curve["mean"])
    return values if isinstance(values, list) else [values] * curve["n"]


@given(
    st.dictionaries(st.integers(0, 3000), VALUES, min_size=1, max_size=200),
    st.integers(1, 2000),
)
def test_every_value_is_in_its_bucket(values, most):
    rows = [{"step": step, **({"x": value} if value is not None else {})} for step, value in sorted(values.items())]
    grid = grid_of([rows], most)
    curve = curves_of(rows, grid).get("x")
    known = {step: value for step, value in values.items() if value is not None}
    assert grid.n <= max(MOST_BUCKETS, LEAST_BUCKETS)
    if not known:
        assert curve is None
        return
    lows, means, highs = (listed(curve, key) for key in ("low", "mean", "high"))
    close = lambda a, b: math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-300)  # noqa: E731 - rounding to five digits
    for bucket in range(curve["n"]):
        begin = grid.first + (curve["at"] + bucket) * grid.width
        inside = [value for step, value in known.items() if begin <= step < begin + grid.width]
        if not inside:
            assert means[bucket] is None
            continue
        assert close(lows[bucket], min(inside))
        assert close(highs[bucket], max(inside))
        assert (
            min(inside) <= means[bucket] <= max(inside)
            or close(
                means[bucket],
                min(inside),
            )
            or close(means[bucket], max(inside))
        )
    assert sum(mean is not None for mean in means) > 0


def test_few_steps_are_not_thinned():
    rows = steps(40, loss=lambda step: 1 / step, lr=0.1)
    grid = grid_of([rows], 10_000)
    assert grid == Grid(1, 1, 40)
    curves = curves_of(rows, grid)
    assert curves["loss"]["mean"] == [rounded(1 / step) for step in range(1, 41)]
    assert "low" not in curves["loss"]
    assert curves["lr"] == {"at": 0, "n": 40, "mean": 0.1}, "what never changes is one number"


def test_runs_share_their_buckets():
    long, short = steps(5000, x=float), steps(100, x=float)[49:]
    grid = grid_of([long, short], 600)
    assert grid.n <= 100
    assert sum(curve["n"] for rows in (long, short) for curve in curves_of(rows, grid).values()) * 3 <= 700
    assert curves_of(short, grid)["x"]["at"] == (50 - 1) // grid.width
    assert grid_of([[], []], 100) == Grid(0, 1, 0)


def test_totals_grow_to_the_sum():
    rows = steps(1000, time_s__step=0.5)
    grid = grid_of([rows], 100)
    totals = totals_of(rows, grid, "time_s/step")
    assert totals[-1] == 500
    assert totals == sorted(totals)
    assert len(totals) == grid.n
    assert totals_of(rows, grid, "n_tokens") == []


def test_numbers_are_short():
    assert [rounded(x) for x in (1.0, 0.1234567, 123456.7, -1e-9, float("inf"), None)] == [
        1, 0.12346, 123460, -1e-9, None, None,
    ]  # fmt: skip
