"""Rows that a rank pulls before a call, over sockets: a relay fetches first, and passes on what it has got."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace

import torch

from realrl.data.rows import SampleStore, encode_rows
from realrl.engine.groups import Communicator
from realrl.plan.samples.placements import Placement
from realrl.plan.samples.transfer import Share, plan_transfers
from realrl.runtime.transport.sockets import RunKeys
from realrl.runtime.transport.zmq import ZmqSampleClient, ZmqSampleServer
from realrl.runtime.worker.call_runner import CallRunner
from realrl.sched.messages import RunCall
from tests.ranks.test_row_exchange import held_by

N_RANKS, N_SAMPLES = 4, 5


def test_relays_pull_from_another_node_and_their_neighbours_from_them() -> None:
    """Two nodes of two ranks; each relay waits for the other's half, and rank 3 starts first."""
    keys, mine = RunKeys.new().for_workers, held_by(0, N_SAMPLES)
    stores = [SampleStore() for _ in range(N_RANKS)]
    stores[0].put(mine)
    key = mine.keys[0]
    placements = {key: dict.fromkeys(mine.ids, Placement(frozenset({0})))}
    routes, _ = plan_transfers([Share((1, 2, 3), mine.ids)], placements, node_of=lambda rank: rank // 2)
    assert sum(route.is_passed_on for route in routes) == 2
    n_pulled = [0] * N_RANKS
    with ExitStack() as stack:
        servers = []
        for store in stores:
            servers.append(ZmqSampleServer(lambda names, ids, store=store: encode_rows(store.get(ids, names)), keys))
            stack.callback(servers[-1].close)

        def pull(rank: int) -> None:
            client = ZmqSampleClient(keys, timeout_s=30.0)
            plan = SimpleNamespace(mfcs=(), evaluation=None)
            runner = CallRunner(
                plan,  # type: ignore[arg-type]
                {},
                stores[rank],
                world=Communicator(None, N_RANKS, rank),
                client=client,
                peers=tuple(server.address for server in servers),
                device=torch.device("cpu"),
            )
            mine = tuple(route for route in routes if route.target == rank)
            n_pulled[rank] = runner._pull(RunCall(1, 1, "actor_train", 1, (), mine), [])
            client.close()

        threads = [threading.Thread(target=pull, args=(rank,)) for rank in (3, 2, 1)]
        threads[0].start()
        threads[0].join(0.2)  # it has its own half, and waits for that of rank 2
        assert stores[3].missing(mine.ids, [key])
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    for store in stores:
        assert torch.equal(store.get(mine.ids, [key])[key], mine[key])
    assert min(n_pulled[1:]) > 0
