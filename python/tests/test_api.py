"""The calls that README and tutorial promise, by exactly these names and arguments."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path

import numpy as np
import pytest
from ranks import Seat, run

import tensorbus as tb
from tensorbus._c import lib


def calls(seat: Seat) -> None:
    url, i = seat.url, seat.index
    sends = seat.group == "trainer"
    bus = tb.join(url, group=seat.group, index=i, size=2, timeout=30.0)
    layout = "mesh=2 place=Shard(0)" if sends else "mesh=2 place=S1"
    pair = bus.pair("weights", "inference" if sends else "trainer", layout=layout)
    batch = bus.batch("step", commit="in_place" if sends else "shadow")
    whole = np.arange(600 * 400, dtype=np.float32).reshape(600, 400)
    mine = np.ascontiguousarray(whole[300 * i : 300 * i + 300] if sends else whole[:, 200 * i : 200 * i + 200])
    array = mine.copy() if sends else np.zeros_like(mine)
    batch.add(pair, "w", array, shape=(600, 400))
    batch.add_pair(pair)
    batch.register(timeout=30.0)
    assert (batch.version, batch.is_torn) == (0, False)
    assert bus.groups()["trainer"] == (2, 2)
    if sends:
        assert batch.send(timeout=10.0).state().status == "ok"
    else:
        batch.recv(timeout=10.0)
        assert batch.version == 1
    assert np.array_equal(array, mine)
    seat.meet()

    async def again() -> None:
        t = batch.send(wait=None) if sends else batch.recv(wait=None)
        await t

    t = batch.send(wait=None) if sends else batch.recv(wait=None)
    t.wait("released" if sends else "arrived", timeout=5.0)
    t.stream_wait("released" if sends else "committed")  # without a GPU, this waits
    asyncio.run(again())
    if not sends:
        assert batch.version == 3
    seat.meet()
    batch.remove_pair(pair)
    batch.close()
    pair.close()
    bus.close()


def test_calls(tmp_path: Path) -> None:
    run(calls, tmp_path, {"trainer": 2, "inference": 2})


def test_calls_of_one_process(tmp_path: Path) -> None:
    x = tb.empty((4096, 4096), "bf16", device="cpu")
    assert x.numpy().shape == (4096, 4096)
    p = tb.plan("mesh=4 place=S0", "mesh=2,2 place=R,S1", (6144, 4096), "bf16")
    assert len(p.routes(0)) > 0
    assert p.stats().max_send == p.stats().min_max_send
    p.check()
    assert p.svg().startswith("<svg")
    first = tb.plan("mesh=2,2 place=R,S0", "mesh=4 place=S0 ranks=4..7", (64, 64), "bf16", unbalanced=True)
    assert first.stats().max_send > first.stats().min_max_send
    whole = tb.plan("mesh=4 place=R", "mesh=1 place=R ranks=4", (2, 64), "u8", whole_rows=True)
    assert {route.lengths[1] for route in whole.routes(4)} == {64}
    with pytest.raises(tb.Refused, match="unbalanced"):
        first.svg()
    assert tb.layout("mesh=4 place=S0").local((10,), rank=3) == [[(9, 10)]]
    with tb.join(f"unix:{tmp_path}/bus", group="trainer", index=0, size=1) as bus:
        service = tb.copy_service(bus, "trainer")
        a, b = np.arange(4.0), np.zeros(4)
        service.submit_send(a, 0, 1)
        service.submit_recv(b, 0, 1)
        service.run()
        service.close()
        assert np.array_equal(a, b)
    assert bus.is_closed
    kinds = (tb.Timeout, tb.PeerLost, tb.Refused, tb.Conflict, tb.Denied, tb.Invalid, tb.InDoubt, tb.Cancelled)
    assert all(issubclass(kind, tb.Error) for kind in kinds)
    assert issubclass(tb.Timeout, TimeoutError)
    assert issubclass(tb.PeerLost, ConnectionError)


def test_help_tells_what_is_returned() -> None:
    assert str(inspect.signature(tb.join)).endswith("-> 'Bus'")
    assert str(inspect.signature(tb.Bus.pair)).endswith("-> 'Pair'")
    assert tb.Bus.pair_async.__qualname__ == "Bus.pair_async"


def test_a_cancelled_await_cancels_the_transfer(tmp_path: Path) -> None:
    """The tensors are free again, and the batch can begin another transfer."""
    buses = [tb.join(f"unix:{tmp_path}/bus", group=group, index=0, size=1) for group in "ab"]
    pairs = [buses[i].pair("p", "ba"[i], "mesh=1 place=R", wait=False) for i in range(2)]
    batches = [bus.batch("step") for bus in buses]
    arrays = [np.full(4, i) for i in range(2)]
    for batch, pair, array in zip(batches, pairs, arrays, strict=True):
        batch.add(pair, "w", array)

    async def program() -> None:
        await asyncio.gather(*(batch.register_async(timeout=20.0) for batch in batches))
        transfer = batches[1].recv(wait=None, timeout=50.0)
        task = asyncio.ensure_future(wait_for(transfer))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.is_closed
        again = batches[1].recv(wait=None, timeout=20.0), batches[0].send(wait=None, timeout=20.0)
        await asyncio.gather(*map(wait_for, again))

    async def wait_for(transfer: tb.Transfer) -> None:
        await transfer

    asyncio.run(program())
    assert np.array_equal(arrays[0], arrays[1])
    for bus in buses:
        bus.close()


def test_messages_are_lines_of_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        tb.log("error", file)
    lib.tb_free(4096)  # nobody has allocated that; and the library has a descriptor of its own
    tb.log("off")
    lib.tb_free(4096)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line[:7] for line in lines] == ["error: "]
    for level, bad in ("loud", 2), ("warn", -1), ("warn", 10**20), ("warn", "file"), ("warn", None):
        with pytest.raises(tb.Invalid):
            tb.log(level, bad)


def test_a_pair_joins_a_batch_that_has_sent(tmp_path: Path) -> None:
    url, layout = f"unix:{tmp_path}/bus", "mesh=1 place=R"
    with tb.join(url, group="a", index=0, size=1) as one, tb.join(url, group="b", index=0, size=1) as other:
        there = one.pair("p", "b", layout=layout, wait=False)
        sends, receives = one.batch("step"), other.batch("step")
        x, y = np.full(5, 3.0), np.zeros(5)
        sends.add(there, "w", x)
        receives.add(other.pair("p", "a", layout=layout), "w", y)
        receive = threading.Thread(target=receives.recv, kwargs={"timeout": 10.0})
        receive.start()
        sends.send(timeout=10.0)
        receive.join()
        assert np.array_equal(x, y)
        late = one.pair("q", "c", layout=layout, wait=False)
        sends.add_pair(late)
        sends.add(late, "w", x)
