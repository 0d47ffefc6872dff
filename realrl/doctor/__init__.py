"""Checks of a run before it starts.

`preflight` makes those that `realrl run`, its ``--dry-run`` and `realrl doctor` share; `report` adds the memory of all
devices, and two checks that refuse no run.

Modules here import torch where a check needs it: a run of built-in models starts without.
"""
