"""Weights from one Megatron model to another, planned and moved by tensorbus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorbus as tb

from .. import _meet
from . import _planner
from ._types import ReshardPlan

_WIDE = ("torch.float32", "torch.float64")  # what Megatron sends as bf16 to who quantises it


class Refit:
    """Moves the weights of ``src_model`` into ``dst_model``, time after time, by ``run``.

    All ranks of the process group make it and run it, in the same order; either model may be None. The arguments are
    those of ``swap_model_weights``. Layouts come from the models' sharding metadata, which the ranks exchange once.
    Each parameter of the target gets its data from the replicas of the source that hold it; where both models are
    the same process's, data need not leave it. Dtypes that differ are cast, but buffers take those of the source.

    ``transform`` may be an ``MXFP8ReshardTransform``; without one, a target that is to be MXFP8 gets the one that
    Megatron would make. ``bus``, where the program has one, has seat i of ``bus.group`` for rank i; several on one bus
    need different names. ``timeout``, in seconds, is for making it and for each run.
    """

    def __init__(
        self,
        src_model: Any,
        dst_model: Any,
        *,
        group: Any = None,
        src_rank_offset: int = 0,
        dst_rank_offset: int = 0,
        transform: Any = None,
        timeout: float | None = None,
        bus: tb.Bus | None = None,
        name: str = "refit",
    ) -> None:
        import torch.distributed as dist

        self._timeout = timeout
        self._group = group
        rank = dist.get_rank() if group is None else group.rank()
        size = dist.get_world_size() if group is None else group.size()
        src, dst = _core(src_model), _core(dst_model)
        experts = next((_first(m).config.num_moe_experts for m in (src_model, dst_model) if m is not None), None)
        mine = (
            _planner.read_module(src, rank, experts, src_rank_offset),
            _planner.read_module(dst, rank, experts, dst_rank_offset),
        )
        # The parameters before any of them becomes MXFP8 and leaves the module.
        self._sources, self._targets = _tensors(src), _tensors(dst)
        self._transform = _usable(transform) or _own_transform(dst_model)
        self._dst = dst
        special = {_planner.key_of(meta): how for meta in mine[1] if (how := self._how(meta.name)) is not None}
        gathered = _meet.gather((*map(_planner.tell, mine), special), group)
        quantised = {each for _, _, ranks_special in gathered for each in ranks_special}
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self._own_bus = None
        self._batch: tb.Batch | None = None
        self._is_source, self._is_target = bool(mine[0]), bool(mine[1])
        self._source_group, self._target_group = f"{name}.source", f"{name}.target"
        try:
            if bus is None:
                bus = self._own_bus = _meet.join(group, rank, size, timeout)
            self._make(bus, name, rank, mine, gathered, quantised)
        except BaseException:
            self.close()
            raise

    def _make(self, bus: tb.Bus, name: str, rank: int, mine: Any, gathered: list[Any], quantised: set[str]) -> None:
        src_seats = {r: i for i, r in enumerate(r for r, (a, _, _) in enumerate(gathered) if a[0])}
        dst_seats = {r: i for i, r in enumerate(r for r, (_, b, _) in enumerate(gathered) if b[0])}
        if not src_seats or not dst_seats:
            raise tb.Invalid("no rank has a source model" if not src_seats else "no rank has a target model")
        source = target = None
        if self._is_source:
            bus.enter(self._source_group, src_seats[rank], len(src_seats))
        if self._is_target:
            bus.enter(self._target_group, dst_seats[rank], len(dst_seats))
        if self._is_source:
            source = bus.pair(
                name,
                self._target_group,
                group=self._source_group,
                wait=not self._is_target,
                timeout=self._timeout,
            )
        if self._is_target:
            target = bus.pair(name, self._source_group, group=self._target_group, timeout=self._timeout)
        if source is None and target is None:
            return
        self._batch = bus.batch(name)
        src, dst = (_planner.side_of(each[i] for each in gathered) for i in (0, 1))
        sources, targets = map(_planner.by_key, mine)
        known: dict[Any, Any] = {}  # of parameters that are alike
        for key in dst.where:
            src_key = _planner.find_source(key, src.where)
            given, own = sources.get(src_key), targets.get(key)
            if given is None and own is None:
                continue
            holders = src.holders(src_key), dst.holders(key)
            if holders not in known:
                known[holders] = _planner.cut(*holders, src_seats, dst_seats)
            shape, src_layout, dst_layout = known[holders]
            if given is not None:
                assert source is not None
                wire = "bf16" if key in quantised and str(given.dtype) in _WIDE else None
                self._add_source(source, key, given.name, shape, src_layout, wire)
            if own is not None:
                assert target is not None
                self._add_target(target, key, own.name, shape, dst_layout, holders[0].first.dtype)
        self._batch.register(self._timeout)

    # -- Tensors --

    def _how(self, name: str) -> str | None:
        """How this rank of the target has the parameter: "bf16" or an encoding; None: as a plain tensor."""
        if self._transform is not None and self._transform.should_transform(name):
            options = ["swizzled"] if self._buffer(name).scale.ndim == 1 else []
            options += ["sender"] if self._transform.convert_on_send else []
            return f"mxfp8({','.join(options)})" if options else "mxfp8"
        return "bf16" if _is_mxfp8(self._targets[name][0]) else None

    def _buffer(self, name: str) -> Any:
        return self._transform.persistent_buffers[name.removeprefix(self._transform.buffer_key_prefix)]

    def _add_source(self, pair: tb.Pair, key: str, name: str, shape: Any, layout: str, wire: str | None) -> None:
        tensor = self._sources[name][0]
        if _is_mxfp8(tensor):
            from megatron.core.fp8_utils import dequantize_fp8_tensor

            sent = dequantize_fp8_tensor(tensor)
            self._before.append(lambda: _copy(sent, dequantize_fp8_tensor(tensor)))
        else:
            sent = tensor.detach()
            self._before.append(lambda: _follow(sent, tensor))
        assert self._batch is not None
        self._batch.add(pair, key, sent, shape=shape, layout=layout, wire_dtype=wire)

    def _add_target(self, pair: tb.Pair, key: str, name: str, shape: Any, layout: str, dtype: Any) -> None:
        import torch

        assert self._batch is not None
        how = self._how(name)
        tensor, owner, attribute = self._targets[name]
        if how == "bf16":
            received = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
            self._after.append(lambda: tensor.quantize_(received))
            self._batch.add(pair, key, received, shape=shape, layout=layout)
            return
        if how is not None:
            buffer = self._buffer(name)
            self._batch.add(
                pair,
                key,
                buffer.data,
                shape=shape,
                layout=layout,
                encode=how,
                scales=buffer.scale.view(torch.uint8).flatten(),
            )
            return
        if owner is not None and tensor.dtype != dtype:  # a buffer, which takes the dtype of the source
            tensor = owner._buffers[attribute] = tensor.to(dtype)
            _forget(self._dst)
        received = tensor.detach()
        self._after.append(lambda: _follow(tensor.data, received))
        self._batch.add(pair, key, received, shape=shape, layout=layout)

    # -- Runs --

    def run(self, timeout: float | None = None) -> None:
        """Moves the weights; all ranks call it. Returns when they are in this rank's target, and in those it sends to.

        What fails names the rank that is missing, lost or wrong; weights of the target may be of two versions then,
        until the next run.
        """
        import torch

        timeout = self._timeout if timeout is None else timeout
        if self._batch is None:
            return
        with torch.no_grad():
            for step in self._before:
                step()
            sent = None
            if self._is_source:
                sent = self._batch.send(timeout, wait=None, group=self._source_group)
            try:
                if self._is_target:
                    self._batch.recv(timeout, group=self._target_group)
                if sent is not None:
                    sent.wait("committed")
            except BaseException:
                if sent is not None:
                    sent.close()
                raise
            for step in self._after:
                step()
        for module in self._dst.modules() if self._dst is not None else ():
            refresh = getattr(module, "refresh_cache", None)  # what is made from weights, in later versions
            if callable(refresh):
                refresh()

    def close(self) -> None:
        """Gives the tensors back. Closing it again does nothing."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()
        bus, self._own_bus = self._own_bus, None
        if bus is not None:
            bus.close()


