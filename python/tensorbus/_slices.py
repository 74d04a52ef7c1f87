"""Plans that somebody else has made, as slices of parameters from rank to rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import pointer
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import _tensors, _values
from ._c import (
    TB_MAX_DIMS,
    tb_copy_view,
    tb_reshard_counts,
    tb_reshard_op,
    tb_reshard_param,
    tb_reshard_plan,
    tb_slice,
)
from ._errors import Error, Invalid

NO_TASK = 2**64 - 1  # TB_NO_TASK


@dataclass(frozen=True, slots=True)
class SliceOp:
    """A slice of a parameter that goes to a peer, or comes from it.

    ``here`` and ``there`` have a slice for each dimension, without steps, of this rank's parameter and of the peer's;
    by default, ``there`` is as ``here``. ``task_id`` is as in ``CopyService.submit_send``.
    """

    param: str
    peer: int  # its seat in the group; may be this rank's own
    here: Sequence[slice]
    there: Sequence[slice] | None = None
    task_id: int | None = None


@dataclass(frozen=True, slots=True)
class PlanParam:
    """A parameter of such a plan that travels in another dtype than its own, or is quantised.

    Both ends say the same ``buffer_dtype``. ``encode``, ``scales`` and ``scale`` are as in ``Batch.add``.
    """

    tensor: Any
    buffer_dtype: Any = None  # by default, its own; of one with an ``encode``, bf16
    encode: str | None = None
    scales: Any = None
    scale: Any = None


class PlanCounts(NamedTuple):
    """How many receives were written in which way."""

    direct: int  # into the parameter itself
    copied: int  # by a cast after the run
    transformed: int
    accumulated: int  # into an accumulator, and quantised from there


class Plan:
    """Such a plan as the library takes it, and what keeps its memory alive."""

    def __init__(
        self,
        nranks: int,
        sends: Any,
        recvs: Any,
        sources: Any,
        targets: Any,
        describe: Callable[[_tensors.View], tb_copy_view],
    ) -> None:
        self._nranks, self._describe = nranks, describe
        self._keepalive: list[Any] = []
        self.counts = tb_reshard_counts()
        self.c = tb_reshard_plan()
        for name, params, is_target in ("sources", sources, False), ("targets", targets, True):
            made = [self._param(name, key, each, is_target) for key, each in _values.mapping(name, params).items()]
            setattr(self.c, name, (tb_reshard_param * len(made))(*made))
            setattr(self.c, f"n{name}", len(made))
        for name, ops in ("sends", sends), ("recvs", recvs):
            described = [self._op(f"{name}[{i}]", op) for i, op in enumerate(_values.items(name, ops))]
            setattr(self.c, name, (tb_reshard_op * len(described))(*described))
            setattr(self.c, f"n{name}", len(described))

    @property
    def result(self) -> PlanCounts:
        """Of the run."""
        c = self.counts
        return PlanCounts(c.direct, c.copied, c.transformed, c.accumulated)

    def _param(self, kind: str, name: Any, given: Any, is_target: bool) -> tb_reshard_param:
        c_name = _values.text(f"a name of {kind}", name)
        param = given if isinstance(given, PlanParam) else PlanParam(given)
        view = _tensors.read_for(f"{kind} '{name}'", param.tensor, is_target)
        try:
            made = tb_reshard_param(
                name=c_name,
                view=pointer(self._describe(view)),
                buffer_dtype=0 if param.buffer_dtype is None else _values.dtype("buffer_dtype", param.buffer_dtype),
            )
            if param.encode is not None or param.scales is not None or param.scale is not None:
                made.encode = _values.text("encode", param.encode)
                scales = _tensors.read_scales(view, made.encode, param.scales, param.scale)
                for field, each in scales.items():
                    if is_target and each.is_readonly:
                        raise Invalid(f"{field} is read-only, and can't be received into")
                    setattr(made, field, each.address if math.prod(each.shape) else None)
                    self._keepalive.append(each)
        except Error as error:
            raise type(error)(f"{kind} '{name}': {error}", error.status) from None
        self._keepalive += view, made
        return made

    def _op(self, what: str, op: Any) -> tb_reshard_op:
        if not isinstance(op, SliceOp):
            raise Invalid(f"{what} must be a SliceOp, not {type(op).__name__}")
        here = _slice(f"here of {what}", op.here)
        task_id = op.task_id
        return tb_reshard_op(
            param=_values.text(f"param of {what}", op.param),
            peer=_values.integer(f"peer of {what}", op.peer, 0, self._nranks - 1),
            here=here,
            there=here if op.there is None else _slice(f"there of {what}", op.there),
            task_id=NO_TASK if task_id is None else _values.integer(f"task_id of {what}", task_id, 0, NO_TASK - 1),
        )


def _slice(what: str, given: Any) -> tb_slice:
    slices = _values.items(what, given)
    if len(slices) > TB_MAX_DIMS:
        raise Invalid(f"{what} has {len(slices)} dimensions; there are at most {TB_MAX_DIMS}")
    made = tb_slice()
    for d, each in enumerate(slices):
        if not isinstance(each, slice) or each.step not in (None, 1):
            raise Invalid(f"dim {d} of {what} must be a slice(start, stop), not {each!r}")
        start = 0 if each.start is None else _values.integer(f"dim {d} of {what}", each.start, 0, _values.MOST_I64)
        stop = _values.integer(f"the end of dim {d} of {what}", each.stop, start, _values.MOST_I64)
        made.start[d], made.length[d] = start, stop - start
    return made
