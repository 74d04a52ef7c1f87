"""Etha over gloo, and ours, side by side, on CPU processes: planning, and moving tensors, also through agents.

    ./dev test torch -k nothing   # makes build/torch-venv, once
    build/torch-venv/bin/python bench/python/etha_peers.py CHECKOUT [--mib 512] [--tensors 300] [--rounds 10]

CHECKOUT is one of Etha, whose package needs what tests/ancestors/requirements.txt lists. Planning is one rank's part
of it, for 64 and 256 ranks, half of which (TP8) send to the other half (TP4): the map, and the chunks of all tensors.
Their map is made by collectives; what counts is the processor time of one rank, without waiting, and without the
process groups that their broadcasts need.

Moving is from four ranks, which have rows, to four others, which want columns: by ``bucket_comm`` of either, and by
blocking transfers of clients, each of which has an agent; one tensor, and many. Tensors are allocated by torch, and
once more by ``tensorbus.empty``, whose memory other processes can map. The first transfer, which makes connections
and maps memory, is told apart from the later ones. All of it is in one run, on the same tensors, which are compared.
The copy of as many bytes by two processes, each within itself, shows what the machine can do.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python")]
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # which DTensor imports in each process otherwise
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402

import tensorbus as tb  # noqa: E402
import tensorbus.etha  # noqa: E402
from tensorbus.etha import comm as our_comm  # noqa: E402


def import_etha(checkout: str) -> Any:
    """Their package, on a machine without a GPU."""
    sys.path.insert(0, str(Path(checkout).resolve() / "src"))
    sys.modules["etcd3"] = types.ModuleType("etcd3")  # which their package imports, and does not use here
    import etha.comm
    import etha.comm.get_chunks
    import etha.tensor_bus

    done = types.SimpleNamespace(record=lambda: None, query=lambda: True, elapsed_time=lambda _: 0.0)
    torch.cuda.Event = lambda **_: done  # type: ignore[assignment, misc]
    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    init = dist.init_process_group
    dist.init_process_group = lambda backend, **how: init("gloo", **how)  # type: ignore[assignment]  # noqa: ARG005
    return etha


def run_ranks(nranks: int, job: Callable[..., None], *args: Any) -> int:
    """Forks ranks of one process group, and waits for them."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(nranks):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    torch.set_num_threads(1)
                    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=nranks)
                    with contextlib.suppress(KeyboardInterrupt):
                        job(rank, *args)
                    dist.barrier()
                    code = 0
                except BaseException as error:
                    print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(code)
            children.append(child)
        return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


# ---- Planning -------------------------------------------------------------------------------------------------------


