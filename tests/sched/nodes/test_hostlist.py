"""Lists of hosts: what SLURM writes, and what is no such list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.sched.nodes.hostlist import MOST_HOSTS, expand_counts, expand_hosts

names = st.text("abcxyz-", min_size=1, max_size=4)


@st.composite
def terms(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A term of a list, and its hosts; the numbers of a range have as many digits as its first."""
    written, hosts = "", [""]
    for _ in range(draw(st.integers(1, 2))):
        prefix, ranges, numbers = draw(names), [], []
        for _ in range(draw(st.integers(0, 3))):
            width, first, n = draw(st.integers(1, 4)), draw(st.integers(0, 120)), draw(st.integers(1, 5))
            own = [f"{number:0{width}}" for number in range(first, first + n)]
            own = [number.zfill(len(own[0])) for number in own]
            ranges.append(own[0] if n == 1 else f"{own[0]}-{own[-1]}")
            numbers += own
        written += prefix + (f"[{','.join(ranges)}]" if ranges else "")
        hosts = [host + prefix + number for host in hosts for number in numbers or [""]]
    return written, hosts


@given(st.lists(terms(), min_size=1, max_size=4))
def test_hosts_are_those_that_were_written_in_short(made: list[tuple[str, list[str]]]) -> None:
    assert expand_hosts(",".join(text for text, _ in made)) == tuple(host for _, hosts in made for host in hosts)


@given(st.text("ab[]-,0129 ", max_size=12))
def test_any_text_is_a_list_or_an_error_that_names_it(text: str) -> None:
    told = ""
    try:
        hosts = expand_hosts(text)
    except ValueError as error:
        told = str(error)
    if told:
        assert repr(text) in told
    else:
        assert hosts
        assert all(host and not {"[", "]", ","} & set(host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[01-03,7],m1", ("n01", "n02", "n03", "n7", "m1")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("rack[1-2]n[08-09]-ib", ("rack1n08-ib", "rack1n09-ib", "rack2n08-ib", "rack2n09-ib")),
        ("localhost", ("localhost",)),
    ],
)
def test_lists_as_slurm_writes_them(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,", "n[1", "n]1[", "n[[1]]", "n[]", "n[2-1]", "n[a-b]", f"n[0-{MOST_HOSTS}]"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of hosts"):
        expand_hosts(text)


def test_counts() -> None:
    assert expand_counts("16(x2),8") == (16, 16, 8)
    for text in ("", "16(x2", "x", "1,", f"1(x{MOST_HOSTS + 1})"):
        with pytest.raises(ValueError, match="is no list of counts"):
            expand_counts(text)
