"""What programs of Megatron-LM's resharding get from tensorbus: its copy service, its planner, its refit."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist

import tensorbus as tb
import tensorbus.megatron as tm
from tensorbus.megatron import _refit, _types

if _types.HAS_MEGATRON:
    import megatron_models as models
    from megatron.core.resharding import planner
    from megatron.core.resharding import refit as their_refit
    from megatron.core.resharding.copy_services.base import CopyService as TheirService
    from megatron.core.resharding.transforms import MXFP8ReshardTransform, ReshardTransform

needs_megatron = pytest.mark.skipif(not _types.HAS_MEGATRON, reason="megatron-core is not installed")


# ---- The copy service -----------------------------------------------------------------------------------------------


def _copies(seat: jobs.Seat) -> None:
    with_group = dist.new_group(list(range(seat.size)))
    for service in tm.CopyService(timeout=30.0), tm.CopyService(with_group, timeout=30.0):
        me, size = seat.index, seat.size
        assert (service.rank, service.world_size, service.requires_process_group_barrier) == (me, size, False)
        assert not _types.HAS_MEGATRON or isinstance(service, TheirService)
        for round_ in range(3):
            checks = []
            for peer in range(size):  # each rank to each, itself too: under an id, two tensors under one, without one
                base = 1000 * round_ + 100 * me + 10 * peer
                service.submit_send(torch.arange(24.0).reshape(4, 6).t() + base, peer, task_id=16 * me + peer)
                service.submit_send(torch.full((5,), base, dtype=torch.int64), peer, task_id=1000 + 16 * me + peer)
                service.submit_send(torch.tensor(base).to(torch.uint8), peer, task_id=1000 + 16 * me + peer)
                base = 1000 * round_ + 100 * peer + 10 * me
                got = [torch.full((6, 4), -1.0), torch.full((5,), -1), torch.full((), 255, dtype=torch.uint8)]
                service.submit_recv(got[0], peer, task_id=16 * peer + me)
                service.submit_recv(got[1], peer, task_id=1000 + 16 * peer + me)
                service.submit_recv(got[2], peer, task_id=1000 + 16 * peer + me)
                byte = torch.tensor(base).to(torch.uint8)
                checks.append((got, [torch.arange(24.0).reshape(4, 6).t() + base, torch.full((5,), base), byte]))
                for i in range(2):
                    service.submit_send(torch.tensor([float(me), float(peer), float(i)]), peer)
                    got = [torch.full((3,), -1.0)]
                    service.submit_recv(got[0], peer)
                    checks.append((got, [torch.tensor([float(peer), float(me), float(i)])]))
            parameter = torch.nn.Parameter(torch.full((3,), float(round_)))
            cast = torch.full((3,), -1.0, dtype=torch.bfloat16)
            service.submit_send(parameter, me, task_id=5000 + me)  # a rank's copies to itself are cast
            service.submit_recv(cast, me, task_id=5000 + me)
            service.run()
            for got, wanted in [*checks, ([cast], [torch.full((3,), float(round_), dtype=torch.bfloat16)])]:
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (round_, got, wanted)
        service.submit_recv(torch.zeros(2), (me + 1) % size, task_id=9)  # which nobody sends
        with pytest.raises(tb.Conflict):
            service.run()
        service.run()  # of nothing: the next one works
        dist.barrier()
        service.close()
        service.close()
        with pytest.raises(tb.Invalid, match="closed"):
            service.run()
    service = tm.CopyService(timeout=20.0)
    service.submit_recv(torch.zeros(4), 2, task_id=1)
    with _loss_of(seat, 2) as told:
        service.run()
    assert (told.value.group, told.value.seat) == ("ranks", 2)
    _leave(seat)


@contextlib.contextmanager
def _loss_of(seat: jobs.Seat, rank: int) -> Iterator[Any]:
    """That rank ends without a word; the others' call fails within its deadline."""
    dist.barrier()
    if seat.index == rank:
        _leave(seat)
    begin = time.monotonic()
    with pytest.raises(tb.PeerLost) as told:
        yield told
    assert time.monotonic() - begin < 15.0


