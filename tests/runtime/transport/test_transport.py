"""Promises of both transports, and what only sockets have: strangers, ports, threads."""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import zmq

from realrl.errors import RunError, TransportError, UsageError
from realrl.runtime.nodes.addresses import addresses
from realrl.runtime.transport.base import FetchRows, SampleClient, SampleServer
from realrl.runtime.transport.codec import PullRows, decode_key_value_answer, encode
from realrl.runtime.transport.inproc import InprocKeyValues, InprocMaster, InprocSamples
from realrl.runtime.transport.sockets import ConnectionBrokenError, RunKeys, WorkerKeys, endpoint_beside
from realrl.runtime.transport.zmq import (
    ZmqKeyValueClient,
    ZmqKeyValueServer,
    ZmqMaster,
    ZmqSampleClient,
    ZmqSampleServer,
    ZmqWorker,
)
from realrl.runtime.worker.heartbeat import heartbeats
from realrl.sched.key_value import AddTo, CountKeys, KeyValueClient, SetKeys, WaitFor
from realrl.sched.messages import Goodbye, Heartbeat, Hello, Reply, Request, Shutdown

LIMIT_S = 30.0
NOTHING_S = 0.3  # how long a stranger is listened to


def rows(keys: Sequence[str], ids: Sequence[str]) -> bytes:
    if "missing" in keys:
        raise KeyError("no such key")
    return f"{'+'.join(keys)}:{','.join(ids)}".encode()


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.new()


@pytest.fixture
def master(keys: RunKeys) -> Iterator[ZmqMaster]:
    with contextlib.closing(ZmqMaster(keys)) as master:
        yield master


@pytest.fixture
def connect(keys: RunKeys, master: ZmqMaster) -> Iterator[Callable[..., ZmqWorker]]:
    with contextlib.ExitStack() as stack:

        def connector(rank: int, worker_keys: WorkerKeys | None = None) -> ZmqWorker:
            worker = ZmqWorker(master.address, rank, worker_keys or keys.for_workers)
            stack.callback(worker.close)
            worker.send(Hello(rank, 1, ""))
            return worker

        yield connector


class TestInproc:
    def test_requests_are_executed_in_order_inside_receive(self) -> None:
        master = InprocMaster()
        seen: list[tuple[int, int]] = []

        def handler(rank: int) -> Callable[[Request], list[Reply]]:
            def handle(request: Request) -> list[Reply]:
                seen.append((rank, request.seq))
                return [Goodbye(rank, request.seq)]

            return handle

        for rank in (0, 1):
            master.attach(rank, handler(rank))
        master.send(1, Shutdown(0))
        master.send(0, Shutdown(0))
        master.send(1, Shutdown(1))
        assert seen == []
        assert master.receive(0) == Goodbye(1, 0)
        assert seen == [(1, 0)]
        assert [master.receive(0), master.receive(0), master.receive(0)] == [Goodbye(0, 0), Goodbye(1, 1), None]

    def test_an_unknown_rank_is_named(self) -> None:
        with pytest.raises(TransportError, match="worker 3 is not connected"):
            InprocMaster().send(3, Shutdown(0))

    def test_messages_go_through_the_codec(self) -> None:
        master = InprocMaster()
        master.attach(0, lambda request: [Hello(0, object(), "")])  # type: ignore[arg-type]
        master.send(0, Shutdown(0))
        with pytest.raises(TransportError, match="cannot be encoded"):
            master.receive(0)


