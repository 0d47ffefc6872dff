"""The quickstart's evaluation, on a tiny model: its prompts may become fewer while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vaderSentiment")

from quickstart_eval import Report, evaluate
from quickstart_pace import PROMPTS_AT_A_TIME

from realrl.data.assets.fetch import MODEL_FOLDER, REVIEWS_FOLDER
from tests.helpers.assets import make_model_folder, write_rows

N_PAIRS, N_ROWS = 4, 3 * PROMPTS_AT_A_TIME


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a quickstart whose models are random and tiny."""
    monkeypatch.setenv("REALRL_CACHE", str(tmp_path))
    make_model_folder(tmp_path / MODEL_FOLDER)
    make_model_folder(tmp_path / "rw/checkpoints/latest/reward", head="reward")
    make_model_folder(tmp_path / "ppo/checkpoints/latest/actor")
    config = {"precision": "fp32", "generation": {"max_new_tokens": 6}}
    (tmp_path / "ppo/config.json").write_text(json.dumps(config))
    (tmp_path / REVIEWS_FOLDER).mkdir()
    pairs = [{"chosen": "aeiou" * (i + 1), "rejected": "xyz"} for i in range(N_PAIRS)]
    write_rows(tmp_path / REVIEWS_FOLDER / "reviews_pairs_heldout.jsonl", pairs)
    write_rows(
        tmp_path / REVIEWS_FOLDER / "reviews_prompts_heldout.jsonl", [{"prompt": f"number {i}"} for i in range(N_ROWS)]
    )
    return tmp_path


def evaluated(out: Path, ends: dict[int | None, int]) -> tuple[Report, list[int | None]]:
    asked: list[int | None] = []

    def n_prompts(n_done: int | None) -> int:
        asked.append(n_done)
        return ends[n_done]

    return evaluate(out, n_prompts=n_prompts, n_pairs=N_PAIRS), asked


def test_prompts_may_become_fewer_on_the_way(out: Path) -> None:
    n = PROMPTS_AT_A_TIME
    whole, asked = evaluated(out, {None: 1000, 0: 1000, n: 1000, 2 * n: 1000, 3 * n: 1000})
    assert asked == [None, 0, n, 2 * n, 3 * n]
    assert len(whole.prompts) == len(whole.after.texts) == N_ROWS
    fewer, asked = evaluated(out, {None: 1000, 0: 1000, n: n + 6, n + 6: n + 6})
    assert asked == [None, 0, n, n + 6]
    assert fewer.prompts == whole.prompts[: n + 6]
    assert fewer.before.texts == whole.before.texts[: n + 6]
    assert fewer.after.rewards == pytest.approx(whole.after.rewards[: n + 6], rel=1e-5)
    assert len(set(whole.before.texts)) > N_ROWS / 2  # each prompt draws tokens of its own
    assert fewer.gains["kl"].mean == pytest.approx(0, abs=1e-3)  # both actors have the same weights
