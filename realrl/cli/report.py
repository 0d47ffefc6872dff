"""``realrl report`` and ``realrl watch``: a page about runs, as a file, and live."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from realrl.cli.arguments import Parser, make_parser, parse
from realrl.errors import ConfigError, UsageError
from realrl.files import write_output

if TYPE_CHECKING:
    from realrl.report.run_files import RunFolder

REPORT_EXAMPLES = """\
examples:
  realrl report runs/a                                   writes runs/a/report.html
  realrl report runs/a runs/b runs/c                     curves over each other: report.html
  realrl report runs/ppo --out ppo.html                  all runs in a folder; seeds are averaged

The page loads nothing: it can be sent as it is. Samples and settings are in it.
"""
WATCH_EXAMPLES = """\
examples:
  realrl watch runs/a                                    the page of a run that goes on; Ctrl-C ends it
  realrl watch runs/ppo --port 8000                      all runs in a folder, those that begin later too

For a machine elsewhere: ssh -L 8000:127.0.0.1:8000 HOST, and open the address that is printed there.
"""
PAGE = "report.html"


def report(arguments: Sequence[str]) -> int:
    """``realrl report``: write the page."""
    parser = _runs_parser("report", "Write a page about runs: curves, samples, times, settings.", REPORT_EXAMPLES)
    parser.add_argument("--out", metavar="FILE", help=f"the page; default: {PAGE}, in the run folder of a single run")
    options = _options(parser, arguments)
    if options.help:
        parser.print_help()
        return 0
    from realrl.report.run_files import find_runs, read_run

    folders = find_runs(options.arguments)
    out = Path(options.out) if options.out is not None else Path(PAGE)
    if options.out is None and len(folders) == 1:
        out = folders[0] / PAGE
    runs = [read_run(folder) for folder in folders]
    n_bytes = write_page(runs, out)
    for run in runs:
        for note in run.notes:
            print(f"{run.path}: {note}")
    print(f"wrote {out} ({n_bytes / 1e3:,.0f} kB); open it in a browser")
    return 0


def write_page(runs: Sequence[RunFolder], out: Path) -> int:
    """Write the page about runs, and return its size in bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    from realrl.report.page import render_report

    content = render_report(runs).encode()
    try:
        write_output(out, content)
    except OSError as error:
        remedy = "Choose another file with --out."
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}", remedy=remedy) from error
    return len(content)


def watch(arguments: Sequence[str]) -> int:
    """``realrl watch``: serve the page on loopback until Ctrl-C."""
    parser = _runs_parser("watch", "Show a page about runs while they go on, on this machine only.", WATCH_EXAMPLES)
    parser.add_argument("--port", metavar="N", type=int, default=0, help="port on 127.0.0.1; default: a free one")
    options = _options(parser, arguments)
    if options.help:
        parser.print_help()
        return 0
    if not 0 <= options.port < 2**16:
        raise UsageError(f"--port {options.port} is no port", remedy="Give 1 to 65535, or leave it out.")
    from realrl.report.live import open_server
    from realrl.report.run_files import find_runs

    find_runs(options.arguments)
    server, address = open_server(options.arguments, options.port)

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        print(f"{address}\nopen it in a browser on this machine; Ctrl-C ends it", flush=True)
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print()
    finally:
        signal.signal(signal.SIGINT, before)
        server.server_close()
    return 0


def _runs_parser(command: str, description: str, examples: str) -> Parser:
    parser = make_parser(command, description, examples)
    parser.usage = f"realrl {command} RUN [RUN ...] [options]"
    return parser


def _options(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    options = parse(parser, arguments)
    if not options.arguments and not options.help:
        raise UsageError(f"{parser.prog} needs a run folder", remedy="Give the run_dir of a run, such as runs/a.")
    return options
