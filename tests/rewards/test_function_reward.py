from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pydantic import Field

from realrl.config.schema import Section
from realrl.data.sample import SequenceSample
from realrl.errors import CallError, ConfigError, RunError
from realrl.rewards import pool as reward_pool
from realrl.rewards.call import RewardFunction
from realrl.rewards.interface import FunctionReward, _keys_of
from tests.algo.batches import metadata, token_batch
from tests.helpers.fake_engine import Bigram, FakeEngine, fake_context, fake_model

FUNCTIONS = "tests.rewards.reward_functions"
BATCH = token_batch([[([1, 2], [0, 9]), ([1, 2], [0])], [([3], [0, 1, 2])]])


def score(interface: FunctionReward, batch: SequenceSample = BATCH, *, algorithm: Section | None = None) -> list[float]:
    model = fake_model("reward", FakeEngine(Bigram(10)))
    ctx = fake_context("rew_inf", [batch.ids], step=4, algorithm=algorithm)
    return interface.inference(model, batch, ctx)["rewards"].tolist()


def responses(*firsts: int) -> SequenceSample:
    return token_batch([[([1], [first])] for first in firsts])


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture
def make() -> Any:
    """Interfaces whose processes end with the test; none may be left."""
    before = {p.pid for p in children()}
    made: list[FunctionReward] = []

    def build(function: str, **args: Any) -> FunctionReward:
        made.append(FunctionReward(function, **args))
        return made[-1]

    yield build
    for interface in made:
        interface.close()
    assert not [p for p in children() if p.pid not in before]


Make = Callable[..., FunctionReward]


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("separator", [":", "."])
def test_parameters_named_ids_get_token_ids(make: Make, in_process: bool, separator: str) -> None:
    interface = make(f"{FUNCTIONS}{separator}sum_ids", in_process=in_process)
    assert score(interface) == [309.0, 300.0, 303.0]
    assert score(interface) == [309.0, 300.0, 303.0]


@pytest.mark.parametrize("in_process", [False, True])
def test_other_functions_get_text_without_special_tokens(make: Make, in_process: bool) -> None:
    assert score(make(f"{FUNCTIONS}:text_length", in_process=in_process)) == pytest.approx([2.1, 2.1, 1.3])


@pytest.mark.parametrize("in_process", [False, True])
def test_a_third_parameter_gets_the_row(make: Make, in_process: bool) -> None:
    rows = [{"scale": 2.0, "note": "é"}, {"scale": 3.0, "note": "x"}]
    interface = make(f"{FUNCTIONS}:scaled_length", in_process=in_process)
    assert score(interface, BATCH.update(metadata(BATCH.ids, rows))) == [4.0, 4.0, 9.0]
    with pytest.raises(CallError, match=r"sample '0/0' .* raised KeyError: 'scale'"):
        score(interface)


@pytest.mark.parametrize("in_process", [False, True])
def test_responses_are_scored_together_if_the_function_wants_them_all(make: Make, in_process: bool) -> None:
    assert score(make(f"{FUNCTIONS}:rank", in_process=in_process)) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", r"\(all responses\): .* returned 1 values for 2 responses"),
        ("no_list", r"\(all responses\): .* returned 0\.5, which is not a list of 2 numbers"),
        ("a_string_among_them", r"returned a list with 'good', which is not a number"),
    ],
)
def test_a_group_that_is_scored_wrongly(make: Make, function: str, message: str) -> None:
    with pytest.raises(CallError, match=rf"sample '0/0' .*{message}") as error:
        score(make(f"{FUNCTIONS}:{function}", in_process=True))
    assert error.value.remedy == "Return a list with a number for each response."


# ---------------------------------------------------------------- async


@pytest.mark.parametrize("in_process", [False, True])
def test_async_functions_wait_together(make: Make, in_process: bool) -> None:
    interface = make(f"{FUNCTIONS}:wait", in_process=in_process, concurrency=1, async_concurrency=8)
    score(interface, responses(0))
    start_s = time.monotonic()
    assert score(interface, responses(*range(16))) == [float(n) for n in range(16)]
    assert 0.4 <= time.monotonic() - start_s < 3.0  # twice 0.2 s, and on a busy machine less than sixteen times


ASYNC_FAILURES = [
    (1, "raised ValueError: no answer found"),
    (2, "returned None, which is not a number"),
    (3, r"did not answer within 0\.5 s"),
    (4, r"did not answer within 0\.5 s"),
    (5, "died of signal 11"),
    (6, r"did not answer within 0\.5 s"),
]