def _leave(seat: jobs.Seat) -> None:
    """Ends the process at once: torch's own groups would wait for who is dead."""
    Path(seat.url.removeprefix("unix:")).with_name(f"{seat.group}.{seat.index}.json").write_text("null")
    os._exit(0)


def test_copy_service_and_a_rank_that_dies(tmp_path: Path) -> None:
    jobs.run_forked(tmp_path, __file__, 3, "_copies")


def test_work_on_a_gpu_comes_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun on the streams that were current when tensors were submitted, and when the run begins.

    Streams and copies are stand-ins: there need not be a GPU.
    """
    order: list[str] = []

    class Stream:
        def __init__(self, number: int) -> None:
            self.cuda_stream = number

        def record_event(self) -> Any:
            order.append(f"record {self.cuda_stream}")
            return SimpleNamespace(synchronize=lambda: order.append(f"wait for {self.cuda_stream}"))

        def synchronize(self) -> None:
            order.append(f"wait for current {self.cuda_stream}")

    current = Stream(7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    service = object.__new__(tm.CopyService)
    service._timeout, service._events, service._own_bus = None, {}, None
    copy = SimpleNamespace(
        submit_send=lambda *_: order.append("send"),
        submit_recv=lambda *_: order.append("receive"),
        run=lambda _: order.append("copy"),
        close=lambda: None,
    )
    service._copy = copy  # type: ignore[assignment]
    tensor = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0), detach=lambda: None)
    service.submit_send(tensor, 1, 1)
    current = Stream(8)
    service.submit_recv(tensor, 1, 2)
    current = Stream(9)
    for _ in range(2):
        service.run()
    assert order[:4] == ["record 7", "send", "record 8", "receive"]
    assert {"wait for 7", "wait for 8", "wait for current 9"} == set(order[4:7])
    assert order[7:] == ["copy", "copy"]  # the second run has nothing to wait for


def test_local_operations_are_matched_by_their_id() -> None:
    sends = [tm.SendOp(i, None, 0) for i in (1, 2)]
    recvs = [tm.RecvOp(i, None, 0) for i in (2, 1)]
    pairs = tm.match_local_ops_by_task_id(sends, recvs, "test", 0)
    assert [(id(a), id(b)) for a, b in pairs] == [(id(sends[1]), id(recvs[0])), (id(sends[0]), id(recvs[1]))]
    for wrong, words in (
        ([tm.RecvOp(None, None, 0), recvs[1]], "requires a task_id"),
        (recvs[:1], "unmatched local ops: 2 sends with 2 ids, 1 receives"),
        ([recvs[0], recvs[0]], "unmatched local ops"),
        ([recvs[0], tm.RecvOp(7, None, 0)], "missing local send of task_id 7"),
    ):
        with pytest.raises(RuntimeError, match=words):
            tm.match_local_ops_by_task_id(sends, wrong, "test", 0)


# ---- The planner ----------------------------------------------------------------------------------------------------


class _Side:
    """A parameter on one side: which ranks have which positions along a dim, worked out here."""

    def __init__(
        self,
        ranks: list[int],
        tp: int,
        total: int,
        stride: int = 1,
        blocks: tuple[int, ...] = (),
        is_marked: bool = True,
    ) -> None:
        self.groups = [ranks[i : i + tp] for i in range(0, len(ranks), tp)]
        self.tp, self.stride, self.blocks, self.is_marked = tp, stride, blocks, is_marked
        pieces = torch.arange(total).split(list(blocks)) if blocks else torch.arange(total).chunk(stride)
        cuts = [list(piece.tensor_split(tp)) for piece in pieces]
        self.positions = [torch.cat([each[i] for each in cuts]) for i in range(tp)]

    def metas(self, name: str, dim: int, width: int) -> dict[int, tm.ParameterMetadata]:
        found = {}
        for group in self.groups:
            for i, rank in enumerate(group):
                shape = [width, width]
                shape[dim] = len(self.positions[i])
                found[rank] = tm.ParameterMetadata(
                    name=f"local.{name}",
                    shape=tuple(shape),
                    dtype=torch.float32,
                    element_size=4,
                    is_tp=self.is_marked,
                    partition_dim=dim if self.is_marked else 0,
                    partition_stride=self.stride,
                    partition_sizes=[size // self.tp for size in self.blocks] or None,
                    owner_rank=rank,
                    tensor_parallel_group_ranks=list(group),
                    data_parallel_group_ranks=[each[i] for each in self.groups],
                    resolved_name=name,
                )
        return found

    def part(self, whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        group = next(group for group in self.groups if rank in group)
        return whole.index_select(dim, self.positions[group.index(rank)])


def _check_plans(sides: dict[str, tuple[_Side, _Side, int]], nranks: int, total: int) -> dict[int, int]:
    """Plans on every rank, does what the plans say, and compares; returns how many bytes each rank sends to others."""
    width = 6
    pairs: list[Any] = [([], []) for _ in range(nranks)]
    for name, (src, dst, dim) in sides.items():
        for rank, meta in src.metas(name, dim, width).items():
            pairs[rank][0].append(meta)
        for rank, meta in dst.metas(name, dim, width).items():
            pairs[rank][1].append(meta)
    rosters = tm.index_metadata_rosters(pairs)
    plans = [tm.build_plan_from_rosters(*rosters, rank) for rank in range(nranks)]
    wholes = {}
    for i, (name, (_, _, dim)) in enumerate(sides.items()):
        shape = [width, width]
        shape[dim] = total
        wholes[name] = torch.arange(1000 * i, 1000 * i + total * width).reshape(shape)
    sent: dict[int, int] = {}
    on_the_way = {}
    for rank, plan in enumerate(plans):
        for op in plan.send_ops:
            name = op.param_name.removeprefix("local.")
            src, _, dim = sides[name]
            key = (rank, op.peer_rank, op.task_id)
            assert op.is_send
            assert key not in on_the_way
            on_the_way[key] = (op, src.part(wholes[name], rank, dim)[op.my_slice])
            if op.peer_rank != rank:
                sent[rank] = sent.get(rank, 0) + on_the_way[key][1].numel()
    for rank, plan in enumerate(plans):
        targets = {
            name: torch.full_like(dst.part(wholes[name], rank, dim), -1)
            for name, (_, dst, dim) in sides.items()
            if any(rank in group for group in dst.groups)
        }
        for op in plan.recv_ops:
            theirs, data = on_the_way.pop((op.peer_rank, rank, op.task_id))
            assert (theirs.my_slice, theirs.peer_slice, op.is_send) == (op.peer_slice, op.my_slice, False)
            target = targets[op.param_name.removeprefix("local.")]
            assert (target[op.my_slice] == -1).all()  # nothing is written twice
            target[op.my_slice] = data
        for name, target in targets.items():
            _, dst, dim = sides[name]
            assert torch.equal(target, dst.part(wholes[name], rank, dim)), (rank, name)
    assert not on_the_way
    return sent


def test_random_plans() -> None:
    numbers = random.Random(5)
    for _ in range(40):
        total = numbers.choice((24, 48))
        nranks = 24
        sides = {}
        for i in range(3):
            both = []
            for _ in range(2):
                tp = numbers.choice((1, 2, 3, 4, 6))
                ranks = numbers.sample(range(nranks), tp * numbers.randint(1, nranks // tp))
                blocks = (total // 2, total // 4, total // 4) if i == 2 and tp in (1, 2, 3, 6) else ()
                stride = numbers.choice((1, 2)) if i == 1 else 1
                both.append(_Side(ranks, tp, total, stride, blocks))
            if bool(both[0].blocks) != bool(both[1].blocks):
                both = [_Side([0, 1], 2, total, 1, (total,)), _Side([5], 1, total)]
            sides[f"p{i}"] = (both[0], both[1], numbers.randint(0, 1))
        _check_plans(sides, nranks, total)


def test_uneven_parts() -> None:
    # 25 over 2, 3 and 4 ranks: Megatron's planner has no plan for sizes that the number of ranks does not divide.
    for src_tp, dst_tp in (2, 3), (3, 4), (4, 1), (1, 3):
        ranks = list(range(src_tp)), list(range(10, 10 + dst_tp))
        _check_plans({"w": (_Side(ranks[0], src_tp, 25), _Side(ranks[1], dst_tp, 25), 0)}, 14, 25)
    # 24 over 4 and 9: the least common multiple of 4 and 9 does not divide it.
    _check_plans({"w": (_Side([0, 1, 2, 3], 4, 24), _Side(list(range(4, 13)), 9, 24), 1)}, 13, 24)


def test_hundreds_of_ranks_share_the_sending() -> None:
    src, dst = list(range(192)), list(range(192, 384))
    sides = {f"p{i}": (_Side(src, 8, 48), _Side(dst, 4, 48), i % 2) for i in range(16)}
    sent = _check_plans(sides, 384, 48)
    assert set(sent) == set(src)
    assert max(sent.values()) <= 1.5 * min(sent.values())


def test_data_stays_where_it_is() -> None:
    ranks = list(range(8))
    assert _check_plans({"w": (_Side(ranks, 2, 24), _Side(ranks, 2, 24), 0)}, 8, 24) == {}
    assert _check_plans({"w": (_Side(ranks, 1, 24), _Side(ranks, 4, 24), 0)}, 8, 24) == {}


def test_marks_and_shapes() -> None:
    # One side has no mark, and is cut; or has one, and is whole on each rank.
    unmarked = _Side([0, 1], 2, 24, is_marked=False)
    _check_plans({"w": (unmarked, _Side([2], 1, 24), 0)}, 3, 24)
    whole = _Side([0, 1], 1, 24)
    metas = whole.metas("w", 0, 6)
    for meta in metas.values():
        meta.tensor_parallel_group_ranks = [0, 1]
    target = _Side([2, 3], 2, 24).metas("w", 0, 6)
    pairs = [([metas[0]], []), ([metas[1]], []), ([], [target[2]]), ([], [target[3]])]
    plan = tm.build_plan_from_rosters(*tm.index_metadata_rosters(pairs), 3)
    assert [(op.my_slice[0], op.peer_slice[0]) for op in plan.recv_ops] == [(slice(0, 12), slice(12, 24))]
    one = _Side([0], 1, 24).metas("w", 0, 6)[0]
    with pytest.raises(tb.Invalid, match=r"size mismatch: 'w' is \(24, 6\).* at the source, \(25, 6\)"):
        bad = _Side([2], 1, 25).metas("w", 0, 6)
        tm.build_plan_from_rosters(*tm.index_metadata_rosters([([one], []), ([], []), ([], [bad[2]])]), 2)
    with pytest.raises(tb.Invalid, match="'v' is not found in the source"):
        other = _Side([2], 1, 24).metas("v", 0, 6)
        tm.build_plan_from_rosters(*tm.index_metadata_rosters([([one], []), ([], []), ([], [other[2]])]), 2)
    with pytest.raises(tb.Invalid, match=r"of which \[1\] do not have it"):
        half = unmarked.metas("w", 0, 6)[0]
        half.is_tp = True
        tm.build_plan_from_rosters(*tm.index_metadata_rosters([([half], []), ([], []), ([], [target[2]])]), 2)


def test_ids_stay_when_ranks_are_added() -> None:
    def plans(ndst: int) -> list[Any]:
        src = _Side([0], 1, 24).metas("w", 0, 6)
        pairs: list[Any] = [([src[0]], [])]
        pairs += [([], [_Side([1 + i], 1, 24).metas("w", 0, 6)[1 + i]]) for i in range(ndst)]
        rosters = tm.index_metadata_rosters(pairs)
        return [tm.build_plan_from_rosters(*rosters, rank) for rank in range(ndst + 1)]

    before, after = plans(3), plans(4)
    assert [plan.recv_ops for plan in before[1:]] == [plan.recv_ops for plan in after[1:4]]
    assert len({op.task_id for op in after[0].send_ops}) == 4


# ---- Models ---------------------------------------------------------------------------------------------------------

LAYOUTS = {  # (tp, pp, ep) of the source and of the target, on the same four ranks
    "TP2 to TP1": ((2, 1, 1), (1, 1, 1), {}),
    "TP1 to TP4": ((1, 1, 1), (4, 1, 1), {}),
    "PP2 to TP2": ((1, 2, 1), (2, 1, 1), {}),
    "PP2, uneven, to TP2 PP2": ((1, 2, 1), (2, 2, 1), {"layers": 3, "first_stage": 1}),
    "EP2 to EP4": ((1, 1, 2), (1, 1, 4), {"experts": 8}),
    "TP2 EP2 to EP4": ((2, 1, 2), (1, 1, 4), {"experts": 8}),
    "tied, PP1 to PP2": ((1, 1, 1), (1, 2, 1), {"tied": True}),
    "bf16, TP4 to TP2": ((4, 1, 1), (2, 1, 1), {"dtype": "bfloat16"}),
}


def _options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.bfloat16 if key == "dtype" else value for key, value in options.items()}


def _swaps(seat: jobs.Seat) -> None:
    their_refit.build_local_reshard_plan = tm.build_local_reshard_plan
    service = tm.CopyService(timeout=30.0)
    with models.without_gpu():
        for name, (src, dst, options) in LAYOUTS.items():
            tied = options.get("tied", False)
            source = models.model(models.groups(*src, seat.size), **_options(options))
            target = models.model(models.groups(*dst, seat.size), **_options(options))
            strides = {getattr(t, "partition_stride", 1) for t in models.tensors(source).values()}
            assert strides == {1, 2}
            for how in "swap", "refit":
                for version in 1, 2:
                    models.fill(source, version, tied)
                    models.poison(target)
                    assert len(models.differing(target, version, tied)) == len(models.tensors(target)) > 8, name
                    if how == "swap":
                        their_refit.swap_model_weights([source], [target], refit_method=service)
                    elif version == 1:
                        tm.refit([source], [target], timeout=30.0)
                    else:
                        tm.swap_model_weights([source], [target], "gloo")
                    assert models.differing(target, version, tied) == [], (name, how, version)
                    assert models.differing(source, version, tied) == [], (name, how, version)
            assert len(_refit._refits) == 1
            dist.barrier()
            tm.clear_all_caches()
    service.close()


@needs_megatron
def test_models(tmp_path: Path) -> None:
    jobs.run_forked(tmp_path, __file__, 4, "_swaps")


@needs_megatron
def test_signatures_are_theirs() -> None:
    """What a program of theirs gives, ours take; more that ours take is by keyword."""
    of_refit = "prepare_swap_model_weights", "swap_model_weights", "clear_all_caches"
    of_planner = "build_local_reshard_plan", "build_plan_from_rosters", "index_metadata_rosters"
    of_service = "__init__", "submit_send", "submit_recv", "run", "close"
    names = (their_refit, tm, of_refit), (planner, tm, of_planner), (TheirService, tm.CopyService, of_service)
    for theirs, ours, functions in names:
        for name in functions:
            wanted, found = (_parameters(getattr(each, name)) for each in (theirs, ours))
            assert found[: len(wanted)] == wanted, name
            assert all(p.kind is p.KEYWORD_ONLY for p in found[len(wanted) :]), name


def _parameters(function: Any) -> list[inspect.Parameter]:
    return [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]


# ---- Models on ranks of their own, and MXFP8 ------------------------------------------------------------------------


def _quantise(x: torch.Tensor, is_swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 as Megatron's kernel makes it, by PyTorch: exponents rounded up, scales in rows or in tiles of 128 x 4."""
    groups = x.float().reshape(x.shape[0], -1, 32)
    bits = (groups.abs().amax(-1) / 448.0).view(torch.int32)
    bits = (bits + 0x007FFFFF) & 0x7F800000
    power = bits.view(torch.float32)
    data = (groups * torch.where(power == 0, 0.0, 1.0 / power)[..., None]).reshape(x.shape).to(torch.float8_e4m3fn)
    scale = (bits >> 23).to(torch.uint8)
    if is_swizzled:
        rows, columns = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
        tiles = torch.zeros(rows, columns, dtype=torch.uint8)
        tiles[: scale.shape[0], : scale.shape[1]] = scale
        scale = tiles.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()
    return data, scale.view(torch.float8_e8m0fnu)


