"""What a loader does with checkpoint tensors, recorded: recording tensors, and the boxes that it copies them to.

A recording tensor has the shape and dtype of a checkpoint tensor, and no memory. Views of it are views of a meta
tensor, whose offset and strides say which elements they are. While ``Recording`` is active nothing is written to the
tensors that it watches: a copy of a recording tensor to one of them becomes a ``Piece``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

MOST_PIECES = 64  # of one copy; what needs more is not recorded as a copy


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor, and where it lies in a parameter."""

    source: str  # the checkpoint tensor
    start: tuple[int, ...]
    size: tuple[int, ...]
    param: str
    offset: int  # of the box's first element in the parameter's memory, in elements
    strides: tuple[int, ...]  # of the box's dims there


@dataclass(slots=True)
class Slot:
    """A parameter or buffer that loaders may write to, and what was recorded for it."""

    module: str
    key: str
    tensor: Any
    pieces: list[Piece] = field(default_factory=list)
    constants: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)  # offset, size, strides
    computed: dict[str, set[str]] = field(default_factory=dict)  # why something was not a copy: checkpoint tensors
    emptied: set[str] = field(default_factory=set)  # checkpoint tensors that were filled with a constant, then copied

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.module}.{self.key}" if self.module else self.key

    @property
    def sources(self) -> set[str]:
        """The checkpoint tensors that were used for it."""
        return {piece.source for piece in self.pieces}.union(self.emptied, *self.computed.values())


class Recorded(torch.Tensor):  # type: ignore[misc] # torch has no types here
    """A checkpoint tensor, a view of one, or what a loader has computed from several."""

    index: Any  # a meta tensor over the memory of the checkpoint tensor
    source: str
    shape_in_checkpoint: tuple[int, ...]
    computed: dict[str, set[str]]  # why it is no view: checkpoint tensors
    is_narrowed: bool  # was cast to a dtype that lacks values
    is_constant: bool  # was filled with a number

    @staticmethod
    def __new__(
        cls, index: Any, device: Any, source: str, shape: tuple[int, ...], is_narrowed: bool = False
    ) -> Recorded:
        """Makes one whose elements are those of ``index``."""
        made: Recorded = torch.Tensor._make_wrapper_subclass(
            cls,
            index.size(),
            strides=index.stride(),
            storage_offset=index.storage_offset(),
            dtype=index.dtype,
            device=device,
        )
        made.index, made.source, made.shape_in_checkpoint = index, source, shape
        made.computed, made.is_narrowed, made.is_constant = {}, is_narrowed, False
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:
        return f"Recorded({self.source!r}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a recording tensor while nothing is recorded")


def record(name: str, shape: Sequence[int], dtype: Any, device: Any) -> Recorded:
    """A recording tensor for a checkpoint tensor."""
    return Recorded(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, name, tuple(shape))


