"""Etha over gloo, Megatron-LM's planner and gloo service, and ours, side by side, on CPU processes.

    ./dev test torch -k nothing   # makes build/torch-venv, once
    build/torch-venv/bin/python bench/python/ancestors.py ETHA [--mib 512] [--tensors 1 300] [--rounds 10]

ETHA is a checkout, whose package needs what tests/ancestors/requirements.txt lists; Megatron-LM is the environment's.
Planning is one rank's part of it, in processor time, for 64 and 256 ranks, half of which (TP8) send to the other half
(TP4). Of Megatron it begins with the rank's metadata and the messages of all ranks, which ``build_local_reshard_plan``
of either exchanges, and ends with the operations; a second line has ``build_plan_from_rosters`` alone, which gets the
metadata of all ranks as objects of Python. Of Etha it is what an agent does: the map, made by collectives in whose
process groups nobody waits here, the chunks of all tensors, and the buckets, in one direction (its agents do both).
Next to it are the call by which our agent plans a batch, ``tb_ir_create``, with its layouts, and the functions of
``tensorbus.etha.comm``, which make objects of Python as Etha's do.

Moving is from four ranks to four others, by all ways in turns, on the same tensors: one, and those of a model. The
source has two replicas, each cut over two ranks, the target is cut over four: along dim 1, and every other tensor of a
model along dim 0, as the two layers of an MLP are. The ways are ``swap_model_weights`` with Megatron's gloo service and
Etha's ``bucket_comm``; ours of the same names; and transfers of clients with an agent each, from
rows to columns and back: Etha's agents fail where a replica has nothing to send. Tensors are allocated by torch, whose
memory clients of either move to shared memory when they register it, and once more by ``tensorbus.empty``, whose memory
other processes can map, as that of ``tensorbus.share``. The first transfer, which makes connections
and maps memory, is told apart. All values are compared each time. The copy of as many bytes by two processes, each
within itself, shows what the machine can do: where even that is not 8 times as fast as theirs, nothing that copies the
bytes can be.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import pickle
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
sys.path[:0] = [str(HERE.parents[1] / "python"), str(HERE.parents[1] / "python" / "tests_torch")]
warnings.simplefilter("ignore")

import megatron_models  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # which DTensor imports in each process otherwise
import torch.distributed as dist  # noqa: E402
from megatron.core.resharding import planner as their_planner  # noqa: E402
from megatron.core.resharding import refit as their_refit  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402

import tensorbus as tb  # noqa: E402
import tensorbus.etha  # noqa: E402
import tensorbus.megatron as tm  # noqa: E402
from tensorbus import _dtensor, _ir  # noqa: E402
from tensorbus._c import lib, tb_ir, tb_ir_opts, tb_tensor_spec  # noqa: E402
from tensorbus.etha import comm as our_comm  # noqa: E402
from tensorbus.megatron import _planner  # noqa: E402

BUCKET_BYTES = 16 << 20


def import_etha(checkout: str) -> Any:
    """Their package, on a machine without a GPU."""
    sys.path.insert(0, str(Path(checkout).resolve() / "src"))
    sys.modules["etcd3"] = types.ModuleType("etcd3")  # which their package imports, and does not use here
    import etha.comm
    import etha.comm.get_chunks
    import etha.tensor_bus

    done = types.SimpleNamespace(record=lambda: None, query=lambda: True, elapsed_time=lambda _: 0.0)
    torch.cuda.Event = lambda **_: done  # type: ignore[assignment, misc]
    megatron_models._NoStream.query = lambda *_: True  # which is Event where Megatron runs, too
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
    taken: dict[str, list[tuple[float, ...]]] = {}
    if rank < half:
        parts = [torch.empty(shape[0] // 8, shape[1], device="meta") for shape in shapes]
    places = ((Replicate(), Shard(0)), (Replicate(), Shard(1)))
    group_of = sys.modules["etha.comm.get_chunks"]
    group_of.get_or_create_process_group = lambda ranks: None  # type: ignore[attr-defined]  # noqa: ARG005
    is_measured = rank == nranks - 1
    moved = {}
    for name, comm, count in (("Etha", theirs, rounds), ("tensorbus.etha.comm", our_comm, 3 * rounds)):
        for _ in range(count):
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
            took_chunks = time.process_time() - begin
            flat = [chunk for its in chunks for chunk in its]
            begin = time.process_time()
            comm.chunk_to_bucket_ops(flat, BUCKET_BYTES)
            took = took_map, took_map + took_chunks, took_map + took_chunks + time.process_time() - begin
            taken.setdefault(name, []).append(took)
            moved[name] = sum(chunk.nbytes for chunk in flat)
        dist.barrier()
    if not is_measured:
        return
    sides = zip(meshes, places, strict=True)
    texts = [_dtensor.layout_text(each.shape, _dtensor.own_ranks(each), place) for each, place in sides]
    for _ in range(3 * rounds):
        seconds, moved["tensorbus"] = plan_as_agent(rank, texts, [shapes[i % 3] for i in range(tensors)])
        taken.setdefault("tensorbus", []).append((seconds,) * 3)
    assert len(set(moved.values())) == 1, moved
    medians = {name: [statistics.median(each) * 1e3 for each in zip(*its, strict=True)] for name, its in taken.items()}
    for what, i, name in (
        ("map, chunks and buckets", 2, "tensorbus"),
        ("map, chunks and buckets", 2, "tensorbus.etha.comm"),
        ("map and chunks", 1, "tensorbus.etha.comm"),
        ("map", 0, "tensorbus.etha.comm"),
    ):
        a, b = medians["Etha"][i], medians[name][i]
        print(f"plan, {nranks} ranks, {tensors} tensors, {what}: Etha {a:.2f} ms", end="")
        print(f", {name} {b:.2f} ms ({a / b:.0f} times)", flush=True)


def plan_as_agent(rank: int, layouts: list[str], shapes: list[tuple[int, ...]]) -> tuple[float, int]:
    """What an agent of ours takes to plan a batch of which it knows the tensors; and the bytes that it moves."""
    begin = time.process_time()
    src, dst = map(tb.layout, layouts)
    took = time.process_time() - begin
    specs = [_ir._spec(f"{i:06d}", tb.TensorSpec(src, dst, shape, "f32")) for i, shape in enumerate(shapes)]
    array, out = (tb_tensor_spec * len(specs))(*specs), ctypes.POINTER(tb_ir)()
    opts = tb_ir_opts(bucket_size=BUCKET_BYTES)
    begin = time.process_time()
    lib.tb_ir_create(rank, array, len(specs), None, ctypes.byref(opts), ctypes.byref(out))
    took += time.process_time() - begin
    made = tb.IR(out)
    return took, sum(made.c.chunks[i].nbytes for i in range(made.nchunks))


def metadata(nranks: int, tensors: int) -> list[tuple[list[Any], list[Any]]]:
    """Of ranks 0, 1, ...: the first half has the source, in TP8, the second half the target, in TP4."""
    found = []
    half = nranks // 2
    for rank in range(nranks):
        is_source = rank < half
        tp, base = (8, 0) if is_source else (4, half)
        first = base + (rank - base) // tp * tp
        group = list(range(first, first + tp))
        copies = list(range(base + (rank - base) % tp, base + half, tp))
        metas = []
        for i in range(tensors):
            shape = [4096, 4096] if i % 10 else [4096]
            if i % 10:
                shape[i % 2] //= tp
            metas.append(
                tm.ParameterMetadata(
                    name=f"layer.{i}",
                    shape=tuple(shape),
                    dtype=torch.bfloat16,
                    element_size=2,
                    is_tp=bool(i % 10),
                    partition_dim=i % 2,
                    partition_stride=2 if i % 10 == 4 else 1,
                    owner_rank=rank,
                    tensor_parallel_group_ranks=group,
                    data_parallel_group_ranks=copies,
                    resolved_name=f"layer.{i}",
                )
            )
        found.append((metas, []) if is_source else ([], metas))
    return found


def seconds(function: Any, rounds: int) -> float:
    """The processor time of a call that waits for nobody, the median of several."""
    taken = []
    for _ in range(rounds):
        begin = time.process_time()
        function()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def compare_planning(numbers: list[int], tensors: int, rounds: int) -> None:
    """Prints how long one rank plans, Megatron's and ours: from messages to the plan, and what both have."""
    for nranks in numbers:
        gathered = metadata(nranks, tensors)
        rosters = their_planner.index_metadata_rosters(gathered)
        mine, rank = gathered[-1], nranks - 1
        messages = [pickle.dumps(pair) for pair in gathered]
        our_messages = [pickle.dumps(tuple(map(_planner.tell, pair))) for pair in gathered]

        def plan_theirs(mine: Any = mine, rank: int = rank, messages: Any = messages) -> Any:
            pickle.dumps(mine)
            found = their_planner.index_metadata_rosters([pickle.loads(each) for each in messages])
            return their_planner.build_plan_from_rosters(*found, rank)

        def plan_ours(mine: Any = mine, rank: int = rank, messages: Any = our_messages) -> Any:
            pickle.dumps(tuple(map(_planner.tell, mine)))
            return _planner.plan_from_told([pickle.loads(each) for each in messages], rank, *mine)

        for what, theirs, ours in (
            ("from messages", plan_theirs, plan_ours),
            (
                "build_plan_from_rosters",
                lambda r=rosters, n=rank: their_planner.build_plan_from_rosters(*r, n),
                lambda r=rosters, n=rank: tm.build_plan_from_rosters(*r, n),
            ),
        ):
            check_plans(theirs(), ours())
            took = seconds(theirs, rounds), seconds(ours, 3 * rounds)
            print(f"plan, {nranks} ranks, {tensors} tensors, {what}: Megatron {took[0] * 1e3:.1f} ms", end="")
            print(f", tensorbus {took[1] * 1e3:.2f} ms ({took[0] / took[1]:.0f} times)", flush=True)