class _Quantised:
    """What the receiver keeps of a parameter, with the fields of Megatron's MXFP8Tensor."""

    is_swizzled = False

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data, self.scale, self.backend = data, scale, "triton"

    @classmethod
    def from_bf16(cls, x: torch.Tensor, **_: Any) -> _Quantised:
        return cls(*_quantise(x, cls.is_swizzled))


def _transform(model: Any, is_swizzled: bool, is_sender: bool) -> Any:
    """Of weights that Megatron can do: it wants whole blocks in every piece, unless it gathers for swizzled scales."""
    kinds = ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv"]
    kinds += ["self_attention.linear_proj"] if is_swizzled else []
    names = [f"decoder.layers.{i}.{kind}.weight" for i in range(2) for kind in kinds]
    if model is None:
        return MXFP8ReshardTransform(set(names), {}, "decoder.", convert_on_send=True) if is_sender else None
    tensors = models.tensors(model)
    kept = {}
    for name in names:
        buffer = _Quantised(*_quantise(torch.ones_like(tensors[name]), is_swizzled))
        buffer.data.view(torch.uint8).fill_(0x55)
        buffer.scale.view(torch.uint8).fill_(0x55)
        kept[name.removeprefix("decoder.")] = buffer
    return MXFP8ReshardTransform(set(names), kept, "decoder.", convert_on_send=is_sender)


