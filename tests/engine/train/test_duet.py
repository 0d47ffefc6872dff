"""Two calls take turns: one order of what they do, whose failure ends both, and each keeps its thread's state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from realrl.engine.train.duet import Duet, PipelineJob
from realrl.engine.train.pipeline import Chunk
from realrl.plan.pipeline import Step, forward_step

Submit = Callable[[PipelineJob], None]
STEP = forward_step(0, 0)


class Stage:
    """Two calls with some pipelines each, which write down what they do."""

    def __init__(self, n_first: int, n_second: int, *, fails_in: str = "") -> None:
        self.log: list[str] = []
        self._n = {"A": n_first, "B": n_second}
        self._fails_in = fails_in
        self.duet = Duet(self._together, self._alone)

    def run(self) -> tuple[str, str]:
        duet = self.duet
        result: tuple[str, str] = duet.run(
            lambda: self._call("A", duet.submit_first), lambda: self._call("B", duet.submit_second)
        )
        return result

    def _call(self, name: str, submit: Submit) -> str:
        for i in range(self._n[name]):
            self._note(f"{name}{i} ready")
            submit(PipelineJob({0: Chunk(self._forward(f"{name}{i}"), self._received)}, i))
            self._note(f"{name}{i} steps")
        self._note(f"{name} ends")
        return f"result of {name}"

    def _forward(self, name: str) -> Callable[[Step, torch.Tensor | None], torch.Tensor | None]:
        def forward(step: Step, x: torch.Tensor | None) -> torch.Tensor | None:
            self._note(f"{name} computes")
            return None

        return forward

    def _received(self, step: Step) -> tuple[tuple[int, ...], torch.dtype]:
        raise AssertionError

    def _together(self, first: PipelineJob, second: PipelineJob) -> None:
        for job in (second, first, second):
            job.chunks[0].forward(STEP, None)

    def _alone(self, number: int, job: PipelineJob) -> None:
        self._note(f"{'AB'[number]} alone")
        job.chunks[0].forward(STEP, None)

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what == self._fails_in:
            raise KeyError(what)


def test_calls_take_turns_and_the_longer_one_ends_alone() -> None:
    stage = Stage(2, 1)
    assert stage.run() == ("result of A", "result of B")
    assert stage.log == [
        *("A0 ready", "B0 ready", "B0 computes", "A0 computes", "B0 computes", "A0 steps", "A1 ready"),
        *("B0 steps", "B ends", "A alone", "A1 computes", "A1 steps", "A ends"),
    ]
    stage = Stage(1, 2)
    stage.run()
    assert stage.log == [
        *("A0 ready", "B0 ready", "B0 computes", "A0 computes", "B0 computes", "A0 steps", "A ends"),
        *("B0 steps", "B1 ready", "B alone", "B1 computes", "B1 steps", "B ends"),
    ]


@pytest.mark.parametrize(("n_first", "n_second"), [(0, 0), (0, 2), (2, 0)])
def test_a_call_may_have_no_pipeline(n_first: int, n_second: int) -> None:
    stage = Stage(n_first, n_second)
    assert stage.run() == ("result of A", "result of B")
    assert [line for line in stage.log if "alone" in line] == ["A alone"] * n_first + ["B alone"] * n_second


FAILURES = [f"{name}{what}" for name in "AB" for what in ("0 ready", "0 computes", "0 steps", "1 computes", " ends")]


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("n_second", [1, 2, 3])
def test_a_failure_ends_both_calls_and_leaves_no_thread(where: str, n_second: int) -> None:
    if where == "B1 computes" and n_second == 1:
        return
    n_before = threading.active_count()
    stage = Stage(2, n_second, fails_in=where)
    with pytest.raises(KeyError) as caught:
        stage.run()
    assert caught.value.args == (where,)
    assert stage.log[-1] == where  # nothing went on after it
    assert threading.active_count() == n_before


def test_an_interface_that_goes_on_after_its_failure_cannot_hold_up_the_other() -> None:
    stage = Stage(1, 1, fails_in="B0 computes")
    call = stage._call

    def forgiving(name: str, submit: Submit) -> str:
        try:
            return call(name, submit)
        except KeyError:
            return "none the wiser"

    stage._call = forgiving  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="B0 computes"):
        stage.run()


@contextmanager
def modes() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


def test_each_call_computes_with_the_modes_of_its_own_code() -> None:
    seen: dict[str, list[tuple[bool, bool, int]]] = {"A": [], "B": []}
    stage = Stage(1, 1)
    forward_of = stage._forward

    def noting(name: str) -> Callable[[Step, torch.Tensor | None], torch.Tensor | None]:
        def forward(step: Step, x: torch.Tensor | None) -> torch.Tensor | None:
            here = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()
            seen[name[0]].append(here)
            return forward_of(name)(step, x)

        return forward

    stage._forward = noting  # type: ignore[method-assign]
    call = stage._call

    def b_has_modes(name: str, submit: Submit) -> str:
        if name == "A":
            return call(name, submit)
        with modes():
            return call(name, submit)

    stage._call = b_has_modes  # type: ignore[method-assign]
    stage.run()
    n = torch.get_num_threads()
    assert seen == {"A": [(True, False, n)], "B": [(False, True, n)] * 2}
