"""Ports by which machines show who reaches whom."""

from __future__ import annotations

import socket

from realrl.runtime.nodes.doors import knock, open_door
from realrl.sched.nodes.messages import Door

HERE = "127.0.0.1"


def test_open_doors_are_found_and_closed_ones_told() -> None:
    port, opened = open_door(HERE)
    assert port is not None
    assert opened.door is not None
    other, _ = open_door(HERE)
    assert other is not None
    other.close()
    told = knock([opened.door, other.door])
    port.close()
    assert list(told.seconds) == [opened.door.place]
    assert told.problems == {other.door.place: "Connection refused"}
    assert knock([opened.door]).problems == {opened.door.place: "Connection refused"}


def test_another_program_and_a_silent_one_are_no_doors() -> None:
    with socket.create_server((HERE, 0)) as silent:
        place = f"{HERE}:{silent.getsockname()[1]}"
        assert knock([Door(place, "word")], patience_s=0.2).problems == {place: "no answer within 0.2 s"}
    port, opened = open_door(HERE)
    assert port is not None
    assert opened.door is not None
    told = knock([Door(opened.door.place, "another word")])
    port.close()
    assert told.problems == {opened.door.place: "another program answers there"}


def test_an_address_of_another_machine_cannot_be_opened() -> None:
    port, opened = open_door("192.0.2.1")
    assert port is None
    assert opened.door is None
    assert opened.problem == "cannot listen on 192.0.2.1: Cannot assign requested address"
