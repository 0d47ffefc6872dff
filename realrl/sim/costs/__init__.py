"""Seconds of every part of a step, as pure functions of shapes, lengths and hardware."""
