"""The kinds of inputs as parameters, and a table of what was tried at the end."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        kinds = metafunc.module.KINDS
        metafunc.parametrize("kind", kinds.values(), ids=kinds)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, ())]
    rows = {}
    for report in reports:
        numbers = dict(getattr(report, "user_properties", ()))
        if report.when == "call" and "inputs" in numbers:
            rows[report.nodeid.split("[")[-1].rstrip("]")] = (report.outcome, numbers)
    if not rows:
        return
    terminalreporter.section("spoilt inputs")
    for kind, (outcome, numbers) in rows.items():
        most = f"at most {numbers['longest']:.1f} s of a processor, {numbers['largest'] / 2**20:,.0f} MiB"
        terminalreporter.write_line(f"{numbers['inputs']:6,} {kind:22} {outcome:8} {most}")
    terminalreporter.write_line(f"{sum(numbers['inputs'] for _, numbers in rows.values()):6,} in all")