def _apart(seat: jobs.Seat) -> None:
    """Source on ranks 0 and 1 (TP2), target on 2, 3 and 4 (TP3); rank 5 has neither."""
    their_refit.build_local_reshard_plan = tm.build_local_reshard_plan
    service = tm.CopyService(timeout=30.0)
    with models.without_gpu():
        of_source, of_target = models.groups(2, 1, 1, 2), models.groups(3, 1, 1, 3, first=2)
        source = models.model(of_source, dtype=torch.bfloat16) if seat.index < 2 else None
        target = models.model(of_target, dtype=torch.bfloat16) if 2 <= seat.index < 5 else None
        if source is not None:
            source.register_buffer("expert_bias", torch.zeros(8))
        if target is not None:
            target.register_buffer("expert_bias", torch.zeros(8, dtype=torch.bfloat16))
        made = tm.Refit(source, target, timeout=30.0)
        refreshed: list[list[str]] = []
        if target is not None:  # what a module makes from its weights
            target.refresh_cache = lambda: refreshed.append(models.differing(target, len(refreshed) + 1))
        for version in 1, 2, 3:
            if source is not None:
                models.fill(source, version)
            if target is not None:
                models.poison(target)
            if version == 2 and source is not None:  # parameters that have moved to other memory
                for parameter in source.parameters():
                    parameter.data = parameter.data.clone()
            if version == 3 and target is not None:
                for parameter in target.parameters():
                    parameter.data = parameter.data.clone()
            made.run()
            if target is not None:
                assert models.differing(target, version) == []
                assert target.expert_bias.dtype == torch.float32
                assert refreshed == [[]] * version
        dist.barrier()
        made.close()
        transforms = sys.modules["megatron.core.resharding.transforms"]
        transforms.MXFP8Tensor = _Quantised
        if source is not None:
            models.fill(source, 4)
            with torch.no_grad():
                source.decoder.layers[0].mlp.linear_fc1.weight[:40] = 0
        for is_swizzled, is_sender in (False, False), (True, False), (False, True):
            _Quantised.is_swizzled = is_swizzled
            theirs, ours = (_transform(target, is_swizzled, is_sender) for _ in range(2))
            their_refit.swap_model_weights(source, target, refit_method=service, transform=theirs)
            if target is None:
                ours = None  # our senders have nothing to say
            tm.refit(source, target, timeout=30.0, transform=ours)
            if target is not None:
                assert len(ours.persistent_buffers) == (8 if is_swizzled else 6)
                for name, buffer in ours.persistent_buffers.items():
                    other = theirs.persistent_buffers[name]
                    for mine, its in (buffer.data, other.data), (buffer.scale, other.scale):
                        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8)), (
                            name,
                            is_swizzled,
                            is_sender,
                        )
            dist.barrier()
            tm.clear_refits()
            their_refit.clear_all_caches()
        with pytest.raises(tb.Invalid, match="give it to swap_model_weights"):
            tm.Refit(source, target, transform=ReshardTransform())
        made = tm.Refit(source, target, timeout=20.0)
        if seat.index == 5:  # it has no part in it, and need not know
            made.run()
            dist.barrier()
            _leave(seat)
        with _loss_of(seat, 1) as told:
            made.run()
        assert (told.value.group, told.value.seat) == ("refit.source", 1)
    _leave(seat)


