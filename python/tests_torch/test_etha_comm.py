"""tensorbus.etha.comm: chunks and buckets by Etha's calls, between ranks of one process group."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tensorbus as tb
from tensorbus.etha import comm
from tensorbus.etha.comm.ir import Chunk, Transport

_fork = multiprocessing.get_context("fork")
PATIENCE_S = 60.0


def run(folder: Path, size: int, function: Callable[[int], Any], survivors: int | None = None) -> list[Any]:
    """Forks the ranks of a process group; what they have returned. The first ``survivors`` have to."""
    results = _fork.Queue()

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        try:
            results.put((rank, function(rank), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(0)

    processes = [_fork.Process(target=main, args=(rank,)) for rank in range(size)]
    try:
        for process in processes:
            process.start()
        found = sorted(results.get(timeout=PATIENCE_S) for _ in range(survivors or size))
    finally:
        for process in processes:
            process.kill()
    failures = "\n".join(f"rank {rank}: {why}" for rank, _, why in found if why)
    assert not failures, failures
    return [result for _, result, _ in found]


def mesh(ranks: Any) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=0)


def indices(layout: tb.Layout, shape: tuple[int, ...], rank: int) -> list[torch.Tensor]:
    """Which indices of each dim the rank has."""
    segments = layout.local(shape, rank)
    return [torch.cat([torch.arange(a, b) for a, b in each] or [torch.arange(0)]) for each in segments]


def part(layout: tb.Layout, whole: torch.Tensor, rank: int) -> torch.Tensor | None:
    if rank not in layout.ranks:
        return None
    for dim, at in enumerate(indices(layout, tuple(whole.shape), rank)):
        whole = whole.index_select(dim, at)
    return whole.clone()


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


R, S0, S1 = Replicate(), Shard(0), Shard(1)
Side = tuple[Any, tuple[Any, ...]]
CASES: list[tuple[Side, Side, tuple[int, ...]]] = [
    (([0, 1, 2], (S0,)), ([3, 4, 5], (S1,)), (6, 9)),
    (([0, 1, 2], (S0,)), ([3, 4, 5], (S1,)), (7, 11)),  # uneven
    (([0, 1, 2, 3], (S0,)), ([4, 5], (S1,)), (5, 3)),  # some have nothing
    (([5, 0, 3], (S0,)), ([1, 4, 2], (S1,)), (9, 6)),  # ranks in any order
    (([[0, 1], [2, 3]], (R, S0)), ([4, 5], (R,)), (8, 5)),  # replicas share the work; broadcasts
    (([0], (R,)), ([1, 2, 3, 4, 5], (R,)), (4, 4)),
    (([0, 1, 2, 3], (S0,)), ([0, 1, 2, 3, 4, 5], (S1,)), (12, 6)),  # copies within ranks
    (([[0, 1], [2, 3]], (_StridedShard(1, split_factor=2), S1)), ([4, 5], (S0,)), (4, 8)),
    (([[0, 1], [2, 3]], (S0, S1)), ([5, 4], (S1,)), (5, 7, 3)),
]


def moves(rank: int) -> None:
    for (ranks, places), (others, other_places), shape in CASES:
        m2m = comm.get_m2m_map(mesh(ranks), places, mesh(others), other_places, group=dist.group.WORLD)
        whole = numbers(*shape)
        for bucket_size in (1, 64, 1 << 20):
            source, wanted = part(m2m.source, whole, rank), part(m2m.target, whole, rank)
            target = None if wanted is None else torch.full_like(wanted, -1)
            made = comm.m2m_to_chunks(m2m, rank, source, target, global_shape=shape)
            buckets = comm.chunk_to_bucket_ops(made, bucket_size)
            for version in range(2):
                if source is not None:
                    source.add_(version)
                if target is not None:
                    target.fill_(-1)
                comm.bucket_comm(buckets)
                if target is not None and wanted is not None:
                    assert torch.equal(target, wanted + version), (ranks, others, shape, bucket_size, version)


def test_every_element_between_meshes(tmp_path: Path) -> None:
    run(tmp_path, 6, moves)


def reduces(rank: int) -> None:
    cases: list[tuple[Side, Side, str]] = [
        (([0, 1, 2], (Partial(),)), ([3, 4], (R,)), "sum"),
        (([0, 1, 2], (Partial("avg"),)), ([3, 4], (S0,)), "avg"),
        (([0, 1, 2], (Partial("max"),)), ([0, 4], (S1,)), "max"),
    ]
    for (ranks, places), (others, other_places), op in cases:
        m2m = comm.get_m2m_map(mesh(ranks), places, mesh(others), other_places)
        assert m2m.source_partial_reductions == [(0, op)]
        # Sums that bf16 can't add up, but can hold.
        parts = [numbers(6, 4) + 255 + each for each in range(3)]
        stack = torch.stack(parts)
        value = {"sum": stack.sum(0), "avg": stack.mean(0), "max": stack.amax(0)}[op].to(torch.bfloat16)
        wanted = part(m2m.target, value, rank)
        target = None if wanted is None else torch.full_like(wanted, -1)
        source = parts[rank] if rank < 3 else None
        made = comm.m2m_to_chunks(m2m, rank, source, target, torch.bfloat16)
        if rank < 3:
            assert all(chunk.contributors == (0, 1, 2) for chunk in made)
        comm.bucket_comm(comm.chunk_to_bucket_ops(made, 1 << 20))
        if target is not None and wanted is not None:
            assert torch.equal(target, wanted), (op, target, wanted)
        assert source is None or torch.equal(source, numbers(6, 4) + 255 + rank)


def test_partial_sources_are_combined_in_their_dtype(tmp_path: Path) -> None:
    run(tmp_path, 5, reduces)


def copies(_rank: int) -> None:
    x = torch.cat([numbers(8), torch.full((8,), -1.0)])
    made = [
        Chunk(
            chunk_shape=(4,),
            transport=Transport.LOCAL,
            is_source=True,
            is_target=True,
            src_rank=0,
            src_idx=(i,),
            dst_ranks=(0,),
            dst_idx=(2 + i,),
            src_slice=(slice(4 * i, 4 * i + 4),),
            dst_slice=(slice(8 + 4 * i, 12 + 4 * i),),
            tensor=x,
        )
        for i in range(2)
    ]
    (bucket,) = comm.chunk_to_bucket_ops(made, 1 << 18)
    assert [(entry.chunk, entry.offset, entry.nbytes) for entry in bucket.entries] == [
        (made[0], 0, 16),
        (made[1], 64, 16),
    ]
    assert (bucket.total_bytes, bucket.transport, bucket.is_source, bucket.is_target) == (
        80,
        Transport.LOCAL,
        True,
        True,
    )
    comm.bucket_comm([bucket])
    assert torch.equal(x[8:], numbers(8))


def test_a_copy_within_a_rank_is_written_also_in_a_bucket_of_several(tmp_path: Path) -> None:
    run(tmp_path, 1, copies)


def test_transports_and_roles() -> None:
    """Which are told apart; a copy within a rank is never in a bucket with what its rank sends."""
    m2m = comm.get_m2m_map(mesh([0]), (R,), mesh([0, 1, 2]), (R,))
    x = numbers(4)
    made = comm.m2m_to_chunks(m2m, 0, x, x.clone())
    found = {chunk.transport: (chunk.is_source, chunk.is_target, chunk.src_rank, chunk.dst_ranks) for chunk in made}
    assert found == {Transport.LOCAL: (True, True, 0, (0,)), Transport.BROADCAST: (True, False, 0, (1, 2))}
    assert len(comm.chunk_to_bucket_ops(made, 1 << 20)) == 2
    (received,) = comm.m2m_to_chunks(m2m, 2, None, x)
    assert (received.transport, received.is_source, received.is_target) == (Transport.BROADCAST, False, True)
    m2m = comm.get_m2m_map(mesh([0, 1]), (Partial(),), mesh([2]), (R,))
    roles = {rank: comm.m2m_to_chunks(m2m, rank, x, x) for rank in range(4)}
    kinds = {rank: {(c.transport, c.is_source, c.is_target) for c in its} for rank, its in roles.items()}
    ships, reduces_only = (Transport.P2P, True, False), (Transport.NONE, True, False)
    assert kinds[0] == kinds[1] == {ships, reduces_only}
    assert kinds[2] == {(Transport.P2P, False, True)}
    assert roles[3] == []


def test_routes_are_those_of_all_ranks() -> None:
    m2m = comm.get_m2m_map(mesh([0, 1]), (S0,), mesh([2, 3, 4]), (S0,))
    assert (m2m.grid, m2m.source_num_slicers, m2m.target_num_slicers) == ((6,), [3], [2])
    found = [(r.src.rank, r.src.cell, [(d.rank, d.cell) for d in r.dsts], r.kind) for r in m2m.routes]
    p2p = Transport.P2P
    assert found[:3] == [(0, (0,), [(2, (0,))], p2p), (0, (1,), [(2, (1,))], p2p), (0, (2,), [(3, (0,))], p2p)]
    assert len(found) == 6
    broadcast = comm.get_m2m_map(mesh([0]), (R,), mesh([1, 2]), (R,)).routes
    assert [(r.kind, len(r.dsts)) for r in broadcast] == [(Transport.BROADCAST, 2)]
    partial = comm.get_m2m_map(mesh([0, 1]), (Partial(),), mesh([2]), (R,)).routes
    assert sorted(r.kind.name for r in partial) == ["NONE", "P2P"]


def steps(rank: int) -> int:
    """A loop of one's own, as Etha's."""
    m2m = comm.get_m2m_map(mesh([0, 1]), (S0,), mesh([2, 3]), (S1,))
    whole = numbers(64, 64)
    source, wanted = part(m2m.source, whole, rank), part(m2m.target, whole, rank)
    target = None if wanted is None else torch.full_like(wanted, -1)
    buckets = comm.chunk_to_bucket_ops(comm.m2m_to_chunks(m2m, rank, source, target), 1)
    with pytest.raises(RuntimeError, match="not prepared"):
        buckets[0].launch()
    for _ in range(2):
        if target is not None:
            target.fill_(-1)
        dist.barrier()  # else ranks of the next round overtake
        for bucket in buckets:
            bucket.prepare()
        for step in ("launch", "is_complete"):
            for bucket in buckets:
                while not getattr(bucket, step)():
                    pass
        for bucket in buckets:
            bucket.finalize()
        if target is not None and wanted is not None:
            assert torch.equal(target, wanted)
        dist.barrier()
    return len(buckets)


def test_steps_of_buckets(tmp_path: Path) -> None:
    assert run(tmp_path, 4, steps) == [2, 2, 2, 2]


def repeats(rank: int) -> None:
    """Some ranks have the buckets of an earlier run, others make theirs anew, and one has none."""
    m2m = comm.get_m2m_map(mesh([0, 1]), (S0,), mesh([2]), (R,))

    def make(rows: int) -> tuple[torch.Tensor, Any]:
        x = numbers(rows, 3) if rank == 2 else numbers(rows, 3).chunk(2)[rank % 2].clone()
        parts = (None, x) if rank == 2 else (x, None)
        return x, comm.chunk_to_bucket_ops([] if rank == 3 else comm.m2m_to_chunks(m2m, rank, *parts), 1)

    def move(x: torch.Tensor, buckets: Any) -> None:
        wanted = x.clone()
        if rank == 2:
            x.fill_(-1)
        comm.bucket_comm(buckets)
        assert torch.equal(x, wanted)

    first, second = make(4), make(8)
    for each in first, second, first, make(4) if rank == 0 else first, first:
        move(*each)
    with pytest.raises(tb.Conflict):
        move(*second if rank == 1 else first)
    if rank == 2:
        assert (first[0] == -1).all()
        first[0].copy_(numbers(4, 3))
    for each in first, second:
        move(*each)


def test_buckets_of_an_earlier_run(tmp_path: Path) -> None:
    run(tmp_path, 4, repeats)


# ---- Faults ---------------------------------------------------------------------------------------------------------


def misjudged(rank: int) -> str:
    """Sizes that can't be divided, and nobody says the whole: nothing is cut off, and nothing written."""
    m2m = comm.get_m2m_map(mesh([0, 1]), (S0,), mesh([2]), (R,))
    x = torch.full((4 if rank == 0 else 3, 2) if rank < 2 else (7, 2), -1.0)
    made = comm.m2m_to_chunks(m2m, rank, x if rank < 2 else None, x if rank == 2 else None)
    with pytest.raises(tb.Conflict, match="global_shape") as caught:
        comm.bucket_comm(comm.chunk_to_bucket_ops(made, 1))
    assert (x == -1).all()
    return str(caught.value)


