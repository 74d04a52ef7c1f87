"""Through agents: the same calls, and an agent that is gone is named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from ranks import Seat, run

import tensorbus as tb
from tensorbus import _c


def start_agent(seat: Seat, socket: str) -> subprocess.Popen[bytes]:
    where = ["--name", seat.group, "--rank", str(seat.index), "--size", str(seat.size), "--store", seat.url]
    return subprocess.Popen([_c.find("tensorbus"), "agent", *where, "--socket", socket])


def through_agents(seat: Seat) -> None:
    sends = seat.group == "a"
    socket = f"{seat.args[0]}/{seat.group}.sock"
    agent = start_agent(seat, socket)
    x = np.full((4, 4), float(sends))
    try:
        with tb.join(f"agent:{socket}", timeout=30.0) as bus:  # which waits for the agent
            assert (bus.group, bus.index, bus.size) == (seat.group, 0, 1)
            pair = bus.pair("p", "b" if sends else "a", "mesh=1 place=R")
            assert bus.groups(timeout=20.0) == {"a": (1, 1), "b": (1, 1)}  # the pair has met all of them
            batch = bus.batch("step", commit="shadow")
            batch.add(pair, "w", x)
            for version in (1, 2):
                transfer = (batch.send if sends else batch.recv)(wait="committed", timeout=30.0)
                assert transfer.version == version
            assert x.min() == 1
            x[:] = np.arange(16.0).reshape(4, 4) if sends else -1
            sent, received = batch.reshard("a", timeout=30.0)
            assert (sent is not None, received is not None) == (sends, not sends)
            assert np.array_equal(x, np.arange(16.0).reshape(4, 4))
            assert bus.plans.misses == 1
            bus.wait("b" if sends else "a", timeout=20.0)
            with pytest.raises(tb.Timeout, match="nobody has joined group 'c'"):
                bus.wait("c", timeout=0.2)
            with pytest.raises(tb.Refused, match="agent's seat"):
                tb.copy_service(bus)
            seat.meet()
            agent.kill()
            with pytest.raises(tb.PeerLost, match=r"the agent at .* is gone"):
                (batch.send if sends else batch.recv)(timeout=20.0)
    finally:
        agent.kill()
        agent.wait()


def test_through_agents(tmp_path: Path) -> None:
    run(through_agents, tmp_path, {"a": 1, "b": 1}, str(tmp_path))
