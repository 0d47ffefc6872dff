"""Two training calls that take turns on one rank, and run their pipelines together.

    first    ──► its pipeline is ready ─┐     ┌─► reduces, steps ──► next pipeline is ready ─┐
                                        │     │                                              │
    second       ─► its pipeline is ready ─► both pipelines in one list    ─► reduces, steps ─► ...

Exactly one of the two computes at any moment, and the hand-over depends on nothing but the order of what they do. So
the collectives of both have one order, the same on every rank. When one of them has no pipeline left, the other goes on
alone.

The first runs in the caller's thread, the second, all of its callbacks included, in a thread of its own: what torch and
others keep for each thread (grad mode, autocast, hooks) stays with its owner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from realrl.engine.train.pipeline import Chunk
from realrl.plan.pipeline import Step


@dataclass(frozen=True)
class PipelineJob:
    """A minibatch that is ready for its pipeline.

    Attributes:
        chunks: number of a chunk of this rank -> its callbacks.
        n_micro_batches: of this rank's pipeline.
    """

    chunks: Mapping[int, Chunk]
    n_micro_batches: int


class _Unwind(BaseException):
    """Leaves the code of one call because the other one failed; no `except Exception` holds it up."""


class Duet:
    """Two calls on their way.

    Args:
        together: runs the pipelines of both in one list.
        alone: runs the pipeline of one of them, which is told by its number.
    """

    def __init__(
        self, together: Callable[[PipelineJob, PipelineJob], None], alone: Callable[[int, PipelineJob], None]
    ) -> None:
        self._together, self._alone = together, alone
        self._first_turn, self._second_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._job: PipelineJob | None = None  # the second's, while it waits for the first
        self._asked: Callable[[], Any] | None = None  # what the second is to compute for the first's list
        self._answer: Any = None
        self._first_is_done = self._second_is_done = self._is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """Return the results of both calls, or raise what one of them raised.

        Each calls `submit_first` or `submit_second` for each of its pipelines.
        """
        self._thread = threading.Thread(
            target=self._second_main, args=(second, torch.get_num_threads()), name="fused-call", daemon=True
        )
        self._thread.start()
        try:
            result = first()
            self._first_is_done = True
            self._to_second()
        except _Unwind:
            assert self._error is not None
            raise self._error from self._error.__cause__
        finally:
            self._end_second()
        if self._error is not None:
            raise self._error from self._error.__cause__
        return result, self._result

    def submit_first(self, job: PipelineJob) -> None:
        """Run a pipeline of the first call, with the second one's next pipeline where it has one."""
        self._to_second()
        second, self._job = self._job, None
        if second is None:
            self._alone(0, job)
            return
        chunks = {number: self._by_second(chunk) for number, chunk in second.chunks.items()}
        self._together(job, replace(second, chunks=chunks))

    def submit_second(self, job: PipelineJob) -> None:
        """Run a pipeline of the second call, with the first one's next pipeline where it has one."""
        if self._first_is_done:
            self._alone(1, job)
            return
        self._job = job
        self._to_first()
        while self._asked is not None:  # the first runs both, and asks for this call's parts
            asked, self._asked = self._asked, None
            try:
                self._answer = asked()
            except BaseException as error:
                self._error = error  # so that the first ends, even if this call's interface goes on
                raise
            self._to_first()

    # ------------------------------------------------------------ turns

    def _by_second(self, chunk: Chunk) -> Chunk:
        """Return a chunk of the second call whose computations run in its thread."""

        def forward(step: Step, x: torch.Tensor | None) -> torch.Tensor | None:
            output: torch.Tensor | None = self._ask(lambda: chunk.forward(step, x))
            return output

        def backward(output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
            self._ask(lambda: chunk.backward(output, gradient, is_last))

        return Chunk(forward, chunk.received, backward)

    def _ask(self, compute: Callable[[], Any]) -> Any:
        self._asked = compute
        self._to_second()
        answer, self._answer = self._answer, None
        return answer

    def _to_second(self) -> None:
        """Let the second go on until it hands over, if it is not done; leaves the first's code if it failed."""
        if self._second_is_done:
            return
        self._second_turn.release()
        self._first_turn.acquire()
        if self._error is not None:
            raise _Unwind

    def _to_first(self) -> None:
        self._first_turn.release()
        self._second_turn.acquire()
        if self._is_cancelled:
            raise _Unwind

    def _second_main(self, second: Callable[[], Any], n_threads: int) -> None:
        self._second_turn.acquire()
        try:
            if not self._is_cancelled:
                torch.set_num_threads(n_threads)  # torch keeps a part of it for each thread
                self._result = second()
        except _Unwind:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        finally:
            self._second_is_done = True
            self._first_turn.release()

    def _end_second(self) -> None:
        """Unwind the second if it waits, and wait for its thread."""
        assert self._thread is not None
        self._is_cancelled = True
        self._second_turn.release()
        self._thread.join()
