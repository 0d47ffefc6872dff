"""``realrl run NAME key=a,b --sweep``: a run for every combination of values, and what became of them."""

from realrl.cli.sweep.command import add_options, sweep

__all__ = ["add_options", "sweep"]
