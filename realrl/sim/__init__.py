"""Prediction of runs: the real scheduler on a clock of its own."""
