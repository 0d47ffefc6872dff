"""Whole runs of random models and plans: no rank has more live bytes than planned, nor much fewer."""

from __future__ import annotations

import pytest

from scripts import memory_campaign


@pytest.mark.timeout(240)
def test_a_few_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_campaign.main(["--n", "3"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_dozens_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_campaign.main(["--n", "48", "--seed", "2"]) == 0, capsys.readouterr().out