def test_an_async_function_that_fails_harms_no_other_response(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    interface = make(f"{FUNCTIONS}:misbehave_async", timeout_s=0.5, on_failure="zero", concurrency=2)
    batch = responses(0, *(first for first, _ in ASYNC_FAILURES), 0, 0)
    assert score(interface, batch) == [0.5, *[0.0] * 6, 0.5, 0.5]
    messages = {record.getMessage() for record in caplog.records}
    assert len(messages) == 6
    for n, (_, message) in enumerate(ASYNC_FAILURES, start=1):
        assert any(re.search(rf"sample '0/{n}' .*{message}", found) for found in messages), message


def test_an_async_timeout_in_process_is_cancelled(make: Make) -> None:
    with pytest.raises(CallError, match=r"sample '0/1' .* did not answer within 0\.2 s"):
        score(make(f"{FUNCTIONS}:misbehave_async", in_process=True, timeout_s=0.2), responses(0, 3))


def test_long_requests_do_not_fill_the_pipes(make: Make) -> None:
    """Both sides write more than pipes hold, at once."""
    batch = token_batch([[([1] * 5_000, [0, 7] * 5_000)] for _ in range(40)])
    interface = make(f"{FUNCTIONS}:long_complaint", concurrency=2, async_concurrency=32, on_failure="zero")
    assert score(interface, batch) == [0.0] * 40


def test_a_file_works_as_well(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(prompt_ids, response_ids): return len(response_ids)\n")
    assert score(make(f"{file}:score")) == [2.0, 1.0, 3.0]


def test_rewards_keep_their_order_over_processes(make: Make) -> None:
    batch = token_batch([[([1], [i % 7, i % 5])] for i in range(200)])
    rewards = score(make(f"{FUNCTIONS}:sum_ids", concurrency=3), batch)
    assert rewards == [100.0 + i % 7 + i % 5 for i in range(200)]


def test_no_more_processes_than_allowed(make: Make) -> None:
    pids = score(make(f"{FUNCTIONS}:of_process", concurrency=2), responses(*[0] * 6))
    assert len(set(pids)) == 2


FAILURES = [
    (1, "raised ValueError: no answer found"),
    (2, "returned None, which is not a number"),
    (3, "returned nan"),
    (9, r"returned '0\.5', which is not a number"),
    (10, r"returned \[0\.5\], which is not a number"),
    (4, r"did not answer within 0\.5 s"),
    (5, r"did not answer within 0\.5 s"),
    (6, "raised SystemExit: 3"),
    (7, "died of signal 11"),
    (11, "returned inf"),
    (12, r"returned -1e\+300, which is more than float32 can hold"),
    (13, r"raised Unprintable: \(its text cannot be shown\)"),
    (8, r"did not answer within 0\.5 s"),
]


def kinds_of_end(*default: int) -> list[Any]:
    """`FAILURES`: those whose first token is in `default` by default, the rest in the heavier sweep."""
    return [pytest.param(*failure, marks=[] if failure[0] in default else pytest.mark.slow) for failure in FAILURES]


# An exception, a time-out, a death: `test_failures_can_score_zero` has the messages of all.
@pytest.mark.parametrize(("first", "message"), kinds_of_end(1, 2, 4, 7))
def test_a_failure_names_the_sample_and_the_remedy(make: Make, first: int, message: str) -> None:
    interface = make(f"{FUNCTIONS}:misbehave", timeout_s=0.5)
    start_s = time.monotonic()
    with pytest.raises(
        CallError, match=rf"rew_inf of role 'reward' at step 4, sample '0/1' \(response 0\): .*misbehave' {message}"
    ) as error:
        score(interface, responses(0, first, 0))
    assert time.monotonic() - start_s < 10
    is_wrong_type = "is not a number" in message
    assert ("algorithm.reward_timeout_s" in str(error.value)) == ("did not answer" in message)
    assert ("algorithm.reward_on_failure=zero" in str(error.value)) == (not is_wrong_type)
    second = "Return a number. To log a second number, make it a reward of its own with weight 0: "
    assert (second in str(error.value)) == is_wrong_type
    assert error.value.sample_ids == ("0/1",)
    assert score(interface, responses(0)) == [0.5]


def test_failures_can_score_zero(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    interface = make(f"{FUNCTIONS}:misbehave", timeout_s=0.5, concurrency=4, on_failure="zero")
    assert score(interface, responses(0, *(first for first, _ in FAILURES), 0)) == [0.5, *[0.0] * len(FAILURES), 0.5]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(FAILURES)
    for n, (_, message) in enumerate(FAILURES, start=1):
        told = rf"rew_inf at step 4 scores sample '0/{n}' \(response 0\) 0: the reward function .*misbehave' {message}"
        assert any(re.search(told, found) for found in messages), message


@pytest.mark.parametrize(("first", "message"), [failure for failure in FAILURES if failure[0] in (1, 6, 11, 12, 13)])
def test_in_process_failures_are_named_too(make: Make, first: int, message: str) -> None:
    with pytest.raises(CallError, match=rf"sample '0/1' .* {message}"):
        score(make(f"{FUNCTIONS}:misbehave", in_process=True), responses(0, first))


def test_a_slow_function_in_process_is_reported(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        score(make(f"{FUNCTIONS}:of_process", in_process=True, timeout_s=0.01), responses(0))
    assert "has been busy with response 0 for 0.01 s; launcher=inline cannot interrupt it" in caplog.text


def test_a_function_that_cannot_be_loaded_is_named(make: Make) -> None:
    with pytest.raises(
        RunError, match=r"'tests.rewards.reward_functions:nothing' cannot be loaded: .*has no 'nothing'"
    ):
        score(make(f"{FUNCTIONS}:nothing"))
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        score(make(f"{FUNCTIONS}:nothing", in_process=True))


def test_a_file_that_fails_is_told_with_its_line(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "lacking.py"
    file.write_text("import not_there\n\n\ndef score(prompt, response):\n    return 1.0\n")
    with pytest.raises(RunError, match="cannot be loaded: ModuleNotFoundError: No module named 'not_there'") as error:
        score(make(f"{file}:score"))
    assert error.value.remedy == f"{file}:1: import not_there"


class Scored(Section):
    reward_function: str = "missing.py:score"
    other: str = ""
    parts: dict[str, str] = Field(default_factory=lambda: {"a": "missing.py:score", "b": "there.py:score"})


def test_a_file_that_is_missing_is_told_with_its_folder_and_the_keys_that_name_it(make: Make) -> None:
    found = [*_keys_of(Scored(), "missing.py:score")]
    assert found == ["algorithm.reward_function", "algorithm.parts.a"]
    with pytest.raises(RunError) as error:
        score(make("missing.py:score"), algorithm=Scored(parts={}))
    where = f"there is no file 'missing.py' in {os.getcwd()}"
    assert error.value.message == f"the reward function 'missing.py:score' cannot be loaded: {where}"
    assert error.value.remedy == "Set algorithm.reward_function to 'file.py:function' or 'module:function'."


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("function", "wanted"), [("only_one", "(prompt, response)"), ("four", "and perhaps row and messages")]
)
def test_a_function_of_other_arguments_is_refused(make: Make, in_process: bool, function: str, wanted: str) -> None:
    with pytest.raises(RunError, match="cannot be loaded: TypeError: ") as error:
        score(make(f"{FUNCTIONS}:{function}", in_process=in_process))
    assert wanted in str(error.value)


def test_a_killed_server_is_replaced_without_losing_the_step(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    before = {p.pid for p in children()}
    interface = make(f"{FUNCTIONS}:sum_ids")
    score(interface)
    for process in children():
        if process.pid not in before:
            process.kill()
    assert score(interface) == [309.0, 300.0, 303.0]
    assert "the process that runs the reward functions ended (status -9); another takes its place" in caplog.text


def test_a_server_that_hangs_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_pool, "GRACE_S", 1.0)
    before = {p.pid for p in children()}
    interface = make(f"{FUNCTIONS}:sum_ids", timeout_s=0.5)
    score(interface)
    for process in children():
        if process.pid not in before:
            process.suspend()
    assert score(interface) == [309.0, 300.0, 303.0]
    assert score(interface, token_batch([[([1] * 50_000, [2])]] * 3)) == [5_000_002.0] * 3


def test_a_server_that_dies_in_the_middle_is_asked_again(make: Make, tmp_path: Path) -> None:
    """The function kills its server once, half-way through."""
    (tmp_path / "rewards.py").write_text(
        "import os, pathlib, signal, time\n"
        "def score(prompt_ids, response_ids):\n"
        f"    mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "    if response_ids[0] == 5 and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getppid(), signal.SIGKILL)\n"
        "        time.sleep(60)\n"
        "    return response_ids[0]\n"
    )
    assert score(make(f"{tmp_path}/rewards.py:score"), responses(*range(8))) == [float(n) for n in range(8)]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_worker_that_is_killed_loses_no_response(make: Make, tmp_path: Path, kind: str) -> None:
    """The function kills its process once, half-way through: as the system does that is out of memory."""
    (tmp_path / "rewards.py").write_text(
        "import os, pathlib, signal\n"
        f"{kind} score(prompt_ids, response_ids):\n"
        f"    mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "    if response_ids[0] == 5 and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return response_ids[0]\n"
    )
    assert score(make(f"{tmp_path}/rewards.py:score"), responses(*range(8))) == [float(n) for n in range(8)]


def test_a_server_that_dies_while_it_starts_is_replaced(make: Make, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import os, pathlib, signal\n"
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(prompt_ids, response_ids):\n"
        "    return response_ids[0]\n"
    )
    assert score(make(f"{tmp_path}/rewards.py:score"), responses(3)) == [3.0]


def test_a_server_that_cannot_start_ends_the_run(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(RunError, match=r"the process that runs .* ended \(status 3\), 4 times in one call"):
        score(make(f"{tmp_path}/dying.py:score"))
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(reward_pool, "START_TIMEOUT_S", 0.5)
    with pytest.raises(RunError, match=r"the process that runs .* was silent for 0\.5 s \(status -9\)\n"):
        score(make(f"{tmp_path}/stuck.py:score"))


def test_a_server_that_always_dies_ends_the_run(make: Make, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import os, signal\ndef score(prompt_ids, response_ids):\n    os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    with pytest.raises(RunError, match=r"the process that runs the reward function '.*' ended .*, 4 times in one call"):
        score(make(f"{tmp_path}/rewards.py:score"), responses(0))


def test_nothing_outlives_a_killed_owner(tmp_path: Path) -> None:
    code = (
        "from tests.rewards.test_function_reward import *\n"
        f"score(FunctionReward('{FUNCTIONS}:misbehave', timeout_s=600.0), responses(5, 8))"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    family: list[psutil.Process] = []
    try:
        while len(family) < 4:  # server, two workers, the program that one of them started
            assert owner.poll() is None
            family = psutil.Process(owner.pid).children(recursive=True)
            time.sleep(0.05)
    finally:
        owner.kill()
        owner.wait()
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_an_empty_batch_needs_no_process(make: Make) -> None:
    before = len(children())
    assert score(make(f"{FUNCTIONS}:sum_ids"), BATCH.select(())) == []
    assert len(children()) == before


STOPPING = (
    "import os, pathlib, signal, threading, time\n"
    "{kind} score(prompt_ids, response_ids):\n"
    "    mark = pathlib.Path({mark!r})\n"
    "    if response_ids[0] == 5 and not mark.exists():\n"
    "        mark.touch()\n"
    "        os.kill({victim}, signal.SIGSTOP)\n"
    "    return response_ids[0]\n"
)


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("async def", "os.getpid()"),
        ("def", "os.getppid()"),
        pytest.param("def", "os.getpid()", marks=pytest.mark.slow),
        pytest.param("async def", "os.getppid()", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_process_is_replaced_like_a_killed_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, victim: str
) -> None:
    monkeypatch.setattr(reward_pool, "GRACE_S", 1.0)
    (tmp_path / "rewards.py").write_text(STOPPING.format(kind=kind, mark=str(tmp_path / "mark"), victim=victim))
    interface = make(f"{tmp_path}/rewards.py:score", timeout_s=2.0)
    assert score(interface, responses(*range(8))) == [float(n) for n in range(8)]


def test_a_function_that_always_freezes_its_process_fails(make: Make, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import os, signal\ndef score(prompt_ids, response_ids):\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    with pytest.raises(CallError, match=r"did not answer within 0\.5 s"):
        score(make(f"{tmp_path}/rewards.py:score", timeout_s=0.5), responses(1))


def test_a_server_that_freezes_while_it_starts_is_replaced(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pool, "START_TIMEOUT_S", 5.0)
    (tmp_path / "rewards.py").write_text(
        "import os, pathlib, signal\n"
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "def score(prompt_ids, response_ids):\n"
        "    return response_ids[0]\n"
    )
    assert score(make(f"{tmp_path}/rewards.py:score"), responses(3)) == [3.0]


@pytest.mark.parametrize("kind", ["def", pytest.param("async def", marks=pytest.mark.slow)])
def test_a_pause_of_all_processes_costs_no_time(make: Make, tmp_path: Path, kind: str) -> None:
    """A process beside them stops owner, server and workers for longer than the time limit, and continues them."""
    wait = "await asyncio.sleep(1.0)" if kind == "async def" else "time.sleep(1.0)"
    (tmp_path / "rewards.py").write_text(
        "import asyncio, os, pathlib, time\n"
        f"{kind} score(prompt_ids, response_ids):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'busy').touch()\n"
        f"    {wait}\n"
        f"    with open({str(tmp_path / 'calls')!r}, 'a') as file:\n"
        "        file.write('x')\n"
        "    return response_ids[0]\n"
    )
    code = (
        "from tests.rewards.test_function_reward import *\n"
        f"reward = FunctionReward('{tmp_path}/rewards.py:score', timeout_s=3.0)\n"
        "assert score(reward, responses(3, 4)) == [3.0, 4.0]\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not (tmp_path / "busy").exists():
            assert owner.poll() is None
            time.sleep(0.01)
        above = psutil.Process(owner.pid)
        family = [above, *above.children(recursive=True)]
        for process in family:
            process.suspend()
        time.sleep(5.0)
        for process in family:
            process.resume()
        assert owner.wait(60) == 0
    finally:
        owner.kill()
    assert (tmp_path / "calls").read_text() == "xx"  # nobody was asked again


EXITS = [
    ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    ("raise SystemExit(3)", "raised SystemExit: 3"),
    ("os._exit(3)", "left its process with status 3"),
    ("raise asyncio.CancelledError", ""),
]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_exits_of_a_function_are_failures_of_it(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    cases = "".join(f"        case {n}:\n            {statement}\n" for n, (statement, _) in enumerate(EXITS, start=1))
    code = f"import asyncio, os\n{kind} score(prompt_ids, response_ids):\n    match response_ids[0]:\n{cases}"
    (tmp_path / "rewards.py").write_text(f"{code}    return 0.5\n")
    interface = make(f"{tmp_path}/rewards.py:score", on_failure="zero")
    assert score(interface, responses(0, 1, 2, 3, 4, 0)) == [0.5, 0.0, 0.0, 0.0, 0.0, 0.5]
    messages = [record.getMessage() for record in caplog.records]
    for n, (_, told) in enumerate(EXITS, start=1):
        assert any(f"sample '0/{n}' " in found and told in found for found in messages), told


@pytest.mark.parametrize("in_process", [False, True])
def test_functions_get_the_conversation_in_its_order(make: Make, in_process: bool) -> None:
    """Given [1], generated [2, 3], put in between [4], generated [5]; the second row's prompt was made of messages."""
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"roles": ["user", "assistant", "tool", "assistant"], "last": "f"},
            {"prompt": asked, "roles": ["system", "user", "assistant"], "last": "cd"}]  # fmt: skip
    batch = token_batch([[([1], [2, 3, 4, 5])], [([1], [2, 3])]])
    mask = torch.tensor([True, False, False, True, False, True, False, False])
    batch = batch.update(batch.derive("input_ids", {"prompt_mask": (batch.schemas["prompt_mask"], mask)}))
    batch = batch.update(metadata(batch.ids, rows))
    assert score(make(f"{FUNCTIONS}:told", in_process=in_process), batch) == [1.0, 1.0]
    lengths = score(make(f"{FUNCTIONS}:text_length", in_process=in_process), batch)
    assert lengths == pytest.approx([1.3, 1.2])  # "b", then what was generated: "cdf", "cd"


@pytest.mark.parametrize("in_process", [False, True])
def test_group_functions_get_all_conversations(make: Make, in_process: bool) -> None:
    assert score(make(f"{FUNCTIONS}:of_conversations", in_process=in_process)) == [1.0, 1.0, 1.0]


def test_an_option_called_row_stays_an_option() -> None:
    function = RewardFunction(f"{FUNCTIONS}:with_option", options={"row": 2.5})
    assert not function.traits.takes_row
    assert function.evaluate({"prompt": "p", "response": "r"}) == {"rewards": [2.5]}