def test_uneven_sizes_without_the_whole_are_refused_on_all_ranks(tmp_path: Path) -> None:
    assert len(set(run(tmp_path, 3, misjudged))) == 1
    m2m = comm.get_m2m_map(mesh([0, 1]), (S0,), mesh([2]), (R,))
    with pytest.raises(ValueError, match=r"rank 1 has \(3, 2\) of a tensor of \(9, 2\).* its part is \(4, 2\)"):
        comm.m2m_to_chunks(m2m, 1, numbers(3, 2), None, global_shape=(9, 2))


def loses(rank: int) -> float:
    m2m = comm.get_m2m_map(mesh([0, 2]), (S0,), mesh([1]), (R,))
    x = torch.full((4, 2), -1.0)
    parts = (None, x) if rank == 1 else (x[:2], None)
    buckets = comm.chunk_to_bucket_ops(comm.m2m_to_chunks(m2m, rank, *parts), 1)
    comm.bucket_comm(buckets)
    dist.barrier()
    if rank == 2:
        os._exit(1)
    began = time.monotonic()
    with pytest.raises((tb.PeerLost, tb.Timeout), match=r"ranks 2\b"):
        comm.bucket_comm(buckets, timeout=20.0)
    return time.monotonic() - began


def test_a_rank_that_dies_is_named_within_the_deadline(tmp_path: Path) -> None:
    assert max(run(tmp_path, 3, loses, survivors=2)) < 20