def check_plans(theirs: Any, ours: Any) -> None:
    """Fails unless both plans write the same elements of the same parameters."""
    written = []
    for plan in theirs, ours:
        sizes: dict[str, int] = {}
        for op in plan.recv_ops:
            spans = [span.stop - span.start for span in op.my_slice if span.stop is not None]
            sizes[op.param_name] = sizes.get(op.param_name, 0) + math.prod(spans) * 4096 ** op.my_slice.count(
                slice(None)
            )
        written.append(sizes)
    assert written[0].keys() == written[1].keys()
    assert all(written[0][name] == written[1][name] for name in written[0]), "the plans differ"


# ---- Moving ---------------------------------------------------------------------------------------------------------


def dim_of(i: int) -> int:
    """Along which the i-th tensor is cut."""
    return 1 - i % 2


def places(is_source: bool, dim: int) -> tuple[Any, ...]:
    """On a mesh of (2, 2), or of 4."""
    return (Replicate(), Shard(dim)) if is_source else (Shard(dim),)


class Weights:
    """A rank's parts of all tensors. Ranks 0 to 3 have the source, 4 to 7 the target."""

    def __init__(self, rank: int, count: int, side: int, is_ours: bool, is_turned: bool = False) -> None:
        self.sends = rank < 4
        has_half = self.sends and not is_turned
        part = torch.arange(side).chunk(2)[rank % 2] if has_half else torch.arange(side).chunk(4)[rank % 4]
        numbers = part[:, None] * 7 + torch.arange(side)[None, :], torch.arange(side)[:, None] * 7 + part[None, :]
        self._wanted = [each.remainder(8191).float() for each in numbers]  # cut along dim 0, and along dim 1
        if self.sends and is_turned:
            self._wanted.reverse()
        self.tensors = []
        for i in range(count):
            shape = tuple(self._wanted[dim_of(i)].shape)
            self.tensors.append(tb.empty(shape, "f32").torch() if is_ours else torch.empty(shape))
        self.begin(0)

    def begin(self, version: int) -> None:
        """Gives sources their values, and targets others."""
        for i, tensor in enumerate(self.tensors):
            if self.sends:
                torch.add(self._wanted[dim_of(i)], i + version, out=tensor)
            else:
                tensor.fill_(-1)

    def check(self, version: int) -> None:
        """Fails unless all values are those of the version."""
        for i, tensor in enumerate(self.tensors):
            assert torch.equal(tensor, self._wanted[dim_of(i)] + (i + version)), (version, i)


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


