"""Whole runs of random models and plans: no rank has more live bytes than planned, nor much fewer."""

from __future__ import annotations

import pytest

from scripts import memory_campaign


@pytest.mark.timeout(240)
def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_campaign.main(["--only", "19"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_campaign.main(["--only", "0", "11", "24", "25", "27", "39", "41"]) == 0, capsys.readouterr().out