@needs_megatron
def test_models_apart_and_mxfp8_and_a_rank_that_dies(tmp_path: Path) -> None:
    jobs.run_forked(tmp_path, __file__, 6, "_apart")


def _pools(seat: jobs.Seat) -> None:
    """Source on rank 0; targets on rank 1, and on ranks 2 and 3, that are refitted by one call."""
    with models.without_gpu():
        groups = [models.groups(size, 1, 1, size, first=first) for first, size in ((0, 1), (1, 1), (2, 2))]
        model = models.model(groups[min(seat.index, 2)])
        source, target = (model, None) if seat.index == 0 else (None, model)
        pools = {"num_dst_pools": 2, "dst_pool_index": int(seat.index > 1)}
        for version in 1, 2:
            if source is not None:
                models.fill(source, version)
            tm.swap_model_weights(source, target, "nccl", **pools)
            assert models.differing(model, version) == [], version
        tm.clear_all_caches()
        both = source, target if seat.index > 1 else None
        tm.prepare_swap_model_weights(*both)
        before = list(_refit._refits)
        tm.swap_model_weights(*both, "nccl")
        assert list(_refit._refits) == before
        dist.barrier()
        tm.clear_all_caches()


@needs_megatron
def test_pools_of_targets(tmp_path: Path) -> None:
    jobs.run_forked(tmp_path, __file__, 4, "_pools")


# ---- The scripts of docs/coming-from.md -----------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples/python"


def _scripts(seat: jobs.Seat) -> list[str]:
    """Both scripts, one after the other, in this process; Megatron's as if it had a GPU."""
    sys.path.insert(0, str(EXAMPLES))
    dist.destroy_process_group()
    lines = []
    for script in "theirs", "ours":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(seat.args["ports"][script == "ours"])
        written = io.StringIO()
        with contextlib.redirect_stdout(written), models.without_gpu():
            runpy.run_path(str(EXAMPLES / f"from_megatron_{script}.py"), run_name="__main__")
        lines.append(written.getvalue())
    dist.init_process_group("gloo", init_method=f"{seat.args['store']}", rank=seat.index, world_size=seat.size)
    return lines


@needs_megatron
def test_scripts_of_both(tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as other:
        for each in one, other:
            each.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1], other.getsockname()[1]]
    store = f"file://{tmp_path}/again.store"
    for rank, lines in enumerate(jobs.run_forked(tmp_path, __file__, 2, "_scripts", ports=ports, store=store)):
        assert lines == ["".join(f"rank {rank}: version {v}, equal\n" for v in (1, 2, 3))] * 2