def tell(what: str, total: int, taken: dict[str, list[Cost]], floor: Cost, base: Cost | None = None) -> Cost:
    """Prints the best transfer after the first, and the first, of each way; returns that of the last way.

    The best, because other work on the machine disturbs it least, and the mean processor time of all processes, which
    tells the same on a machine that does other work as well. How many times as fast as ``base`` that is stands beside
    it, and, with ``floor``, how many times as fast a copy of as many bytes is.
    """
    best = base
    for name, (begun, *each) in taken.items():
        best = Cost(min(cost.wall for cost in each), statistics.mean(cost.cpu for cost in each))
        print(f"{what}: {name} {best.wall * 1e3:.0f} ms, {total / best.wall / 1e9:.2f} GB/s", end="")
        print(f", processor time {best.cpu * 1e3:.0f} ms, the first {begun.wall * 1e3:.0f} ms", end="")
        if base is not None:
            times = base.wall / best.wall, base.cpu / best.cpu
            print(f": {times[0]:.1f} times as fast, processor time {times[1]:.1f}", end="")
        else:
            times = best.wall / floor.wall, best.cpu / floor.cpu
            print(f"; a copy is {times[0]:.1f} times as fast, processor time {times[1]:.1f}", end="")
            print(": nothing that copies can be 8 times as fast" if times[1] < 8 else "", end="")
        print(flush=True)
    assert best is not None
    return best


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