_refits: dict[Any, tuple[Refit, Any, Any, Any, Any]] = {}


def refit(
    src_model: Any,
    dst_model: Any,
    *,
    group: Any = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    transform: Any = None,
    timeout: float | None = None,
    bus: tb.Bus | None = None,
) -> None:
    """Moves the weights of ``src_model`` into ``dst_model``: a ``Refit`` that is kept for the next call, and its run.

    A call with the same models uses it again, until ``clear_refits``.
    """
    offsets = src_rank_offset, dst_rank_offset
    _kept(src_model, dst_model, group, offsets, transform, timeout=timeout, bus=bus).run(timeout)


def _kept(
    src_model: Any,
    dst_model: Any,
    group: Any,
    offsets: tuple[int, int],
    transform: Any = None,
    pool: int = 0,
    *,
    timeout: float | None = None,
    bus: tb.Bus | None = None,
) -> Refit:
    """That of an earlier call with the same models, or a new one."""
    models = _first(src_model), _first(dst_model)  # a list of one may be another one in each call
    key = (*map(id, models), id(group), offsets, id(transform), pool, id(bus))
    if key not in _refits:
        made = Refit(
            src_model,
            dst_model,
            group=group,
            src_rank_offset=offsets[0],
            dst_rank_offset=offsets[1],
            transform=transform,
            timeout=timeout,
            bus=bus,
            name=f"refit-{len(_refits)}",
        )
        _refits[key] = (made, models, group, transform, bus)  # which stay, so that their ids do
    return _refits[key][0]


