"""``realrl simulate``: the time of a step, predicted, or compared with a run."""

from realrl.cli.simulate.command import Recording, add_options, read_recording, simulate_run

__all__ = ["Recording", "add_options", "read_recording", "simulate_run"]
