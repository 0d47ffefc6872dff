"""Questions about a plan: ``--explain``, ``--why``, ``--compare`` and ``--page`` of ``realrl plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.cli.console import print_table
from realrl.errors import AllocationError, UsageError, did_you_mean
from realrl.files import why_no_output, write_output

if TYPE_CHECKING:
    import argparse

    from realrl.planner.evaluate import Evaluated
    from realrl.planner.page.render import PageContent
    from realrl.planner.planner import Planned
    from realrl.planner.request import Request
    from realrl.planner.words import Block

BEST = "best"
_PAGE, _PICTURE = ".html", ".svg"


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Add the options that ask about a plan."""
    add = parser.add_argument
    add("--explain", metavar="CALL", nargs="?", const="", help="why its calls, or one call, run where they do")
    add("--why", metavar="CALL=PLACE", action="append", default=[], help="why a call does not run there: d8t2@0-1")
    add("--compare", metavar=("A", "B"), nargs=2, help="two plans side by side: files, methods, or 'best'")
    add_page(parser)


def settle_explain(options: argparse.Namespace) -> None:
    """Give back an override that stands right behind ``--explain``, which takes it for a call."""
    if options.explain and "=" in options.explain:
        options.arguments.append(options.explain)
        options.explain = ""


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the option that writes a page."""
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="write a page with timeline, memory and graph: FILE.html; or the timeline alone: FILE.svg",
    )


def check_questions(
    request: Request, options: argparse.Namespace, *, read: Callable[[Request, str], Evaluated]
) -> dict[str, Evaluated]:
    """Refuse questions that have no answer before anything is searched; return the plans of files that are compared.

    Args:
        read: returns the plan of a file.

    Raises:
        UsageError: one names no call, no strategy, no plan, or no page.
    """
    from realrl.mesh.notation import parse_strategy
    from realrl.search.methods import METHODS

    names = [mfc.name for mfc in request.base.mfcs]
    for option, name in [("--explain", options.explain), *(("--why", one.partition("=")[0]) for one in options.why)]:
        if name and name not in names:
            raise UsageError(
                f"{option} {name}: there is no such call.{did_you_mean(name, names)}",
                remedy=f"Calls: {', '.join(names)}.",
            )
    for wanted in options.why:
        if "=" not in wanted:
            raise UsageError(f"--why {wanted}: a place is missing", remedy=f"Write --why {names[0]}=d8t2@0-1.")
        parse_strategy(wanted.partition("=")[2].partition("@")[0])
    known = [BEST, *METHODS]
    for name in options.compare or ():
        if name not in known and not _is_file(name):
            raise UsageError(
                f"--compare {name}: there is no such plan.{did_you_mean(name, known)}",
                remedy=f"Give a plan's file, or one of {', '.join(known)}.",
            )
    check_page(options.page)
    return {name: read(request, name) for name in options.compare or () if name not in known}


def check_page(path: str | None) -> None:
    """Refuse a file for a page before anything is computed.

    Raises:
        UsageError: it has another ending, or cannot be written.
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in (_PAGE, _PICTURE):
        raise UsageError(
            f"--page {path}: a page is HTML", remedy=f"Give a file that ends in {_PAGE}, or {_PICTURE} for a picture."
        )
    reason = why_no_output(Path(path))
    if not reason and not Path(path).absolute().parent.is_dir():
        reason = "its folder does not exist"
    if reason:
        raise UsageError(f"--page {path} cannot be written: {reason}", remedy="Choose another file.")


def write_page(path: str, content: PageContent) -> None:
    """Write a page, or the picture of its timeline.

    Raises:
        UsageError: the file cannot be written.
    """
    from realrl.planner.page.render import render_page, render_timeline

    text = render_timeline(content) if Path(path).suffix.lower() == _PICTURE else render_page(content)
    try:
        write_output(path, text.encode())
    except OSError as error:
        raise UsageError(f"--page {path} cannot be written: {error.strerror or error}") from error
    print(f"wrote {path}; open it in a browser")


def answer(
    planned: Planned,
    options: argparse.Namespace,
    *,
    search: Callable[[Request], Evaluated],
    files: Mapping[str, Evaluated],
) -> None:
    """Print what was asked about the best plan, and write its page.

    Args:
        search: returns the best plan of another request.
        files: plans of files, from `check_questions`.

    Raises:
        UsageError: a question names no place, or the page cannot be written.
    """
    from realrl.planner.compare import compare
    from realrl.planner.explain import explain, explain_call
    from realrl.planner.page.content import content_of
    from realrl.planner.why import why
    from realrl.planner.words import sentence

    request, best = planned.request, planned.best
    if options.explain is not None:
        show(explain_call(request, best, options.explain) if options.explain else explain(request, best))
    for wanted in options.why:
        show(why(request, best, wanted, search=search))
    if options.compare is not None:
        try:
            first, second = (files.get(name) or _plan_called(planned, name, options.seed) for name in options.compare)
            show(compare(first, second))
        except AllocationError as error:  # of a method that has no plan here
            show([sentence(f"There is nothing to compare: {error.message}")])
    if options.page is not None:
        write_page(options.page, content_of(planned))


def _plan_called(planned: Planned, name: str, seed: int) -> Evaluated:
    """Return the best plan, or that of a method.

    Raises:
        UsageError: it cannot run here.
    """
    from dataclasses import replace

    from realrl.planner.evaluate import evaluate
    from realrl.planner.study import Study

    if name == BEST:
        return replace(planned.best, name=BEST)
    found = planned.named(name)
    if found is not None:
        return replace(found, name=name)
    return evaluate(planned.request, Study(planned.request, seed).settings_by(name), name=name)


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") or Path(name).is_file()


def show(blocks: Iterable[Block]) -> None:
    """Print paragraphs and tables."""
    for block in blocks:
        if isinstance(block, str):
            print(block + "\n")
        else:
            print_table(block.columns, block.rows, title=block.title, folding=block.folding)