class TestSamples:
    @pytest.fixture(params=["inproc", "zmq"])
    def serve(
        self, request: pytest.FixtureRequest, keys: RunKeys
    ) -> Iterator[Callable[[FetchRows], tuple[SampleServer, SampleClient]]]:
        with contextlib.ExitStack() as stack:

            def pair(fetch: FetchRows) -> tuple[SampleServer, SampleClient]:
                samples = InprocSamples()
                is_inproc = request.param == "inproc"
                server = samples.serve(fetch) if is_inproc else ZmqSampleServer(fetch, keys.for_workers)
                client = samples.client() if is_inproc else ZmqSampleClient(keys.for_workers, timeout_s=LIMIT_S)
                stack.callback(server.close)
                stack.callback(client.close)
                return server, client

            yield pair

    def test_rows_arrive(self, serve: Callable[..., tuple[SampleServer, SampleClient]]) -> None:
        server, client = serve(rows)
        for ids in (["a"], ["b", "c"]):
            assert client.pull(server.address, ["rewards"], ids) == f"rewards:{','.join(ids)}".encode()
        assert client.pull(server.address, ["rewards", "values"], ["a"]) == b"rewards+values:a"

    def test_large_rows_arrive(self, serve: Callable[..., tuple[SampleServer, SampleClient]]) -> None:
        payload = bytes(range(256)) * 40_000
        server, client = serve(lambda keys, ids: payload)
        assert client.pull(server.address, ["values"], ["a"]) == payload

    def test_an_error_of_the_producer_travels_back(
        self, serve: Callable[..., tuple[SampleServer, SampleClient]]
    ) -> None:
        server, client = serve(rows)
        with pytest.raises(TransportError, match=r"'missing' of samples a, b from .*no such key") as caught:
            client.pull(server.address, ["missing"], ["a", "b"])
        assert server.address in str(caught.value)
        assert client.pull(server.address, ["rewards"], ["a"]) == b"rewards:a"  # and the server lives on

    def test_closing_twice_is_fine(self, serve: Callable[..., tuple[SampleServer, SampleClient]]) -> None:
        server, client = serve(rows)
        for _ in range(2):
            client.close()
            server.close()


def test_a_pull_waits_for_rows_and_holds_up_no_other(keys: RunKeys) -> None:
    """The rows are on their way to the relay; meanwhile it serves others, and later those who wait."""
    there, asked = {"a"}, threading.Semaphore(0)

    def fetch(keys: Sequence[str], ids: Sequence[str]) -> bytes:
        if not there.issuperset(ids):
            asked.release()
            raise RunError(f"no {ids}")
        return rows(keys, ids)

    with (
        contextlib.closing(ZmqSampleServer(fetch, keys.for_workers)) as server,
        contextlib.closing(ZmqSampleClient(keys.for_workers, timeout_s=LIMIT_S)) as patient,
        contextlib.closing(ZmqSampleClient(keys.for_workers, timeout_s=LIMIT_S)) as other,
    ):
        came: list[bytes] = []
        thread = threading.Thread(
            target=lambda: came.append(patient.pull(server.address, ["rewards"], ["b", "c"], waits=True))
        )
        thread.start()
        assert asked.acquire(timeout=LIMIT_S)
        assert other.pull(server.address, ["rewards"], ["a"]) == b"rewards:a"
        there.add("b")
        assert not came
        with pytest.raises(TransportError, match="RunError: no"):
            other.pull(server.address, ["rewards"], ["c"])  # only those who said so wait
        there.add("c")
        thread.join(LIMIT_S)
        assert came == [b"rewards:b,c"]


def test_a_pull_does_not_wait_for_ever(keys: RunKeys) -> None:
    def fetch(keys: Sequence[str], ids: Sequence[str]) -> bytes:
        raise RunError("not yet")

    with (
        contextlib.closing(ZmqSampleServer(fetch, keys.for_workers)) as server,
        contextlib.closing(ZmqSampleClient(keys.for_workers, timeout_s=0.01)) as client,
    ):
        with pytest.raises(TransportError, match=r"no answer within 0\.3 s"):
            client.pull(server.address, ["rewards"], ["a"], waits=True)
        client.close()