_SAME_ELEMENTS = {_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default, _aten.lift_fresh.default}
_FILLS = {_aten.fill_.Scalar, _aten.zero_.default}


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """Records what happens to recording tensors and to the slots' tensors, none of which are written."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        self._slots: dict[int, Slot] = {}
        self._keep = []
        for slot in slots:
            storage = slot.tensor.untyped_storage()
            self._slots.setdefault(storage._cdata, slot)  # the first of those that are tied
            self._keep.append(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation of torch comes here first."""
        kwargs = kwargs or {}
        flat = list(_flatten((args, kwargs)))
        recorded = [t for t in flat if isinstance(t, Recorded)]
        written = self._written(func, args, kwargs)
        if written is not None:
            target, slot = written
            if isinstance(target, Recorded):
                if func in _FILLS and len(recorded) == 1:
                    target.is_constant = True
                    return target
                raise RuntimeError(f"{func} writes to the checkpoint tensor '{target.source}'")
            self._write(func, args, target, slot, recorded)
            return target
        if not recorded:
            return func(*args, **kwargs)
        return self._derive(func, args, kwargs, recorded)

    def _written(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Slot] | None:
        """The slot that the operation would write to, or a recording tensor."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(target, Recorded):
                return target, Slot("", "", target)
            if isinstance(target, torch.Tensor):
                slot = self._slots.get(target.untyped_storage()._cdata)
                if slot is not None:
                    return target, slot
        return None

    def _write(self, func: Any, args: Any, target: Any, slot: Slot, recorded: list[Recorded]) -> None:
        offset = target.storage_offset() - slot.tensor.storage_offset()
        size, strides = tuple(target.shape), tuple(target.stride())
        if func in _FILLS and not recorded:
            slot.constants.append((offset, size, strides))
            return
        names = {t.source for t in recorded}.union(*(n for t in recorded for n in t.computed.values()))
        source = args[1] if func is _aten.copy_.default else None
        if not isinstance(source, Recorded):
            slot.computed.setdefault(f"{func} writes to '{slot.key}'", set()).update(names)
            return
        if source.is_constant:
            slot.constants.append((offset, size, strides))
            slot.emptied.add(source.source)
            return
        for why, its in source.computed.items():
            slot.computed.setdefault(why, set()).update(its)
        if source.computed:
            return
        if target.dtype != slot.tensor.dtype:
            slot.computed.setdefault(f"'{slot.key}' is written as {target.dtype}", set()).update(names)
            return
        if source.is_narrowed and source.dtype != target.dtype:
            slot.computed.setdefault(f"'{slot.key}' is cast through {source.dtype}", set()).update(names)
            return
        index = source.index.view(size) if target.numel() == source.numel() == 1 else source.index.expand(size)
        found = _boxes(index, source.shape_in_checkpoint, strides)
        if found is None:
            slot.computed.setdefault(f"'{slot.key}' takes elements that are no box of '{source.source}'", names)
            return
        slot.pieces += [Piece(source.source, a, n, slot.name, offset + at, s) for a, n, at, s in found]

    def _derive(self, func: Any, args: Any, kwargs: Any, recorded: list[Recorded]) -> Any:
        first = recorded[0]
        if any(t.is_constant for t in recorded):
            raise RuntimeError(f"{func} of the checkpoint tensor '{first.source}', which was filled with a constant")
        is_plain = len(recorded) == 1 and not first.computed
        if is_plain and func in _SAME_ELEMENTS:
            dtype = kwargs.get("dtype") or first.dtype
            can_cast = dtype.is_floating_point and first.dtype.is_floating_point and not first.is_narrowed
            if dtype == first.dtype or can_cast:
                return self._same_elements(first, dtype, kwargs.get("device") or first.device)
        out = func(*_map(args), **_map(kwargs))  # on meta tensors; what needs values fails here
        is_view = func.is_view and all(t.dtype == first.dtype for t in _flatten((out,)) if isinstance(t, torch.Tensor))
        if is_plain and is_view:
            shape, is_narrowed = first.shape_in_checkpoint, first.is_narrowed
            return _wrap(out, lambda view: Recorded(view, first.device, first.source, shape, is_narrowed))
        names = {t.source for t in recorded}.union(*(n for t in recorded for n in t.computed.values()))
        whys = {why: set(its) for t in recorded for why, its in t.computed.items()}
        if not whys:
            whys[f"{func} of " + ", ".join(f"'{n}'" for n in sorted(names)[:3])] = names
        next(iter(whys.values())).update(names)

        def wrap(value: Any) -> Any:
            made = Recorded(value, first.device, first.source, first.shape_in_checkpoint)
            made.computed = whys
            return made

        return _wrap(out, wrap)

    @staticmethod
    def _same_elements(tensor: Recorded, dtype: Any, device: Any) -> Recorded:
        """A copy: the elements are the same, so that it counts as the view that it is a copy of."""
        index = torch.empty(0, dtype=dtype, device="meta").set_(
            torch.empty(math.prod(tensor.shape_in_checkpoint), dtype=dtype, device="meta").untyped_storage(),
            tensor.index.storage_offset(),
            tensor.index.size(),
            tensor.index.stride(),
        )
        is_narrowed = tensor.is_narrowed or torch.promote_types(tensor.dtype, dtype) != dtype
        return Recorded(index, device, tensor.source, tensor.shape_in_checkpoint, is_narrowed)


def _flatten(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        values = values.values()
    for value in values:
        if isinstance(value, list | tuple | dict):
            yield from _flatten(value)
        else:
            yield value


def _map(values: Any) -> Any:
    """The arguments with meta tensors in the place of all tensors."""
    if isinstance(values, Recorded):
        return values.index
    if isinstance(values, torch.Tensor):
        return values.to("meta")
    if isinstance(values, dict):
        return {k: torch.device("meta") if k == "device" else _map(v) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_map(v) for v in values)
    return values


def _wrap(values: Any, wrap: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return wrap(values)
    if isinstance(values, list | tuple):
        return type(values)(_wrap(v, wrap) for v in values)
    return values


_Box = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]  # start, size, offset in the target, strides there


def _boxes(index: Any, shape: tuple[int, ...], target_strides: tuple[int, ...]) -> list[_Box] | None:
    """The boxes of a checkpoint tensor that a view of it consists of, and where they lie in the target.

    None if the view takes an element twice, or if there are too many boxes.

    >>> _boxes(torch.empty(4, 6, device="meta")[2:], (4, 6), (6, 1))
    [((2, 0), (2, 6), 0, (6, 1))]
    """
    if index.numel() == 0:
        return []
    rows = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    # Dims of the view, as (stride in the source, size, stride in the target), those of one index left out.
    dims = [(s, n, t) for s, n, t in zip(index.stride(), index.shape, target_strides, strict=True) if n > 1]
    if any(s <= 0 for s, _, _ in dims):
        return None
    split = _split_by_rows(dims, shape, rows)
    if split is None:
        return None
    first = index.storage_offset()
    start = [first // row % n for row, n in zip(rows, shape, strict=True)]
    size, strides = [1] * len(shape), [0] * len(shape)
    loops: list[tuple[int, int, int, int]] = []  # dim, step, count, stride in the target: one box for each index
    for d, row in enumerate(rows):
        own = _merge(sorted(((s // row, n, t) for at, s, n, t in split if at == d), reverse=True))
        if own and own[-1][0] == 1:
            _, size[d], strides[d] = own.pop()
        loops += [(d, s, n, t) for s, n, t in own]
    if math.prod(n for _, _, n, _ in loops) > MOST_PIECES:
        return None
    boxes: list[_Box] = []
    for at in itertools.product(*(range(n) for _, _, n, _ in loops)):
        begin, offset = list(start), 0
        for i, (d, step, _, stride) in zip(at, loops, strict=True):
            begin[d] += i * step
            offset += i * stride
        if any(b + n > whole for b, n, whole in zip(begin, size, shape, strict=True)):
            return None
        boxes.append((tuple(begin), tuple(size), offset, tuple(strides)))
    return boxes


def _split_by_rows(
    dims: list[tuple[int, int, int]], shape: tuple[int, ...], rows: list[int]
) -> list[tuple[int, int, int, int]] | None:
    """Each dim of a view with the dim of the checkpoint tensor that it runs along; one along several is split."""
    split: list[tuple[int, int, int, int]] = []
    todo = list(dims)
    while todo:
        s, n, t = todo.pop()
        d = next((d for d, row in enumerate(rows) if shape[d] > 1 and s >= row), None)
        if d is None or s % rows[d]:
            return None
        inside = -(-shape[d] // (s // rows[d]))  # indices before it leaves dim d
        if inside < 2:
            return None
        if n > inside and d > 0 and shape[d] % (s // rows[d]) == 0 and n % inside == 0:
            todo += [(s * inside, n // inside, t * inside), (s, inside, t)]
        else:
            split.append((d, s, n, t))
    return split


def _merge(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Dims of one dim of the checkpoint tensor, the slowest first; what follows on one another becomes one."""
    merged: list[tuple[int, int, int]] = []
    for s, n, t in reversed(dims):
        if merged and (s, t) == (merged[-1][0] * merged[-1][1], merged[-1][2] * merged[-1][1]):
            merged[-1] = (merged[-1][0], merged[-1][1] * n, merged[-1][2])
        else:
            merged.append((s, n, t))
    return merged[::-1]
