"""The interval between two heartbeats."""

import pytest

from realrl.runtime.worker.heartbeat import HEARTBEAT_INTERVAL_S, heartbeat_interval_s


@pytest.mark.parametrize("n_workers", [1, 8, 100])
def test_a_worker_of_few_beats_every_second(n_workers: int) -> None:
    assert heartbeat_interval_s(n_workers, 120.0) == HEARTBEAT_INTERVAL_S == 1.0


@pytest.mark.parametrize("limit_s", [2.0, 12.0, 120.0, 3600.0])
@pytest.mark.parametrize("n_workers", [256, 1024, 16384])
def test_many_workers_beat_a_hundred_times_a_second_unless_a_silent_one_is_to_be_found_sooner(
    n_workers: int, limit_s: float
) -> None:
    interval_s = heartbeat_interval_s(n_workers, limit_s)
    assert n_workers / interval_s == pytest.approx(100.0) or interval_s == max(1.0, limit_s / 5)
    assert n_workers / interval_s >= 100.0, "heartbeats would be fewer than they may be"
    assert interval_s <= max(1.0, limit_s / 5), "five of them could be lost before a worker counts as lost"
