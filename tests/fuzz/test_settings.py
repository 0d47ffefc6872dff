"""Inputs, this half: command lines, YAML, allocations, experiment files, reward files."""

from __future__ import annotations

from tests.fuzz.settings import allocations, command_lines, experiments, reward_files, whole, yaml_files
from tests.fuzz.sweep import Kind, server, test_some, test_thousands

__all__ = ["server", "test_some", "test_thousands"]
WHOLE = whole
KINDS = {
    "command lines": Kind(command_lines(), 2500),
    "YAML files": Kind(yaml_files(), 1200),
    "allocations": Kind(allocations(), 800),
    "experiment files": Kind(experiments(), 800),
    "reward files": Kind(reward_files(), 700),
}