class Model(torch.nn.Module):
    """The tensors as weights of Megatron's layers."""

    def __init__(self, weights: Weights, tp: Any, dp: Any) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_moe_experts=None)
        self.pg_collection = types.SimpleNamespace(tp=tp, dp=dp, ep=None, pp=None, expt_tp=None)
        for i, tensor in enumerate(weights.tensors):
            weight = torch.nn.Parameter(tensor, requires_grad=False)
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim_of(i), 1
            self.register_parameter(f"w{i}", weight)


def ways_of(weights: Weights, rank: int, theirs: Any, groups: Any) -> dict[str, Callable[[], Any]]:
    """How these tensors can be moved, with a rank's tensor-parallel group and that of its replicas."""
    meshes = [DeviceMesh("cpu", torch.arange(4).view(2, 2)), DeviceMesh("cpu", torch.arange(4, 8))]

    def make_buckets(comm: Any) -> Callable[[], Any]:
        maps = [
            comm.get_m2m_map(meshes[0], places(True, dim), meshes[1], places(False, dim), group=dist.group.WORLD)
            for dim in (0, 1)
        ]
        parts = [(tensor, None) if weights.sends else (None, tensor) for tensor in weights.tensors]
        chunks = [chunk for i, part in enumerate(parts) for chunk in comm.m2m_to_chunks(maps[dim_of(i)], rank, *part)]
        buckets = comm.chunk_to_bucket_ops(chunks, BUCKET_BYTES)
        return lambda: comm.bucket_comm(buckets)

    model = Model(weights, *groups)
    both = (model, None) if weights.sends else (None, model)
    swap = their_refit.swap_model_weights
    gloo, service = their_refit.get_or_create_service("gloo"), tm.CopyService(timeout=120.0)
    return {
        "Etha, gloo": make_buckets(theirs.comm),
        "tensorbus.etha, bucket_comm": make_buckets(our_comm),
        "Megatron, gloo": lambda: swap(*both, refit_method=gloo),
        "tensorbus.megatron, CopyService": lambda: swap(*both, refit_method=service),
        "tensorbus.megatron, swap_model_weights": lambda: tm.swap_model_weights(*both, "gloo"),
    }


