"""The run's store behind torch.distributed: it behaves as torch's own, also where C++ calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from realrl.engine.rendezvous import RunStore, _proof, prove_connections
from realrl.errors import TransportError
from realrl.runtime.transport.inproc import InprocKeyValues
from tests.helpers.ranks import run_ranks

SECOND = timedelta(seconds=1)


def run_store(timeout_s: float = 20.0) -> RunStore:
    return RunStore(InprocKeyValues(), timeout_s=timeout_s)


def operations(store: dist.Store) -> list[object]:
    """The results of every operation that torch's stores have."""
    found: list[object] = [store.set("text", "a"), store.get("text"), store.add("n", 2), store.add("n", -5)]
    found += [store.get("n"), store.check(["text", "n"]), store.check(["text", "none"]), store.wait(["text"])]
    found += [store.wait(["text", "n"], SECOND), store.append("text", "b"), store.append("new", "c")]
    found += [store.multi_get(["text", "new"]), store.multi_set(["x", "y"], ["1", "2"]), store.get("y")]
    found += [store.compare_set("text", "ab", "z"), store.compare_set("text", "ab", "q"), store.get("text")]
    found += [store.compare_set("free", "", "mine"), store.get("free"), store.delete_key("x"), store.delete_key("x")]
    return [*found, store.num_keys(), store.has_extended_api()]


@pytest.mark.parametrize("wrap", [lambda store: store, lambda store: dist.PrefixStore("a", store)], ids=["", "prefix"])
def test_it_answers_as_torch_s_own_store(wrap: Callable[[dist.Store], dist.Store]) -> None:
    ours = run_store()
    assert operations(wrap(ours)) == operations(wrap(dist.HashStore()))


def test_a_get_waits_for_another_thread() -> None:
    store = run_store()
    prefixed = dist.PrefixStore("p", store)
    setter = threading.Thread(target=lambda: prefixed.set("k", "v"))
    setter.start()
    assert prefixed.get("k") == b"v"
    setter.join()


@pytest.mark.parametrize("name", ["get", "multi_get", "wait"])
def test_a_wait_in_vain_is_torch_s_kind_of_error(name: str) -> None:
    store = run_store(timeout_s=0.2)
    prefixed = dist.PrefixStore("p", store)
    argument = "k" if name == "get" else ["k"]
    with pytest.raises(dist.DistStoreError, match=r"no other worker has set 'p/k' within 0\.2 s"):
        getattr(prefixed, name)(argument)


def test_no_wait_outlasts_the_run_s_limit() -> None:
    store = run_store(timeout_s=0.2)
    for asked in (timedelta(hours=9), timedelta(0)):
        with pytest.raises(dist.DistStoreError, match=r"within 0\.2 s"):
            store.wait(["k"], asked)
    with pytest.raises(dist.DistStoreError, match=r"within 0\.1 s"):
        store.wait(["k"], timedelta(seconds=0.1))


def test_a_refusal_is_torch_s_kind_of_error() -> None:
    store = run_store()
    with pytest.raises(dist.DistStoreError, match="is longer than 4096 bytes"):
        dist.PrefixStore("p", store).set("k" * 5000, "v")


def test_a_clone_is_the_same_store() -> None:
    store = run_store()
    dist.PrefixStore("p", store).clone().set("k", "v")
    assert store.get("p/k") == b"v"


def _prove(rank: int, world_size: int, secret_of_rank: list[str]) -> str:
    """The message of the error that a rank gets, which takes its secret from a store of its own."""
    store = run_store()
    store.set("realrl/secret", secret_of_rank[rank])
    everyone = frozenset(range(world_size))
    handles = {everyone: dist.group.WORLD, frozenset({0, 2}): dist.new_group([0, 2])}
    try:
        prove_connections(handles, store=store, rank=rank)
    except TransportError as error:
        return error.message
    return ""


def test_members_prove_themselves_to_each_other() -> None:
    assert run_ranks(3, _prove, ["a"] * 3) == [""] * 3


def test_a_stranger_in_the_place_of_a_rank_is_found_by_all_others() -> None:
    told = run_ranks(3, _prove, ["a", "b", "a"])
    wrong = "the connection of worker {} to worker {} leads to no member of this run"
    assert told == [wrong.format(0, 1), wrong.format(1, 0), wrong.format(2, 1)]


def test_a_proof_serves_one_rank_in_one_group_only() -> None:
    proofs = {
        bytes(_proof(b"s", ranks, a, b).tolist()) for ranks in ([0, 1], [0, 1, 2]) for a in (0, 1) for b in (0, 1)
    }
    assert len(proofs) == 8
