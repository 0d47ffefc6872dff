"""Settings of the whole suite: few hypothesis examples (many with --hypothesis-profile=thorough), and signals."""

import signal

from hypothesis import HealthCheck, settings

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("default-run", max_examples=25, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("default-run")


def pytest_sessionstart() -> None:
    """A shell's background jobs ignore SIGINT, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