class TestKeyValues:
    @pytest.fixture(params=["inproc", "zmq"])
    def client(self, request: pytest.FixtureRequest, keys: RunKeys) -> Iterator[KeyValueClient]:
        if request.param == "inproc":
            yield InprocKeyValues()
            return
        with (
            contextlib.closing(ZmqKeyValueServer(keys)) as server,
            contextlib.closing(ZmqKeyValueClient(server.address, keys.for_workers, timeout_s=LIMIT_S)) as client,
        ):
            yield client

    def test_values_come_back(self, client: KeyValueClient) -> None:
        large = bytes(range(256)) * 4000
        client.ask(SetKeys(("k", "l"), (large, b"")))
        assert client.ask(WaitFor(("l", "k"), 1.0, with_values=True)).values == (b"", large)
        assert [client.ask(AddTo("n", 3)).number for _ in range(2)] == [3, 6]
        assert client.is_local

    def test_threads_wait_at_the_same_time_and_are_released_together(self, client: KeyValueClient) -> None:
        n_threads, arrived = 16, list[int]()

        def meet() -> None:
            if client.ask(AddTo("n", 1)).number == n_threads:
                client.ask(SetKeys(("all",), (b"",)))
            client.ask(WaitFor(("all",), LIMIT_S))
            arrived.append(client.ask(AddTo("n", 0)).number)

        threads = [threading.Thread(target=meet) for _ in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert arrived == [n_threads] * n_threads

    def test_a_wait_in_vain_ends(self, client: KeyValueClient) -> None:
        with pytest.raises(TransportError, match=r"no other worker has set 'k' within 0\.1 s"):
            client.ask(WaitFor(("k",), 0.1))
        client.ask(SetKeys(("k",), (b"1",)))  # and the late key disturbs nobody
        assert client.ask(CountKeys()).number == 1

    def test_a_refusal_is_told(self, client: KeyValueClient) -> None:
        with pytest.raises(TransportError, match="is longer than 4096 bytes"):
            client.ask(SetKeys(("k" * 5000,), (b"",)))
        assert client.ask(CountKeys()).number == 0


class TestKeyValuesOverSockets:
    def test_a_server_that_is_gone_is_named(self, keys: RunKeys) -> None:
        server = ZmqKeyValueServer(keys)
        with contextlib.closing(ZmqKeyValueClient(server.address, keys.for_workers, timeout_s=0.1)) as client:
            server.close()
            with pytest.raises(TransportError, match=rf"store at {server.address}: no answer within 0\.3 s"):
                client.ask(WaitFor(("k",), 0.2))

    def test_closing_ends_what_waits(self, keys: RunKeys) -> None:
        told: list[str] = []

        def wait() -> None:
            with pytest.raises(TransportError, match="is closed") as caught:
                client.ask(WaitFor(("k",), LIMIT_S))
            told.append(str(caught.value))

        with contextlib.closing(ZmqKeyValueServer(keys)) as server:
            client = ZmqKeyValueClient(server.address, keys.for_workers, timeout_s=LIMIT_S)
            client.ask(CountKeys())
            waiting = threading.Thread(target=wait)
            waiting.start()
            client.close()
            waiting.join(LIMIT_S)
        assert len(told) == 1

    def test_a_client_that_dies_while_it_waits_disturbs_nobody(self, keys: RunKeys) -> None:
        with (
            contextlib.closing(ZmqKeyValueServer(keys)) as server,
            contextlib.closing(ZmqKeyValueClient(server.address, keys.for_workers, timeout_s=LIMIT_S)) as client,
        ):
            limits = {"timeout_s": 0.05 - LIMIT_S}  # it leaves long before the server would answer
            with (
                contextlib.closing(ZmqKeyValueClient(server.address, keys.for_workers, **limits)) as impatient,
                pytest.raises(TransportError, match="no answer within"),
            ):
                impatient.ask(WaitFor(("k",), LIMIT_S))
            client.ask(SetKeys(("k",), (b"1",)))
            assert client.ask(CountKeys()).number == 1

    def test_garbage_of_a_member_is_refused(self, keys: RunKeys) -> None:
        with (
            contextlib.closing(ZmqKeyValueServer(keys)) as server,
            zmq.Context() as context,
            context.socket(zmq.DEALER) as member,
        ):
            member.linger = 0
            member.curve_serverkey = keys.for_workers.master_public
            member.curve_publickey = keys.for_workers.worker_public
            member.curve_secretkey = keys.for_workers.worker_secret
            member.connect(server.address)
            member.send(b"junk")
            assert member.poll(round(LIMIT_S * 1000))
            assert "not a realrl request" in decode_key_value_answer(member.recv()).refusal


class TestZmq:
    def test_round_trip(self, master: ZmqMaster, connect: Callable[..., ZmqWorker]) -> None:
        worker = connect(7)
        assert master.receive(LIMIT_S) == Hello(7, 1, "")
        master.send(7, Shutdown(3))
        assert worker.receive(LIMIT_S) == Shutdown(3)
        worker.send(Goodbye(7, 3))
        assert master.receive(LIMIT_S) == Goodbye(7, 3)

    def test_nothing_within_the_timeout(self, master: ZmqMaster, connect: Callable[..., ZmqWorker]) -> None:
        worker = connect(0)
        assert master.receive(LIMIT_S) == Hello(0, 1, "")
        assert master.receive(0) is None
        assert worker.receive(0.01) is None

    def test_each_worker_gets_its_own(self, master: ZmqMaster, connect: Callable[..., ZmqWorker]) -> None:
        workers = [connect(rank) for rank in range(3)]
        assert {master.receive(LIMIT_S).rank for _ in workers} == {0, 1, 2}
        for rank in range(3):
            master.send(rank, Shutdown(rank * 10))
        assert [worker.receive(LIMIT_S) for worker in workers] == [Shutdown(0), Shutdown(10), Shutdown(20)]

    def test_a_worker_that_never_came_is_named(self, master: ZmqMaster) -> None:
        with pytest.raises(TransportError, match="worker 5 is not connected") as caught:
            master.send(5, Shutdown(0))
        assert caught.value.worker == 5

    def test_it_listens_on_loopback_only(self, master: ZmqMaster) -> None:
        assert master.address.startswith("tcp://127.0.0.1:")

    def test_threads_may_send_while_the_main_thread_receives(
        self, master: ZmqMaster, connect: Callable[..., ZmqWorker]
    ) -> None:
        worker = connect(0)
        assert isinstance(master.receive(LIMIT_S), Hello)
        beat = Heartbeat(0, -1, "idle", 0.0)
        threads = contextlib.ExitStack()
        for _ in range(3):
            threads.enter_context(heartbeats(lambda: beat, worker.send, interval_s=0.001))
        seen = 0
        for seq in range(50):
            master.send(0, Shutdown(seq))
            assert worker.receive(LIMIT_S) == Shutdown(seq)
            worker.send(Goodbye(0, seq))
            while (reply := master.receive(LIMIT_S)) != Goodbye(0, seq):
                assert reply == beat
                seen += 1
        while seen < 3:
            assert master.receive(LIMIT_S) == beat
            seen += 1
        threads.close()

    def test_a_last_reply_arrives_although_the_worker_closes(
        self, master: ZmqMaster, connect: Callable[..., ZmqWorker]
    ) -> None:
        worker = connect(0)
        assert isinstance(master.receive(LIMIT_S), Hello)
        worker.send(Goodbye(0, 1))
        worker.close()
        assert master.receive(LIMIT_S) == Goodbye(0, 1)

    def test_close_does_not_wait_for_a_dead_peer(self, keys: RunKeys) -> None:
        master = ZmqMaster(keys)
        worker = ZmqWorker(master.address, 0, keys.for_workers)
        client = ZmqSampleClient(keys.for_workers, timeout_s=0.05)
        master.close()
        worker.send(Hello(0, 1, ""))
        with pytest.raises(TransportError, match=r"no answer within 0.05 s"):
            client.pull(master.address, ["rewards"], ["a"])
        start_s = time.monotonic()
        for part in (worker, client, master):
            part.close()
        assert time.monotonic() - start_s < LIMIT_S / 2

    def test_a_worker_cannot_speak_for_another(self, master: ZmqMaster, connect: Callable[..., ZmqWorker]) -> None:
        worker = connect(0)
        assert isinstance(master.receive(LIMIT_S), Hello)
        worker.send(Goodbye(1, 0))
        with pytest.raises(TransportError, match="a Goodbye of worker 1 came from connection b'0'"):
            master.receive(LIMIT_S)

    def test_a_taken_port_is_named(self, keys: RunKeys) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is taken"):
                ZmqMaster(keys, endpoint=f"tcp://127.0.0.1:{port}")

    @pytest.mark.parametrize("endpoint", ["tcp://192.0.2.1:*", "ipc:///no/such/folder/master"])
    def test_a_foreign_address_is_refused(self, keys: RunKeys, endpoint: str) -> None:
        with pytest.raises(UsageError, match=rf"cannot listen on {re.escape(endpoint)}: .*\n.*must be an address"):
            ZmqMaster(keys, endpoint=endpoint)

    def test_files_carry_everything_as_ports_do(self, keys: RunKeys) -> None:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # tmp_path is too long for a socket
            master = stack.enter_context(contextlib.closing(ZmqMaster(keys, endpoint=f"ipc://{folder}/master")))
            endpoint = endpoint_beside(master.address, "samples-0")
            server = stack.enter_context(contextlib.closing(ZmqSampleServer(rows, keys.for_workers, endpoint=endpoint)))
            worker = stack.enter_context(contextlib.closing(ZmqWorker(master.address, 0, keys.for_workers)))
            client = stack.enter_context(contextlib.closing(ZmqSampleClient(keys.for_workers, timeout_s=LIMIT_S)))
            worker.send(Hello(0, 1, server.address))
            assert master.receive(LIMIT_S) == Hello(0, 1, f"ipc://{folder}/samples-0")
            assert client.pull(server.address, ["rewards"], ["a"]) == b"rewards:a"
            assert sorted(path.name for path in folder.iterdir()) == ["master", "samples-0"]

    def test_an_endpoint_beside_a_port_is_another_port(self) -> None:
        assert endpoint_beside("tcp://10.0.0.3:4242", "x") == "tcp://10.0.0.3:*"


class TestStrangers:
    """Nobody without the run's key can send, or read, or pose as the master."""

    def send_as_stranger(self, address: str, prepare: Callable[[zmq.Socket[bytes]], None], data: bytes) -> bytes | None:
        """Return what comes back to a client that tries for a while; None for nothing."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.identity = b"1"
            prepare(stranger)
            stranger.connect(address)
            stranger.send(data)
            return stranger.recv() if stranger.poll(round(NOTHING_S * 1000)) else None

    def without_key(self, server_public: bytes) -> Callable[[zmq.Socket[bytes]], None]:
        return lambda stranger: None

    def with_own_key(self, server_public: bytes) -> Callable[[zmq.Socket[bytes]], None]:
        """Knows the server's public key, but not the workers' key pair."""

        def prepare(stranger: zmq.Socket[bytes]) -> None:
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = server_public

        return prepare

    @pytest.mark.parametrize("kind", ["without_key", "with_own_key"])
    def test_a_stranger_cannot_reach_the_master(self, keys: RunKeys, master: ZmqMaster, kind: str) -> None:
        prepare = (
            self.without_key(keys.for_workers.master_public)
            if kind == "without_key"
            else self.with_own_key(keys.for_workers.master_public)
        )
        assert self.send_as_stranger(master.address, prepare, encode(Hello(1, 1, ""))) is None
        assert master.receive(0) is None
        with pytest.raises(TransportError, match="not connected"):  # so it cannot be sent anything either
            master.send(1, Shutdown(0))

    def test_the_run_goes_on_while_strangers_knock(
        self, keys: RunKeys, master: ZmqMaster, connect: Callable[..., ZmqWorker]
    ) -> None:
        worker = connect(1)
        assert isinstance(master.receive(LIMIT_S), Hello)
        assert (
            self.send_as_stranger(master.address, self.without_key(keys.for_workers.master_public), b"GET / HTTP/1.1")
            is None
        )
        assert (
            self.send_as_stranger(
                master.address, self.with_own_key(keys.for_workers.master_public), encode(Hello(1, 1, ""))
            )
            is None
        )
        master.send(1, Shutdown(0))
        assert worker.receive(LIMIT_S) == Shutdown(0)
        assert master.receive(0) is None

    def test_a_stranger_who_announces_a_huge_message_is_hung_up_on(self, keys: RunKeys, master: ZmqMaster) -> None:
        host, port = master.address.removeprefix("tcp://").split(":")
        greeting = bytes([0xFF, *bytes(8), 0x7F, 3, 0]) + b"CURVE".ljust(20, b"\0") + bytes(32)

        def is_hung_up_on(size_bytes: int) -> bool:
            with socket.create_connection((host, int(port)), 1.0) as stranger:
                stranger.sendall(greeting + bytes([6]) + size_bytes.to_bytes(8, "big"))  # the head of a command
                try:
                    while stranger.recv(4096):
                        continue
                except TimeoutError:
                    return False
                except ConnectionResetError:
                    return True
                return True

        assert is_hung_up_on(2 << 30)
        assert not is_hung_up_on(1 << 20)  # libzmq gives a stranger half a minute

    def test_a_refused_connection_is_logged(
        self, keys: RunKeys, master: ZmqMaster, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.send_as_stranger(master.address, self.with_own_key(keys.for_workers.master_public), b"")
        assert "refused a connection from 127.0.0.1" in caplog.text

    @pytest.mark.parametrize("kind", ["without_key", "with_own_key"])
    def test_a_stranger_cannot_read_samples(self, keys: RunKeys, kind: str) -> None:
        fetched = threading.Event()

        def fetch(keys: Sequence[str], ids: Sequence[str]) -> bytes:
            fetched.set()
            return b"secret"

        with contextlib.closing(ZmqSampleServer(fetch, keys.for_workers)) as server:
            prepare = (
                self.without_key(keys.for_workers.worker_public)
                if kind == "without_key"
                else self.with_own_key(keys.for_workers.worker_public)
            )
            assert self.send_as_stranger(server.address, prepare, encode(PullRows(("rewards",), ("a",)))) is None
        assert not fetched.is_set()

    @pytest.mark.parametrize("kind", ["without_key", "with_own_key"])
    def test_a_stranger_cannot_reach_the_key_values(self, keys: RunKeys, kind: str) -> None:
        with (
            contextlib.closing(ZmqKeyValueServer(keys)) as server,
            contextlib.closing(ZmqKeyValueClient(server.address, keys.for_workers, timeout_s=LIMIT_S)) as client,
        ):
            public = keys.for_workers.master_public
            prepare = self.without_key(public) if kind == "without_key" else self.with_own_key(public)
            assert self.send_as_stranger(server.address, prepare, encode(SetKeys(("k",), (b"",)))) is None
            assert client.ask(CountKeys()).number == 0

    def test_a_worker_of_another_run_gets_nothing_through(
        self, master: ZmqMaster, connect: Callable[..., ZmqWorker]
    ) -> None:
        other = connect(0, RunKeys.new().for_workers)
        assert other.receive(NOTHING_S) is None
        assert master.receive(0) is None

    def test_a_false_master_learns_nothing(self, keys: RunKeys) -> None:
        """A worker checks that it talks to the holder of the master's secret key."""
        false_keys = RunKeys(RunKeys.new().master_secret, keys.for_workers)
        with contextlib.closing(ZmqMaster(false_keys)) as false_master:
            worker = ZmqWorker(false_master.address, 0, keys.for_workers)
            worker.send(Hello(0, 1, ""))
            assert false_master.receive(NOTHING_S) is None
            worker.close()


def test_a_worker_notices_that_its_connection_to_another_machine_broke(keys: RunKeys) -> None:
    own = next(iter(addresses().values()), None)
    if own is None:
        pytest.skip("this machine has loopback only")
    master = ZmqMaster(keys, endpoint=f"tcp://{own}:*")
    worker = ZmqWorker(master.address, 0, keys.for_workers)
    try:
        worker.send(Hello(0, 1, ""))
        assert master.receive(10.0) == Hello(0, 1, "")
        assert worker.receive(0.1) is None
        master.close()
        with pytest.raises(ConnectionBrokenError, match="the connection of worker 0 to its master broke"):
            deque(iter(partial(worker.receive, 0.1), worker), maxlen=0)
    finally:
        worker.close()


def test_a_broken_connection_to_another_machine_takes_no_message_and_lets_nobody_wait(keys: RunKeys) -> None:
    own = next(iter(addresses().values()), None)
    if own is None:
        pytest.skip("this machine has loopback only")
    master = ZmqMaster(keys, endpoint=f"tcp://{own}:*")
    store = ZmqKeyValueServer(keys, endpoint=f"tcp://{own}:*")
    worker = ZmqWorker(master.address, 0, keys.for_workers)
    client = ZmqKeyValueClient(store.address, keys.for_workers, timeout_s=60.0)
    begin_s = time.monotonic()
    try:
        worker.send(Hello(0, 1, ""))
        assert master.receive(10.0) == Hello(0, 1, "")
        client.ask(SetKeys(("key",), (b"value",)))
        master.close()
        store.close()
        with pytest.raises(ConnectionBrokenError, match="the connection broke"):
            deque(iter(lambda: worker.send(Hello(0, 1, "")), worker), maxlen=0)
        with pytest.raises(TransportError, match="the connection broke"):
            client.ask(WaitFor(("another",), 60.0))
        assert time.monotonic() - begin_s < 20.0
    finally:
        worker.close()
        client.close()


def test_keys_of_attempts_are_derived_and_differ() -> None:
    first, second = (RunKeys.derived(b"k" * 32, attempt) for attempt in ("run-1", "run-2"))
    assert first == RunKeys.derived(b"k" * 32, "run-1")
    assert first.for_workers.worker_secret != second.for_workers.worker_secret
    assert first.master_secret not in (first.for_workers.worker_secret, second.master_secret)
