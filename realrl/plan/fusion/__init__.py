"""Fused pipeline schedules: several models train on the same devices at once, and fill each other's bubbles."""