def plan(rank: int, theirs: Any, nranks: int, tensors: int, rounds: int) -> None:
    """Times the last rank's part."""
    half = nranks // 2
    meshes = [DeviceMesh("cpu", torch.arange(first, first + half).view(-1, tp)) for first, tp in ((0, 8), (half, 4))]
    shapes = [(4096, 4096), (4096, 1024), (1024, 4096)]
    parts = [torch.empty(shape[0], shape[1] // 4, device="meta") for shape in shapes]
    taken: dict[str, list[float]] = {}
    if rank < half:
        parts = [torch.empty(shape[0] // 8, shape[1], device="meta") for shape in shapes]
    places = ((Replicate(), Shard(0)), (Replicate(), Shard(1)))
    group_of = sys.modules["etha.comm.get_chunks"]
    group_of.get_or_create_process_group = lambda ranks: None  # type: ignore[attr-defined]  # noqa: ARG005
    is_measured = rank == nranks - 1
    counts = {}
    for name, comm in (("Etha", theirs), ("tensorbus", our_comm)):
        for _ in range(rounds):
            our_comm._boxes.cache_clear()  # nothing is remembered from the round before
            dist.barrier()
            begin = time.process_time()
            made = comm.get_m2m_map(meshes[0], places[0], meshes[1], places[1], group=dist.group.WORLD)
            took_map = time.process_time() - begin
            if not is_measured:
                continue
            begin = time.process_time()
            kind = {"source_tensor": None, "target_tensor": None}
            side = "source_tensor" if rank < half else "target_tensor"
            chunks = [comm.m2m_to_chunks(made, rank, **kind | {side: parts[i % 3]}) for i in range(tensors)]
            taken.setdefault(name, []).append(took_map + time.process_time() - begin)
            taken.setdefault(f"{name}, map", []).append(took_map)
            counts[name] = sum(map(len, chunks))
        dist.barrier()
    if is_measured:
        medians = {name: statistics.median(each) * 1e3 for name, each in taken.items()}
        for what, end in (("map and chunks", ""), ("map", ", map")):
            a, b = medians["Etha" + end], medians["tensorbus" + end]
            print(f"plan, {nranks} ranks, {tensors} tensors, {what}: Etha {a:.2f} ms", end="")
            print(f", tensorbus {b:.2f} ms ({a / b:.0f} times)", flush=True)


# ---- Moving ---------------------------------------------------------------------------------------------------------


class Weights:
    """A rank's parts of all tensors, of which ranks 0 to 3 have rows, 4 to 7 columns."""

    def __init__(self, rank: int, count: int, side: int, is_ours: bool) -> None:
        self.sends = rank < 4
        numbers = torch.arange(side)
        mine = numbers.chunk(4)[rank % 4]
        rows, columns = (mine, numbers) if self.sends else (numbers, mine)
        self._wanted = (rows[:, None] * 7 + columns[None, :]).remainder(8191).float()
        shape = tuple(self._wanted.shape)
        self.tensors = [tb.empty(shape, "f32").torch() if is_ours else torch.empty(shape) for _ in range(count)]
        self.begin(0)

    def begin(self, version: int) -> None:
        """Gives sources their values, and targets others."""
        for i, tensor in enumerate(self.tensors):
            if self.sends:
                torch.add(self._wanted, i + version, out=tensor)
            else:
                tensor.fill_(-1)

    def check(self, version: int) -> None:
        """Fails unless all values are those of the version."""
        for i, tensor in enumerate(self.tensors):
            assert torch.equal(tensor, self._wanted + (i + version)), (version, i)


@dataclass
class Cost:
    """What a transfer took: seconds until all ranks had ended it, and seconds of processor time of all processes."""

    wall: float
    cpu: float


def cpu_of(pids: Iterable[int]) -> float:
    """The processor time of these processes and of those that they have started, in seconds."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # of threads that have ended, too
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                total += cpu_of(map(int, children.read_text().split()))
    return total


def tell(what: str, total: int, taken: dict[str, list[Cost]], floor: Cost, first: Cost | None = None) -> Cost:
    """Prints the best transfer after the first, and the first; returns the best of those that were given first.

    How many times as fast one is goes by the best, which other work on the machine disturbs least. Processor time tells
    the same on a machine that does other work as well; ``floor`` is that of a copy of as many bytes.
    """
    for name, (begun, *each) in taken.items():
        best = Cost(min(cost.wall for cost in each), statistics.mean(cost.cpu for cost in each))
        first = first or best
        print(f"{what}: {name} {best.wall * 1e3:.0f} ms, {total / best.wall / 1e9:.2f} GB/s", end="")
        print(f" ({first.wall / best.wall:.1f} times; a copy {first.wall / floor.wall:.1f})", end="")
        print(f"; processor time {best.cpu * 1e3:.0f} ms ({first.cpu / best.cpu:.1f} times", end="")
        print(f"; a copy {first.cpu / floor.cpu:.1f}); the first one {begun.wall * 1e3:.0f} ms", flush=True)
    assert first is not None
    return first


def measure(weights: Weights, version: int, meet: Callable[[], Any], transfer: Callable[[], Any]) -> Cost:
    """What a transfer takes until all ranks have ended, and this rank's processor time; the tensors are compared."""
    weights.begin(version)
    meet()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    transfer()
    used = time.process_time() - begin_cpu
    meet()
    wall = time.perf_counter() - begin
    weights.check(version)
    return Cost(wall, used)


WAYS = (("Etha, gloo", False, False), ("tensorbus", True, False), ("tensorbus, tensorbus.empty", True, True))


def move(rank: int, theirs: Any, count: int, side: int, rounds: int, floor: Cost) -> None:
    """By ``bucket_comm``, in turns."""
    meshes = [DeviceMesh("cpu", torch.arange(first, first + 4)) for first in (0, 4)]
    ready = []
    for name, is_ours, has_our_memory in WAYS:
        comm = our_comm if is_ours else theirs.comm
        weights = Weights(rank, count, side, has_our_memory)
        made = comm.get_m2m_map(meshes[0], (Shard(0),), meshes[1], (Shard(1),), group=dist.group.WORLD)
        chunks = []
        for tensor in weights.tensors:
            parts = (tensor, None) if weights.sends else (None, tensor)
            chunks += comm.m2m_to_chunks(made, rank, *parts)
        buckets = comm.chunk_to_bucket_ops(chunks, 16 << 20)
        ready.append((name, weights, lambda c=comm, b=buckets: c.bucket_comm(b)))
    taken: dict[str, list[Cost]] = {}
    for version in range(1, rounds + 2):
        for name, weights, transfer in ready:
            cost = measure(weights, version, dist.barrier, transfer)
            used = torch.tensor(cost.cpu, dtype=torch.float64)
            dist.all_reduce(used)
            taken.setdefault(name, []).append(Cost(cost.wall, used.item()))
    if rank == 0:
        total = count * side * side * 4
        tell(f"move, {total >> 20} MiB in {count} tensors", total, taken, floor)


def free_port() -> int:
    """One that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def move_through_agents(theirs: Any, count: int, side: int, rounds: int, floor: Cost) -> int:
    """By clients, four that send and four that receive, and their agents."""
    total = count * side * side * 4
    fork = multiprocessing.get_context("fork")
    codes: list[int] = []
    first: Cost | None = None
    for name, is_ours, has_our_memory in WAYS:
        package = tensorbus.etha if is_ours else theirs.tensor_bus
        ports = free_port(), free_port()
        meeting, times = fork.Barrier(8), fork.SimpleQueue()
        agents: list[Any] = []
        used = fork.RawArray("d", 8)
        with tempfile.TemporaryDirectory() as folder:

            def serve(rank: int, package: Any = package, ports: Any = ports, folder: str = folder) -> None:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "8"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
                paths = f"{folder}/{rank}_command", f"{folder}/{rank}_state"
                package.TensorBusAgent(rank, 8, "127.0.0.1", ports[1], *paths).run()

            def use(
                rank: int,
                package: Any = package,
                folder: str = folder,
                has_our_memory: bool = has_our_memory,
                meeting: Any = meeting,
                times: Any = times,
                agents: Any = agents,
                used: Any = used,
            ) -> None:
                torch.set_num_threads(1)
                os.environ["RANK"] = str(rank % 4)
                weights = Weights(rank, count, side, has_our_memory)
                client = package.TensorBusClient(rank, f"{folder}/{rank}_command", f"{folder}/{rank}_state", 60.0)
                sides = ("a", "b") if weights.sends else ("b", "a")
                mesh = DeviceMesh("cpu", torch.arange(4), _init_backend=False, _rank=rank % 4)
                client.init_pair("p", *sides, 4, mesh, (Shard(0 if weights.sends else 1),), timeout=60.0)
                batch = client.register_tensors("step", [(t, "p") for t in weights.tensors], 16 << 20, timeout=120.0)
                kind = "send" if weights.sends else "recv"
                found = []
                for version in range(1, rounds + 2):
                    meeting.wait()
                    of_agents = cpu_of(agent.pid for agent in agents) if rank == 0 else 0.0
                    cost = measure(
                        weights, version, meeting.wait, lambda: batch.transfer(kind, blocking=True, timeout=60.0)
                    )
                    of_agents = (cpu_of(agent.pid for agent in agents) if rank == 0 else 0.0) - of_agents
                    used[rank] = cost.cpu
                    meeting.wait()
                    found.append(Cost(cost.wall, sum(used) + of_agents))
                if rank == 0:
                    times.put(found)
                meeting.wait()

            agents += [fork.Process(target=serve, args=(rank,)) for rank in range(8)]
            clients = [fork.Process(target=use, args=(rank,)) for rank in range(8)]
            for process in (*agents, *clients):
                process.start()
            for client in clients:
                client.join(300)
            codes.append(max(1 if client.exitcode is None else abs(client.exitcode) for client in clients))
            if codes[-1] == 0:
                what = f"move through agents, {total >> 20} MiB in {count} tensors"
                first = tell(what, total, {name: times.get()}, floor, first)
            for process in (*clients, *agents):
                process.terminate()
                process.join()
    return max(codes)


def copy(rank: int, nbytes: int, rounds: int, told: Any) -> None:
    """What the machine can do: half of the bytes, from one tensor of the process to another."""
    tensors = torch.ones(2, nbytes // 2, dtype=torch.uint8)
    taken = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        tensors[0].copy_(tensors[1])
        used = torch.tensor(time.process_time() - begin_cpu, dtype=torch.float64)
        dist.barrier()
        wall = time.perf_counter() - begin
        dist.all_reduce(used)
        taken.append(Cost(wall, used.item()))
    if rank == 0:
        floor = Cost(min(cost.wall for cost in taken[1:]), statistics.mean(cost.cpu for cost in taken[1:]))
        tell(f"copy, {nbytes >> 20} MiB by two processes", nbytes, {"torch": taken}, floor)
        told.put(floor)


def main() -> int:
    """Plans, then moves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkout", help="of Etha")
    parser.add_argument("--mib", type=int, default=512, help="of the tensors, in all")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256], help="to plan for")
    options = parser.parse_args()
    theirs = import_etha(options.checkout)
    gc.freeze()  # else every collection in a child copies what it has in common with the others
    codes = []
    for nranks in options.ranks:
        codes.append(run_ranks(nranks, plan, theirs.comm, nranks, options.tensors, min(3, options.rounds)))
    told = multiprocessing.get_context("fork").SimpleQueue()
    codes.append(run_ranks(2, copy, options.mib << 20, options.rounds, told))
    floor = told.get()
    for count in (1, options.tensors):
        side = int((options.mib * 2**18 / count) ** 0.5) // 16 * 16
        codes.append(run_ranks(8, move, theirs, count, side, options.rounds, floor))
        codes.append(move_through_agents(theirs, count, side, options.rounds, floor))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