def move(rank: int, theirs: Any, count: int, side: int, rounds: int, floor: Cost) -> None:
    """By all ways within one process group, in turns."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3), (4, 5, 6, 7))}
    made |= {(i,): dist.new_group([i]) for i in range(4, 8)}
    first = rank // 2 * 2, rank % 2  # of a source
    groups = (
        [made[first[0], first[0] + 1], made[first[1], first[1] + 2]] if rank < 4 else [made[4, 5, 6, 7], made[rank,]]
    )
    taken: dict[str, list[Cost]] = {}
    with megatron_models.without_gpu():
        ready = []
        for kind in ("torch's memory", "tensorbus.empty"):
            weights = Weights(rank, count, side, kind != "torch's memory")
            for way, transfer in ways_of(weights, rank, theirs, groups).items():
                if way.startswith("tensorbus"):
                    ready.append((f"{way}, {kind}", weights, transfer))
                elif kind == "torch's memory":
                    ready.append((way, weights, transfer))
        for version in range(1, rounds + 2):
            for name, weights, transfer in ready:
                cost = measure(weights, version, dist.barrier, transfer)
                used = torch.tensor(cost.cpu, dtype=torch.float64)
                dist.all_reduce(used)
                taken.setdefault(name, []).append(Cost(cost.wall, used.item()))
    if rank == 0:
        total = count * side * side * 4
        what = f"move, {total >> 20} MiB in {count} tensors"
        for whose in ("Etha", "Megatron"):
            its = next(name for name in taken if name.startswith(whose))
            base = tell(what, total, {its: taken[its]}, floor)
            ours = {name: each for name, each in taken.items() if name.startswith(f"tensorbus.{whose.lower()}")}
            tell(what, total, ours, floor, base)


AGENTS = (
    ("Etha, gloo", False, False),
    ("tensorbus.etha, torch's memory", True, False),
    ("tensorbus.etha, tensorbus.empty", True, True),
)


def free_port() -> int:
    """One that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def move_through_agents(theirs: Any, count: int, side: int, rounds: int, floor: Cost) -> int:
    """By clients, four that send and four that receive, and their agents: from rows to columns, or back."""
    total = count * side * side * 4
    fork = multiprocessing.get_context("fork")
    codes: list[int] = []
    first: Cost | None = None
    for name, is_ours, has_our_memory in AGENTS:
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
                weights = Weights(rank, count, side, has_our_memory, is_turned=True)
                while True:
                    try:
                        client = package.TensorBusClient(
                            rank, f"{folder}/{rank}_command", f"{folder}/{rank}_state", 60.0
                        )
                        break
                    except Exception as error:  # theirs looks into the agent's state before all of it is there
                        if type(error).__name__ != "NotFoundError":
                            raise
                        time.sleep(0.1)
                sides = ("a", "b") if weights.sends else ("b", "a")
                mesh = DeviceMesh("cpu", torch.arange(4), _init_backend=False, _rank=rank % 4)
                for dim in (0, 1):
                    placement = Shard(1 - dim if weights.sends else dim)
                    client.init_pair(f"dim{dim}", *sides, 4, mesh, (placement,), timeout=60.0)
                parts = [(tensor, f"dim{dim_of(i)}") for i, tensor in enumerate(weights.tensors)]
                batch = client.register_tensors("step", parts, BUCKET_BYTES, timeout=120.0)
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
                base = tell(what, total, {name: times.get()}, floor, first)
                first = first or base
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
        print(f"copy, {nbytes >> 20} MiB by two processes: {floor.wall * 1e3:.0f} ms", end="")
        print(f", {nbytes / floor.wall / 1e9:.2f} GB/s, processor time {floor.cpu * 1e3:.0f} ms", flush=True)
        told.put(floor)


def main() -> int:
    """Plans, then moves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkout", metavar="ETHA", help="a checkout")
    parser.add_argument("--mib", type=int, default=512, help="of the tensors, in all")
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 300], help="how many, one after the other")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256], help="to plan for")
    options = parser.parse_args()
    theirs = import_etha(options.checkout)
    compare_planning(options.ranks, max(options.tensors), min(3, options.rounds))
    gc.freeze()  # else every collection in a child copies what it has in common with the others
    codes = []
    for nranks in options.ranks:
        codes.append(run_ranks(nranks, plan, theirs.comm, nranks, max(options.tensors), min(3, options.rounds)))
    told = multiprocessing.get_context("fork").SimpleQueue()
    codes.append(run_ranks(2, copy, options.mib << 20, options.rounds, told))
    floor = told.get()
    for count in options.tensors:
        side = int((options.mib * 2**18 / count) ** 0.5) // 16 * 16
        codes.append(run_ranks(8, move, theirs, count, side, options.rounds, floor))
        codes.append(move_through_agents(theirs, count, side, options.rounds, floor))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
