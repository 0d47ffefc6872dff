"""The verdicts of `realrl run`, its --dry-run and `realrl doctor` on one run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from realrl import cli

BASE = ("grpo", "preset=tiny", "n_seqs=8", "generation.max_new_tokens=6", "generation.n_responses=2")


def verdicts(
    capfd: pytest.CaptureFixture[str], settings: Sequence[str], base: Sequence[str] = BASE
) -> dict[str, tuple[int, str, str]]:
    """Return exit code and output of the three commands; `base` is the experiment with its settings."""
    said = {}
    for name, more in (("doctor", ["--no-models"]), ("run", ["--dry-run"]), ("run", [])):
        code = cli.main([name, *base, *settings, *more])
        said[" ".join([name, *more])] = (code, *capfd.readouterr())
    return said


def assert_one_verdict(said: dict[str, tuple[int, str, str]], *, is_refused: bool | None = None) -> None:
    """The exit codes are equal; refusals by run and --dry-run are equal, and the doctor says all that stands there."""
    (doctor, told, refused), (dry, _, reason), (run, _, reason_of_run) = said.values()
    assert doctor == dry == run, said
    assert "Traceback" not in told + refused + reason + reason_of_run
    if is_refused is not None:
        assert run == (2 if is_refused else 0), said
    if run == 0:
        return
    assert run == 2
    assert reason.startswith("realrl: error: ")
    assert reason_of_run == reason
    for line in reason.removeprefix("realrl: error: ").splitlines():
        *_, words = line.strip().rpartition(": ")
        assert words[:60] in " ".join(f"{told} {refused}".split()) or "things stand in the way" in line, (line, told)