def swap_model_weights(
    src_model: Any,
    target_model: Any,
    refit_method: Any,
    group: Any = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    transform: Any = None,
    num_dst_pools: int = 1,
    dst_pool_index: int = 0,
) -> None:
    """Megatron's call, by ``refit``: the name of a backend has no meaning here.

    With a copy service as ``refit_method`` it is Megatron's own function. The ranks of several pools of targets get the
    weights one pool after the other, as there.
    """
    offsets = src_rank_offset, dst_rank_offset
    if not isinstance(refit_method, str):
        from megatron.core.resharding import refit as theirs

        pools = {} if num_dst_pools == 1 else {"num_dst_pools": num_dst_pools, "dst_pool_index": dst_pool_index}
        theirs.swap_model_weights(src_model, target_model, refit_method, group, *offsets, transform, **pools)
        return
    for pool in range(num_dst_pools):
        its = target_model if pool == dst_pool_index else None
        _kept(src_model, its, group, offsets, transform, pool).run()


def prepare_swap_model_weights(
    src_model: Any, target_model: Any, group: Any = None, src_rank_offset: int = 0, dst_rank_offset: int = 0
) -> None:
    """Megatron's call: makes what ``swap_model_weights`` of these models will use, before the target becomes MXFP8."""
    _kept(src_model, target_model, group, (src_rank_offset, dst_rank_offset))


def clear_refits() -> None:
    """Closes what ``refit`` and ``swap_model_weights`` have kept, on this rank."""
    while _refits:
        _refits.popitem()[1][0].close()


def clear_all_caches() -> None:
    """Megatron's call: also what its own ``swap_model_weights``, with a copy service, has kept."""
    clear_refits()
    from megatron.core.resharding import refit as theirs

    theirs.clear_all_caches()


# ---- Models ---------------------------------------------------------------------------------------------------------


def _first(model: Any) -> Any:
    return model[0] if isinstance(model, list | tuple) else model


def _core(model: Any) -> Any:
    """The model inside its wrappers, with all process groups that the metadata needs."""
    if model is None:
        return None
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    core = unwrap_model(_first(model))
    groups = getattr(core, "pg_collection", None)
    if groups is not None and getattr(groups, "dp", None) is None:
        groups.dp = parallel_state.get_data_parallel_group()
    return core


def _tensors(core: Any) -> dict[str, tuple[Any, Any, str]]:
    """Parameters and saved buffers by name; of a buffer, also the module that has it, and its name there."""
    if core is None:
        return {}
    from megatron.core.resharding.utils import named_persistent_buffers

    found: dict[str, tuple[Any, Any, str]] = {name: (tensor, None, "") for name, tensor in core.named_parameters()}
    found |= {name: (tensor, owner, key) for name, owner, key, tensor in named_persistent_buffers(core)}
    return found


def _usable(transform: Any) -> Any:
    if transform is None or hasattr(transform, "persistent_buffers"):
        return transform
    raise tb.Invalid(
        f"a {type(transform).__name__} has functions of its own: give it to swap_model_weights, with a "
        "tensorbus.megatron.CopyService; refit takes an MXFP8ReshardTransform"
    )


def _own_transform(dst_model: Any) -> Any:
    """The transform that Megatron makes for a target which is to be MXFP8; None for others."""
    if dst_model is None:
        return None
    from megatron.core.resharding import refit as theirs

    plan = ReshardPlan([], [])
    theirs._setup_mxfp8_transform_on_plan(plan, dst_model)
    return plan.transform


def _is_mxfp8(tensor: Any) -> bool:
    from megatron.core.fp8_utils import is_mxfp8tensor

    return bool(is_mxfp8tensor(tensor))


def _forget(core: Any) -> None:
    from megatron.core.resharding.utils import invalidate_refit_tensor_cache

    invalidate_refit_tensor_cache(core)


def _copy(to: Any, tensor: Any) -> None:
    to.copy_(tensor)


def _follow(to: Any, tensor: Any) -> None:
    """Where a parameter has moved to other memory since it was added, the data follows."""
    if to.data_ptr() != tensor.data_ptr():
        to.copy_(tensor)
