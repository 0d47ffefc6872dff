"""Hypothesis settings for the whole suite: few examples by default, many with --hypothesis-profile=thorough."""

from hypothesis import HealthCheck, settings

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("default-run", max_examples=40, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("default-run")
