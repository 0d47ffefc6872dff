"""`math_verify`: equal as mathematics, however it is written."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("math_verify")

from realrl.rewards.verify_math import math_verify


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("42", "So the answer is 42.", 1.0),
        (42, r"\boxed{42}", 1.0),
        ("42", "41", 0.0),
        ("42", "no idea", 0.0),
        ("42", "", 0.0),
        (r"\frac{1}{2}", "$0.5$", 1.0),
        ("$\\frac{1}{2}$", r"so $\frac{2}{4}$", 1.0),
        (r"\boxed{x^2 + 1}", r"$1 + x^2$", 1.0),
        ("He has 3 and 4 apples, so 3 + 4 = 7.\n#### 7", "7 apples: \\boxed{7}", 1.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_answers(answer: Any, response: str, reward: float) -> None:
    assert math_verify("a question", response, {"answer": answer}) == reward


def test_the_field_can_be_named_and_must_be_there() -> None:
    assert math_verify("", "3", {"solution": "3"}, field="solution") == 1.0
    with pytest.raises(KeyError, match="the dataset's row has no 'answer', only solution"):
        math_verify("", "3", {"solution": "3"})
