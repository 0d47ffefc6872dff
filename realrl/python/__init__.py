"""Runs from Python: scripts and notebooks start them, wait for them and read what they wrote."""
