"""A view of the calls that a worker runs, for programs that look at what each of them computed."""

from __future__ import annotations

from collections.abc import Mapping

from realrl.algo.api import CallContext, Engine, Model, ModelInterface
from realrl.data.sample import SequenceSample
from realrl.graph.mfc import MFCDef


class Observer:
    """Sees every call of one worker before and after its interface runs. This one looks at nothing."""

    def begin(
        self, mfc: MFCDef, ctx: CallContext, interface: ModelInterface, model: Model, batch: SequenceSample
    ) -> tuple[Model, SequenceSample]:
        """Return the model and the samples that the interface gets."""
        return model, batch

    def end(
        self, ctx: CallContext, model: Model, engine: Engine | None, outcome: SequenceSample | Mapping[str, float]
    ) -> None:
        """Look at what the call of the last `begin` gave.

        Args:
            ctx: context of the call.
            model: result of `begin`.
            engine: engine of a train_step, whose optimizer has stepped; None for other calls.
            outcome: output keys under the graph's names, or the metrics of a train_step.
        """


UNOBSERVED = Observer()