def waits(rank: int) -> None:
    comm.bucket_comm([])
    if rank == 0:
        with pytest.raises(tb.Timeout, match=r"ranks 1\b"):
            comm.bucket_comm([], timeout=1.0)
    dist.barrier()


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    run(tmp_path, 2, waits)


@pytest.mark.parametrize(("nsources", "ntargets"), [(128, 128), (150, 212)])
def test_128_and_more_ranks(nsources: int, ntargets: int) -> None:
    """The chunks of all ranks, copied here one by one, give every element once. Etha's map counts in float32."""
    sources = torch.randperm(nsources, generator=torch.Generator().manual_seed(1)).view(2, -1).tolist()
    targets = list(range(nsources, nsources + ntargets))
    m2m = comm.get_m2m_map(mesh(sources), (S0, S1), mesh(targets), (S1,))
    shape = (31, 461)
    whole = numbers(*shape)
    sent: dict[str, torch.Tensor] = {}
    ranks = nsources + ntargets
    parts = [part(m2m.source, whole, rank) for rank in range(ranks)]
    for rank in range(nsources):
        for number, chunk in enumerate(comm.m2m_to_chunks(m2m, rank, parts[rank], None, global_shape=shape)):
            key = json.dumps([rank, chunk.dst_ranks, chunk.src_idx, chunk.chunk_shape])
            assert key not in sent, number
            sent[key] = chunk.tensor[chunk.src_slice]
    for rank in targets:
        wanted = part(m2m.target, whole, rank)
        assert wanted is not None
        got = torch.full_like(wanted, -1)
        for chunk in comm.m2m_to_chunks(m2m, rank, None, got, global_shape=shape):
            key = json.dumps([chunk.src_rank, chunk.dst_ranks, chunk.src_idx, chunk.chunk_shape])
            assert (got[chunk.dst_slice] == -1).all()
            got[chunk.dst_slice] = sent[key]
        assert torch.equal(got, wanted), rank
