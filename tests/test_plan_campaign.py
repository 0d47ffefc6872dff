"""The campaign of plans: its cases are what their seed says, and a few of them pass."""

import plan_campaign
import pytest
from drawn_runs import draw_case


def test_equal_seeds_draw_equal_cases(tmp_path):
    first, second = (draw_case(3, 7, tmp_path) for _ in range(2))
    assert first == second
    assert draw_case(3, 8, tmp_path).words != first.words


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_case_is_planned_and_checked(number):
    line = plan_campaign.run_case(1, None, number)
    assert line["outcome"] in ("planned", "refused"), line["reason"]


@pytest.mark.slow
def test_results_are_kept_and_not_made_again(tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    assert plan_campaign.main(["--cases", "1", "--seed", "5", "--jobs", "1", "--out", str(out)]) == 0
    content = out.read_text()
    assert plan_campaign.main(["--cases", "1", "--seed", "5", "--jobs", "1", "--out", str(out)]) == 0
    assert out.read_text() == content
    assert "| all | 1 |" in capsys.readouterr().out
