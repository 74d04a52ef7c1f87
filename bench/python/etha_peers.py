"""Etha's chunks and buckets over gloo, and ours, side by side, on CPU processes: planning, and moving tensors.

    ./dev test torch -k nothing   # makes build/torch-venv, once
    build/torch-venv/bin/python bench/python/etha_peers.py CHECKOUT [--mib 512] [--tensors 300] [--rounds 5]

CHECKOUT is one of Etha, whose package needs msgspec. Planning is one rank's part of it, for 64 and 256 ranks, half of
which (TP8) send to the other half (TP4): the map, and the chunks of all tensors. Their map is made by collectives; what
counts is the processor time of one rank, without waiting, and without the process groups that their broadcasts need.
Moving is from four ranks, which have rows, to four others, which want columns, by ``bucket_comm`` of either: one tensor,
and many. All of it is in one run, on the same tensors, which are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python")]
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # which DTensor imports in each process otherwise
import torch.distributed as dist  # noqa: E402
from tensorbus.etha import comm as our_comm  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402


def import_etha(checkout: str) -> Any:
    """Their package, on a machine without a GPU."""
    sys.path.insert(0, str(Path(checkout).resolve() / "src"))
    sys.modules["etha.tensor_bus"] = types.ModuleType("etha.tensor_bus")  # it needs more packages, and is not measured
    import etha.comm
    import etha.comm.get_chunks

    done = types.SimpleNamespace(record=lambda: None, query=lambda: True)
    torch.cuda.Event = lambda: done  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    return etha.comm


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
    meshes = [
        DeviceMesh("cpu", torch.arange(first, first + half).view(-1, tp)) for first, tp in ((0, 8), (half, 4))
    ]
    shapes = [(4096, 4096), (4096, 1024), (1024, 4096)]
    parts = [torch.empty(shape[0], shape[1] // 4, device="meta") for shape in shapes]
    taken: dict[str, list[float]] = {}
    if rank < half:
        parts = [torch.empty(shape[0] // 8, shape[1], device="meta") for shape in shapes]
    places = ((Replicate(), Shard(0)), (Replicate(), Shard(1)))
    group_of = sys.modules["etha.comm.get_chunks"]
    group_of.get_or_create_process_group = lambda ranks: None  # type: ignore[attr-defined]
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


def move(rank: int, theirs: Any, count: int, side: int, rounds: int) -> None:
    """Ranks 0 to 3 have rows, 4 to 7 columns."""
    is_source = rank < 4
    meshes = [DeviceMesh("cpu", torch.arange(first, first + 4)) for first in (0, 4)]
    numbers = torch.arange(side)
    mine = numbers.chunk(4)[rank % 4]
    rows, columns = (mine, numbers) if is_source else (numbers, mine)
    wanted = (rows[:, None] * 7 + columns[None, :]).remainder(8191).float()
    tensors = [torch.full(wanted.shape, -1.0) for _ in range(count)]
    taken: dict[str, list[float]] = {}
    buckets = {}
    for name, comm in (("Etha, gloo", theirs), ("tensorbus", our_comm)):
        made = comm.get_m2m_map(meshes[0], (Shard(0),), meshes[1], (Shard(1),), group=dist.group.WORLD)
        chunks = []
        for tensor in tensors:
            parts = (tensor, None) if is_source else (None, tensor)
            chunks += comm.m2m_to_chunks(made, rank, *parts)
        buckets[name] = comm, comm.chunk_to_bucket_ops(chunks, 16 << 20)
    for version in range(1, rounds + 2):
        for name, (comm, its) in buckets.items():
            for i, tensor in enumerate(tensors):
                if is_source:
                    torch.add(wanted, i + version, out=tensor)
                else:
                    tensor.fill_(-1)
            dist.barrier()
            begin = time.perf_counter()
            comm.bucket_comm(its)
            dist.barrier()
            if version > 1:  # the first one makes connections
                taken.setdefault(name, []).append(time.perf_counter() - begin)
            for i, tensor in enumerate(tensors):
                assert torch.equal(tensor, wanted + (i + version)), (name, version, i)
    if rank == 0:
        medians = {name: statistics.median(each) for name, each in taken.items()}
        total = count * side * side * 4
        for name, median in medians.items():
            times = medians["Etha, gloo"] / median
            print(f"move, {total >> 20} MiB in {count} tensors: {name} {median * 1e3:.0f} ms", end="")
            print(f", {total / median / 1e9:.2f} GB/s ({times:.1f} times)", flush=True)


def main() -> int:
    """Plans, then moves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkout", help="of Etha")
    parser.add_argument("--mib", type=int, default=512, help="of the tensors, in all")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256], help="to plan for")
    options = parser.parse_args()
    theirs = import_etha(options.checkout)
    gc.freeze()  # else every collection in a child copies what it has in common with the others
    codes = []
    for nranks in options.ranks:
        codes.append(run_ranks(nranks, plan, theirs, nranks, options.tensors, min(3, options.rounds)))
    for count in (1, options.tensors):
        side = int((options.mib * 2**18 / count) ** 0.5) // 16 * 16
        codes.append(run_ranks(8, move, theirs, count, side, options.rounds))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
