"""Another user of the machine who attacks a run: every function tells how far it came.

The process that attacks imports everything while it is still root, then gives up its rights for good.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - for addresses; imported late otherwise
import os
import select
import socket
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

STRANGER = 65534  # nobody, on most systems
_PATIENCE_S = 0.3
_CHUNK = bytes(1 << 20)
_TCP_STORE = (
    bytes([0]) + struct.pack("<I", 0x3C85F7CE),  # validate, with TCPStore's number
    bytes([13]) + struct.pack("<I", 4242),  # ping
    bytes([1]) + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 1) + b"v",  # set
    bytes([3]) + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 1),  # add
)


def attack(targets: dict[str, Any]) -> dict[str, Any]:
    """Try every door once: `ports` on loopback, socket `files` and `pids` of the run."""
    return {
        "uid": os.getuid(),
        "answers": [port for port in targets["ports"] if _answers(port)],
        "swallowed": {str(port): _fill(port) for port in targets["ports"]},
        "zmq": [port for port in targets["ports"] if _speaks_zmq(f"tcp://127.0.0.1:{port}")],
        "files": [name for name in targets["files"] if _connects(name) or _speaks_zmq(f"ipc://{name}")],
        "listed": [name for name in targets["files"] if _may(os.listdir, str(Path(name).parent))],
        "environments": [pid for pid in targets["pids"] if _may(Path(f"/proc/{pid}/environ").read_bytes)],
        "memories": [pid for pid in targets["pids"] if _may(open, f"/proc/{pid}/mem", "rb")],
        "stdins": [pid for pid in targets["pids"] if _may(os.listdir, f"/proc/{pid}/fd")],
        "text": "".join(_text_of(pid) for pid in targets["pids"]),
    }


def _may(act: Any, *arguments: Any) -> bool:
    try:
        act(*arguments)
    except (PermissionError, ProcessLookupError, FileNotFoundError):
        return False
    return True


def _answers(port: int) -> bool:
    """True if anything comes back from a port to TCPStore's protocol, junk, or the number of a pair of gloo."""
    for data in (*_TCP_STORE, b"".join(_TCP_STORE), os.urandom(512), b"GET / HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), 5.0) as door:
            door.sendall(data)
            if select.select([door], [], [], _PATIENCE_S)[0] and _received(door):
                return True
    return False


def _received(door: socket.socket) -> bytes:
    try:
        return door.recv(1)
    except ConnectionResetError:
        return b""


def _fill(port: int) -> int:
    """Bytes that a port takes from 20 connections, which stay open meanwhile."""
    doors = [socket.create_connection(("127.0.0.1", port), 5.0) for _ in range(20)]
    n_bytes = 0
    for door in doors:
        door.setblocking(False)
        try:
            for _ in range(64):
                n_bytes += door.send(_CHUNK)
        except OSError:  # full, or closed by the other side
            continue
    for number, door in enumerate(doors):
        door.setblocking(True)
        door.close() if number % 2 else door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for door in doors:
        door.close()
    return n_bytes


def _speaks_zmq(address: str) -> bool:
    """True if a server answers, or shakes hands with, a client without keys."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as door:
        door.linger = 0
        events = door.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        door.connect(address)
        door.send(b"junk")
        came = bool(door.poll(round(_PATIENCE_S * 1000)) or events.poll(0))
        door.disable_monitor()
        events.close(linger=0)
    return came


def _connects(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as door:
        return _may(door.connect, name)


def _text_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def as_stranger(pipe: Connection, targets: dict[str, Any]) -> None:
    """Attack as the user `STRANGER` until the run is over; send the findings of the first attack."""
    rehearsed = {"ports": [], "files": ["/nowhere/x"], "pids": [os.getpid()]}
    attack(rehearsed)  # imports the rest
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    pipe.send(attack(targets))
    try:
        while True:
            attack(targets)
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):  # the run is over
        return
