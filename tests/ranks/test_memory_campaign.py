"""Whole runs of random models and plans: no rank has more live bytes than planned, nor much fewer."""

from __future__ import annotations

import pytest

from scripts import memory_campaign


@pytest.mark.timeout(240)
def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_campaign.main(["--seed", "31", "--only", "24"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_campaign.main(["--seed", "31", "--only", "2", "10", "14", "16", "17", "36", "38"]) == 0, (
        capsys.readouterr().out
    )
