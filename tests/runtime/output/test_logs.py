"""Log files of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from realrl.runtime.output.logs import logging_to


def test_a_full_disk_costs_the_log_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.files._why_not", lambda mode: "")  # the device that is always full is no file
    with logging_to(Path("/dev/full")):
        logging.getLogger("realrl").error("no room for this")
    assert capsys.readouterr() == ("", "")
