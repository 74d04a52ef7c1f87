"""tensorbus.etha: what Etha's programs rely on, and the faults that theirs have."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tensorbus import _memory, etha

_fork = multiprocessing.get_context("fork")
PATIENCE_S = 60.0
R = Replicate()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def mesh(ranks: Any) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=0)


class Agents:
    """Agents that this process starts, as an agent.py of Etha's users does."""

    def __init__(self, folder: Path, size: int) -> None:
        port = free_port()
        self.folder = folder
        self.all = [
            etha.TensorBusAgent(r, size, "127.0.0.1", port, *map(str, self.paths(r)), store_timeout=30.0)
            for r in range(size)
        ]

    def paths(self, rank: int) -> tuple[str, str]:
        return f"{self.folder}/{rank}_command", f"{self.folder}/{rank}_state"

    def close(self) -> None:
        for agent in self.all:
            agent.close()


def run(folder: Path, programs: list[list[Callable[..., Any]]], *args: Any) -> list[Any]:
    """Starts agents and a client for each function: programs have ranks from 0, agents are numbered through."""
    flat = [(index, function) for program in programs for index, function in enumerate(program)]
    agents = Agents(folder, len(flat))
    results = _fork.Queue()

    def main(agent_rank: int, rank: int, function: Callable[..., Any]) -> None:
        os.environ |= {"RANK": str(rank), "AGENT_RANK": str(agent_rank)}
        try:
            client, info = etha.bootstrap_client(path_naming_fn=agents.paths)
            assert (info.agent_rank, info.global_rank, info.method) == (agent_rank, rank, "direct")
            found = function(client, rank, *[agents if a is Agents else a for a in args])
            results.put((agent_rank, found, None))
        except BaseException:
            results.put((agent_rank, None, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(0)  # what the parent has made is not this process's to close

    processes = [_fork.Process(target=main, args=(a, *each)) for a, each in enumerate(flat)]
    try:
        for process in processes:
            process.start()
        found = sorted((results.get(timeout=PATIENCE_S) for _ in flat), key=lambda each: each[0])
    finally:
        for process in processes:
            process.kill()
        agents.close()
    failures = "\n".join(f"client {a}: {why}" for a, _, why in found if why)
    assert not failures, failures
    return [result for _, result, _ in found]


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


# ---- Signatures -----------------------------------------------------------------------------------------------------

SIGNATURES = {
    etha.TensorBusClient: "agent_rank, lmdb_command_queue_path=None, agent_state_lmdb_path=None, "
    "connection_timeout=30.0",
    etha.TensorBusClient.init_pair: "self, pair_name, local_name, remote_name, expected_world_size, device_mesh=None, "
    "placements=None, blocking=True, timeout=30.0",
    etha.TensorBusClient.register_tensors: "self, batch_id, tensors, bucket_size=None, timeout=30.0",
    etha.TensorBusClient.transfer: "self, batch_id, transfer_type, blocking=False, timeout=30.0",
    etha.TensorBusClient.query_transfer_signal: "self, batch_id, blocking=True, timeout=30.0",
    etha.TensorBusClient.close: "self",
    etha.BatchHandler: "client, batch_id, pair_names",
    etha.BatchHandler.transfer: "self, transfer_type, blocking=False, timeout=30.0",
    etha.BatchHandler.query_transfer_signal: "self, blocking=True, timeout=30.0",
    etha.BatchHandler.close: "self, blocking=True, timeout=30.0",
    etha.TensorBusAgent: "rank, world_size, store_host, store_port, lmdb_command_queue_path, lmdb_state_path, "
    "store_timeout=3600.0, store_backend='tcp', store_namespace=None",
    etha.TensorBusAgent.run: "self",
    etha.TensorBusAgent.close: "self, destroy=True",
    etha.bootstrap_client: "path_naming_fn=None, connection_timeout=30.0",
    etha.BootstrapInfo: "agent_rank, global_rank, rank_offset, command_queue_path, state_path, method",
}


def test_signatures_are_those_of_etha() -> None:
    for function, wanted in SIGNATURES.items():
        parameters = inspect.signature(function).parameters.values()
        plain = (p.replace(annotation=p.empty) for p in parameters)
        assert ", ".join(map(str, plain)) == wanted, function


# ---- Moving ---------------------------------------------------------------------------------------------------------


def move(
    client: etha.TensorBusClient,
    sends: bool,
    side: tuple[int, Any, Any],
    tensors: list[torch.Tensor],
    rounds: int = 2,
) -> None:
    size, its_mesh, placements = side
    names = ("trainer", "engine") if sends else ("engine", "trainer")
    client.init_pair("p", *names, size, device_mesh=its_mesh, placements=placements)
    views = [t.view(-1) for t in tensors]
    handler = client.register_tensors("step", [(t, "p") for t in tensors])
    assert all(_memory.begins_at(v.untyped_storage().data_ptr()) for v in views)  # agents map it
    assert [v.data_ptr() for v in views] == [t.data_ptr() for t in tensors]
    assert (handler.batch_id, handler.pair_names, handler.client) == ("step", ["p"], client)
    wanted = [t.clone() for t in tensors]
    for version in range(rounds):
        if sends:
            for t, start in zip(tensors, wanted, strict=True):
                t.copy_(start + version)
            done = handler.transfer("send")
            done.acquire(timeout=30)
            done.close()
        else:
            while not handler.query_transfer_signal():
                time.sleep(0.01)
            handler.transfer("recv", blocking=True, timeout=30)
            for t, end in zip(tensors, wanted, strict=True):
                assert torch.equal(t.float(), (end.float() + version).to(t.dtype).float())
                if version + 1 < rounds:
                    t.fill_(-1)
    handler.close()
    client.close()


def row_to_col(sends: bool) -> Callable[..., None]:
    def client(c: etha.TensorBusClient, rank: int) -> None:
        # Neither size can be divided by 2: torch.chunk gives the first rank more.
        whole = [numbers(7, 5), numbers(3, 9) * 10]
        parts = [torch.chunk(w, 2, 0 if sends else 1)[rank].contiguous() for w in whole]
        if not sends:
            parts = [parts[0], parts[1].to(torch.bfloat16)]
        move(c, sends, (2, mesh([0, 1]), (Shard(0 if sends else 1),)), parts)

    return client


def test_uneven_sizes_are_exact_and_dtypes_are_cast(tmp_path: Path) -> None:
    run(tmp_path, [[row_to_col(True)] * 2, [row_to_col(False)] * 2])


def permuted(sends: bool) -> Callable[..., None]:
    def client(c: etha.TensorBusClient, rank: int) -> None:
        ranks, whole = [3, 1, 0, 2], numbers(8, 2)
        part = whole[2 * ranks.index(rank) :][:2].clone() if sends else whole.clone()
        side = (4, mesh(ranks), (Shard(0),)) if sends else (1, mesh([0]), (Replicate(),))
        move(c, sends, side, [part])

    return client


def test_meshes_that_are_not_contiguous_ranks(tmp_path: Path) -> None:
    run(tmp_path, [[permuted(True)] * 4, [permuted(False)]])


def partial(sends: bool) -> Callable[..., None]:
    def client(c: etha.TensorBusClient, rank: int) -> None:
        if sends:
            move(c, True, (2, mesh([0, 1]), (Partial("sum"),)), [numbers(4, 4) * (rank + 1)], rounds=1)
        else:
            move(c, False, (1, mesh([0]), (Replicate(),)), [numbers(4, 4) * 3], rounds=1)

    return client


def test_partial_sources_are_combined(tmp_path: Path) -> None:
    run(tmp_path, [[partial(True)] * 2, [partial(False)]])


def without_mesh(sends: bool, has_mesh: bool = False) -> Callable[..., None]:
    def client(c: etha.TensorBusClient, rank: int) -> None:
        side = (2, mesh([0, 1]), (Shard(0),)) if has_mesh else (2, None, None)
        move(c, sends, side, [numbers(2 + rank, 3) + 100 * rank])

    return client


@pytest.mark.parametrize("has_mesh", [False, True])
def test_without_meshes_ranks_meet_by_their_order(tmp_path: Path, has_mesh: bool) -> None:
    """Also if one of the sides has a mesh."""
    run(tmp_path, [[without_mesh(True, has_mesh)] * 2, [without_mesh(False)] * 2])


def two_names(sends: bool) -> Callable[..., None]:
    def client(c: etha.TensorBusClient, rank: int) -> None:
        parts = [numbers(4, 3).chunk(2, 0)[rank].clone(), numbers(5) * 10]
        wanted = [part.clone() for part in parts]
        for i, placement in enumerate((Shard(0), R)):
            names = [f"{side}{i}" for side in ("ab" if sends else "ba")]
            c.init_pair(f"p{i}", *names, 2, mesh([0, 1]), (placement,), blocking=False)
        order = [1, 0] if sends else [0, 1]
        handler = c.register_tensors("step", [(parts[i], f"p{i}") for i in order])
        if not sends:
            for part in parts:
                part.fill_(-1)
        handler.transfer("send" if sends else "recv", blocking=True)
        assert all(map(torch.equal, parts, wanted))

    return client


def test_pairs_of_a_batch_may_have_different_local_names(tmp_path: Path) -> None:
    run(tmp_path, [[two_names(True)] * 2, [two_names(False)] * 2])


def waits_for_all(sends: bool) -> Callable[..., tuple[float, float]]:
    def client(c: etha.TensorBusClient, rank: int, folder: Path) -> tuple[float, float]:
        """Ranks 0 have nothing to do with ranks 1, of which the receiver is late; returns when it began and ended."""
        wanted = numbers(4, 2).chunk(2, 0)[rank]
        part = wanted.clone() if sends else torch.full_like(wanted, -1.0)
        c.init_pair("p", *(("a", "b") if sends else ("b", "a")), 2, mesh([0, 1]), (Shard(0),))
        handler = c.register_tensors("step", [(part, "p")])
        begin = time.monotonic()
        if not sends and rank == 1:
            while len(list(folder.glob("begun*"))) < 3:
                time.sleep(0.01)
            time.sleep(0.5)  # in which the others would end
            begin = time.monotonic()
        done = handler.transfer("send" if sends else "recv")
        (folder / f"begun {sends} {rank}").touch()
        done.acquire(timeout=30)
        assert torch.equal(part, wanted)
        return begin, time.monotonic()

    return client


def test_a_transfer_ends_when_all_ranks_have_begun_it(tmp_path: Path) -> None:
    """Also for those who need nothing of the one that is late: as after Etha's barrier of the group."""
    times = run(tmp_path, [[waits_for_all(True)] * 2, [waits_for_all(False)] * 2], tmp_path)
    assert max(begin for begin, _ in times) <= min(end for _, end in times)


def asks(sends: bool) -> Callable[..., list[bool]]:
    def client(c: etha.TensorBusClient, rank: int, folder: Path) -> list[bool]:
        """Rank 0 of the receivers asks early, rank 1 late: between their questions the transfer begins."""
        part = numbers(4, 2)
        c.init_pair(
            "p", *(("a", "b") if sends else ("b", "a")), 1 if sends else 2, mesh([0] if sends else [0, 1]), (R,)
        )
        handler = c.register_tensors("step", [(part, "p")])
        has_asked, has_sent = folder / "has asked", folder / "has sent"
        if sends:
            while not has_asked.exists():
                time.sleep(0.01)
            done = handler.transfer("send")
            has_sent.touch()
            done.acquire(timeout=30)
            return []
        answers = []
        if rank == 0:
            answers += [handler.query_transfer_signal() for _ in range(3)]
            has_asked.touch()
        while not has_sent.exists():
            time.sleep(0.01)
        while not answers or not answers[-1]:
            answers.append(handler.query_transfer_signal())
        assert handler.query_transfer_signal(blocking=False) is True
        handler.transfer("recv", blocking=True, timeout=30)
        return answers

    return client


def test_the_transfer_signal_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """To a question that one rank has asked before the transfer began, another gets the same answer after that."""
    _, first, second = run(tmp_path, [[asks(True)], [asks(False)] * 2], tmp_path)
    assert first[:3] == [False] * 3
    assert first[-1]
    assert first == second


def test_runs_of_torchrun_do_not_meet_in_a_store(tmp_path: Path) -> None:
    store, ports, results, meeting = free_port(), (free_port(), free_port()), _fork.Queue(), _fork.Barrier(2)

    def main(run: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[run])}
        path = str(tmp_path / str(run))
        agent = etha.TensorBusAgent(0, 1, "127.0.0.1", store, path, "", store_timeout=20.0)
        try:
            etha.TensorBusClient(0, path, connection_timeout=15.0)
            results.put(None)
        except ConnectionError as error:
            results.put(str(error))
        results.close()
        results.join_thread()
        meeting.wait(PATIENCE_S)  # until here both agents run
        agent.close()
        os._exit(0)

    processes = [_fork.Process(target=main, args=(run,)) for run in range(2)]
    try:
        for process in processes:
            process.start()
        assert [results.get(timeout=PATIENCE_S) for _ in processes] == [None, None]
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()


# ---- Faults ---------------------------------------------------------------------------------------------------------


def pair_up(c: etha.TensorBusClient, sends: bool, part: torch.Tensor) -> etha.BatchHandler:
    c.init_pair("p", *(("a", "b") if sends else ("b", "a")), 1, mesh([0]), (Replicate(),))
    return c.register_tensors("step", [(part, "p")])


def loses_agent(c: etha.TensorBusClient, _rank: int, agents: Agents) -> None:
    handler = pair_up(c, True, numbers(4))
    done = handler.transfer("send")
    os.kill(agents.all[0].pid or 0, signal.SIGKILL)
    with pytest.raises(ConnectionError, match=r"agent at .* is gone"):
        done.acquire(timeout=20)
    with pytest.raises(ConnectionError, match=r"agent at .* is gone"):
        handler.transfer("send", blocking=True, timeout=20)


def sees_loss(c: etha.TensorBusClient, _rank: int, agents: Agents) -> None:
    x = torch.full((4,), -1.0)
    handler = pair_up(c, False, x)
    began = time.monotonic()
    while not agents_gone(agents):
        time.sleep(0.01)
    with pytest.raises((ConnectionError, TimeoutError, RuntimeError), match=r"\ba 0\b|rank 0|agents 0"):
        handler.transfer("recv", blocking=True, timeout=20)
    assert time.monotonic() - began < 20
    assert x.tolist() == [-1.0] * 4


def agents_gone(agents: Agents) -> bool:
    """Whether the first agent was killed: nobody has reaped it yet, so it is a zombie."""
    stat = Path(f"/proc/{agents.all[0].pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_an_agent_that_fails_is_an_exception_in_both_clients(tmp_path: Path) -> None:
    run(tmp_path, [[loses_agent], [sees_loss]], Agents)


def dies(c: etha.TensorBusClient, _rank: int) -> None:
    pair_up(c, True, numbers(4))
    # leaves without a word when this returns: its process ends


def outlives(c: etha.TensorBusClient, _rank: int) -> None:
    x = torch.full((4,), -1.0)
    handler = pair_up(c, False, x)
    began = time.monotonic()
    with pytest.raises((ConnectionError, TimeoutError, RuntimeError), match=r"\ba 0\b"):
        handler.transfer("recv", blocking=True, timeout=15)
    assert time.monotonic() - began < 18
    assert x.tolist() == [-1.0] * 4


def test_a_peer_that_dies_is_named_within_the_deadline(tmp_path: Path) -> None:
    run(tmp_path, [[dies], [outlives]])


def alone(c: etha.TensorBusClient, _rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="b"):
        c.init_pair("p", "a", "b", 1, mesh([0]), (Replicate(),), timeout=1.0)
    assert time.monotonic() - began < 10
    with pytest.raises(ValueError, match="cannot be empty"):
        c.register_tensors("x", [])
    with pytest.raises(ValueError, match="not initialised"):
        c.register_tensors("x", [(numbers(2), "other")])
    with pytest.raises(ValueError, match="no batch"):
        c.transfer("x", "send")


def test_nobody_there(tmp_path: Path) -> None:
    run(tmp_path, [[alone]])
    with pytest.raises(ConnectionError, match=r"nowhere"):
        etha.TensorBusClient(0, str(tmp_path / "nowhere"), "", connection_timeout=0.2)


def mismatched(sends: bool) -> Callable[..., None]:
    def client(c: etha.TensorBusClient, _rank: int) -> None:
        c.init_pair("p", *(("a", "b") if sends else ("b", "a")), 1, mesh([0]), (Replicate(),))
        with pytest.raises((RuntimeError, ValueError), match="000000"):
            c.register_tensors("step", [(numbers(4 + sends), "p")], timeout=15)

    return client


def test_sides_whose_shapes_differ(tmp_path: Path) -> None:
    run(tmp_path, [[mismatched(True)], [mismatched(False)]])


def test_parts_that_no_layout_gives_are_named(tmp_path: Path) -> None:
    def sends(c: etha.TensorBusClient, rank: int) -> None:
        c.init_pair("p", "a", "b", 2, mesh([0, 1]), (Shard(0),))
        with pytest.raises(ValueError, match=r"tensor 0 of pair 'p': rank \d of 'a' has"):
            c.register_tensors("step", [(numbers(2 + 3 * rank, 3), "p")], timeout=20)

    def receives(c: etha.TensorBusClient, _rank: int) -> None:
        c.init_pair("p", "b", "a", 1, mesh([0]), (Replicate(),))

    run(tmp_path, [[sends] * 2, [receives]])


def test_ranks_with_different_numbers_of_tensors_are_named(tmp_path: Path) -> None:
    def sends(c: etha.TensorBusClient, rank: int) -> None:
        c.init_pair("p", "a", "b", 2, mesh([0, 1]), (Shard(0),))
        with pytest.raises(RuntimeError, match=r"ranks of 'a' give different numbers of tensors.*a 0.*a 1"):
            c.register_tensors("step", [(numbers(2, 3), "p")] * (1 + rank), timeout=20)

    def receives(c: etha.TensorBusClient, _rank: int) -> None:
        c.init_pair("p", "b", "a", 1, mesh([0]), (Replicate(),))

    run(tmp_path, [[sends] * 2, [receives]])


# ---- The scripts of docs/coming-from.md -----------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples/python"


def test_scripts_of_both(tmp_path: Path) -> None:
    """Ours is run, with four agents and two programs of two ranks; theirs wants GPUs, and differs in its import."""
    texts = [(EXAMPLES / f"from_etha_{whose}.py").read_text().splitlines() for whose in ("theirs", "ours")]
    differ = [(a, b) for a, b in zip(*texts, strict=True) if a != b and not a.startswith('"""')]
    names = "TensorBusAgent, bootstrap_client"
    assert differ == [(f"from etha.tensor_bus import {names}", f"from tensorbus.etha import {names}")]
    store = str(free_port())

    def main(role: str, rank: int, size: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "AGENT_FOLDER": str(tmp_path), "STORE_PORT": store}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        os.environ["AGENT_RANK_OFFSET"] = "2" if role == "engine" else "0"
        sys.path.insert(0, str(EXAMPLES))
        sys.argv = ["from_etha_ours.py", role]
        with (tmp_path / f"{role}{rank}.log").open("w") as log, contextlib.redirect_stdout(log):
            runpy.run_path(str(EXAMPLES / "from_etha_ours.py"), run_name="__main__")

    sides = {"agent": (4, free_port()), "trainer": (2, free_port()), "engine": (2, free_port())}
    each = [(role, rank, *side) for role, side in sides.items() for rank in range(side[0])]
    processes = [_fork.Process(target=main, args=args) for args in each]
    try:
        for process in processes:
            process.start()
        for process in processes[4:]:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in processes[4:]] == [0] * 4
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        lines = (tmp_path / f"engine{rank}.log").read_text()
        assert lines == "".join(f"engine {rank}: version {version}, equal\n" for version in (1, 2, 3))
