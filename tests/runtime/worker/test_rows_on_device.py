"""Outputs of calls on an accelerator: no byte of them comes to host memory as long as the same worker reads them."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from realrl.data.rows import SampleStore, decode_rows, encode_rows, encode_start
from realrl.engine import device as devices
from realrl.engine.groups import Pending
from realrl.engine.row_exchange import exchange_rows
from realrl.plan.samples.transfer import RowTransfer
from realrl.runtime.worker.model_worker import ModelWorker
from tests.data.samples import make_sample
from tests.helpers.fake_device import DEVICE, FakeDevice, OnDevice
from tests.helpers.runs import read_metrics, run_here

CHAIN = '''
"""Two roles without models pass features on."""

from realrl import DatasetKind, Experiment, InterfaceRef, InterfaceType, MFCDef, ModelInterface, Role
from realrl import register_interface
from realrl.sched.messages import KeySchema, Per


@register_interface("chain")
class Chain(ModelInterface):
    """inference: one key -> another, on the device of the first."""

    def __init__(self, reads, gives):
        self._reads, self._gives = reads, gives

    def inference(self, model, batch, ctx):
        rows = batch[self._reads].float() * 0.5 + 1.0
        if self._gives == "z":
            ctx.metrics.add("z/mean", float(rows.sum()), len(rows))
        return batch.derive(self._reads, {self._gives: (KeySchema("float32", Per.TOKEN), rows)})


def calls(config):
    pairs = {"first": ("a", "prompt_ids", "x"), "second": ("b", "x", "y"), "third": ("a", "y", "z")}
    return [
        MFCDef(name, role, InterfaceType.INFERENCE, InterfaceRef("chain", {"reads": reads, "gives": gives}), (reads,),
               (gives,), n_seqs=config.n_seqs)
        for name, (role, reads, gives) in pairs.items()
    ]


ROLES = {name: Role(trainable=False, head="none") for name in "ab"}
EXPERIMENT = Experiment("chain", "three calls without models", ROLES, DatasetKind.PROMPT, calls)
'''


@pytest.fixture
def device():
    with FakeDevice() as mode:
        mode.forget()
        yield mode


def run_chain(folder: Path, name: str, *overrides: str) -> list[float]:
    """Run three steps in this process; returns the mean of the last call's output in each."""
    file = folder / "chain.py"
    file.write_text(CHAIN)
    settings = ("preset=tiny", "launcher=inline", "n_seqs=8", "steps=3", f"run_dir={folder / name}")
    run_here("run", str(file), *settings, *overrides)
    return [row["z/mean"] for row in read_metrics(folder / name)]


def test_rows_that_one_worker_writes_and_reads_never_move(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_chain(tmp_path, "host")
    stores: list[SampleStore] = []
    monkeypatch.setattr(devices, "resolve_device", lambda kind, local_rank=0: DEVICE)
    monkeypatch.setattr(ModelWorker, "fetch", lambda worker, *_: pytest.fail("rows were pulled"))
    free = SampleStore.free
    monkeypatch.setattr(SampleStore, "free", lambda store, ids: stores.append(store) or free(store, ids))
    assert run_chain(tmp_path, "device") == expected
    assert device.copies_to_host == []
    assert stores
    assert (stores[-1].device_bytes, stores[-1].size_bytes) == (0, 0), "rows stay when their samples are released"
    assert run_chain(tmp_path, "no room", "cluster.device_rows_gb=0") == expected
    assert len(device.copies_to_host) == 3 * 8 * 3, "a row of each call, sample and step"


def test_the_oldest_rows_go_to_host_memory_above_the_limit(device: FakeDevice) -> None:
    x = make_sample([[4], [4], [4]], keys=("input_ids", "rewards"))
    store = SampleStore(device_limit_bytes=2 * 4 * 8 + 3 * 4)
    store.put(x.select(x.ids, ("input_ids",)))  # in host memory, does not count
    assert store.device_bytes == 0
    store.put(x.to(DEVICE))
    assert device.copies_to_host == [4 * 8]
    assert store.device_bytes == 2 * 4 * 8 + 3 * 4
    assert store.size_bytes == 3 * 4 * 8 + 3 * 4
    assert isinstance(store.get(x.ids, x.keys, device=DEVICE)["input_ids"], OnDevice)
    assert store.get(x.ids, x.keys) == x, "from both memories"
    store.put(x)
    assert store.device_bytes == 0, "replaced"
    store.put(x.to(DEVICE))
    store.free(["s1", "nobody"])
    store.free(x.ids)
    assert (store.device_bytes, store.size_bytes) == (0, 0)


def test_rows_for_another_worker_are_copied_and_stay(device: FakeDevice) -> None:
    x = make_sample([[4], [2, 3]])
    store = SampleStore(device_limit_bytes=1 << 20)
    store.put(x.to(DEVICE))
    assert decode_rows(encode_rows(store.get(x.ids, x.keys))) == x
    assert len(device.copies_to_host) == len(x.keys)
    assert store.device_bytes == store.size_bytes


class Wire:
    """The ranks' end of point-to-point messages between threads."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[torch.Tensor]]) -> None:
        self.rank = rank
        self._queues = queues

    def exchange(self, sends, receives) -> Pending:
        for peer, tensor in sends:
            assert tensor.device == DEVICE, "the group's backend sends from the device"
            self._queues[self.rank, peer].put(tensor.clone())
        for peer, tensor in receives:
            tensor.copy_(self._queues[peer, self.rank].get(timeout=30))
        return Pending((), ())


def test_the_collective_plane_sends_from_device_to_device() -> None:
    """The host sees lengths and the starts of messages, and no tensor of a row."""
    queues = {(a, b): queue.Queue() for a in range(2) for b in range(2)}
    batches = [make_sample([[4], [2, 3], [1]], prefix=f"r{rank}-") for rank in range(2)]
    transfers = [RowTransfer(0, 1, key, batches[0].ids) for key in batches[0].keys]
    transfers.append(RowTransfer(1, 0, "hidden", batches[1].ids[:2]))

    def play(rank: int) -> SampleStore:
        with FakeDevice():
            store = SampleStore(device_limit_bytes=1 << 20)
            store.put(batches[rank].to(DEVICE))
            exchange_rows(transfers, store=store, world=Wire(rank, queues), device=DEVICE)
            return store

    with FakeDevice() as counter, ThreadPoolExecutor(2) as pool:
        counter.forget()
        stores = list(pool.map(play, range(2)))
        starts = [len(encode_start(batches[t.source].select(t.ids, (t.key,)))) for t in transfers]
        sizes = 2 * 8
        assert sorted(counter.copies_to_host) == sorted([sizes, sizes, sum(starts[:-1]), starts[-1]])
        assert stores[1].device_bytes == sum(batch.to(DEVICE)[key].nbytes for batch in batches for key in batch.keys)
        assert stores[1].get(batches[0].ids, batches[0].keys) == batches[0]
        assert stores[0].get(batches[1].ids[:2], ("hidden",)) == batches[1].select(batches[1].ids[:2], ("hidden",))
