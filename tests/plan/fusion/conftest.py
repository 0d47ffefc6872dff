"""The first published row, and its schedule in series."""

from __future__ import annotations

import pytest

from realrl.plan.fusion.listing import serial_words
from realrl.plan.fusion.problem import Problem, Words, problem_of
from tests.plan.fusion.instances import row


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(row(1))


@pytest.fixture(scope="module")
def words(problem: Problem) -> Words:
    return serial_words(problem)
