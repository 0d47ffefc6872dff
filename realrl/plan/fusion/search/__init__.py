"""Searches for fused schedules: list scheduling by rules, annealing, shifted starts, and rounds of all of these."""
