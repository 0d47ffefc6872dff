"""The run's store behind torch.distributed: it behaves as torch's own, also where C++ calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from realrl.engine.rendezvous import RunStore
from realrl.runtime.transport.inproc import InprocKeyValues

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
