"""Tensors of PyTorch: where one is, what it is a part of, and on which stream the program works.

torch is used if the program has imported it, and never imported from here.
"""

from __future__ import annotations

import sys
from typing import Any

from . import _dtensor, _tensors, _values
from ._c import lib
from ._errors import Invalid, Refused

_dtypes: dict[Any, int] = {}  # numbers of ours by torch.dtype
_layouts: dict[Any, tuple[Any, str]] = {}  # texts by what a DTensorSpec says


def loaded() -> Any:
    """The module torch, or None if the program has not imported it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def dtensor_type() -> Any:
    """The class DTensor, or None if the program has not imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor, or a parameter that is one."""
    kind = dtensor_type()
    return kind is not None and isinstance(tensor, kind)


def _wait(tensor: Any) -> Any:
    """The result of an asynchronous collective; any other tensor as it is."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


def local_part(tensor: Any) -> Any:
    """What this process has of it: of a DTensor its local tensor, which a collective may still be filling in."""
    return _wait(tensor._local_tensor if is_dtensor(tensor) else tensor)


def spec_layout(spec: Any, ranks: _dtensor.RankMap | None = None, within: tuple[Any, ...] = ()) -> str:
    """The layout of a DTensorSpec. Many parameters have the same few, so they are kept."""
    key = (
        spec.mesh,
        spec.placements,
        getattr(spec, "shard_order", None),
        getattr(spec, "use_strided_shard_as_shard_order", None),
        within,
        None if ranks is None else id(ranks),
    )
    kept = _layouts.get(key)
    if kept is None:
        if len(_layouts) >= 4096:
            _layouts.clear()
        kept = _layouts[key] = (ranks, _dtensor.spec_layout(spec, ranks, within))  # ranks stay, so that their id does
    return kept[1]


def _check(torch: Any, tensor: Any) -> None:
    """Refuses what is no plain array of elements in memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not getattr(tensor, "_is_buffer", False):
        raise Refused(
            f"it is a {type(tensor).__module__}.{type(tensor).__qualname__}, whose memory need not be its "
            "elements; add the tensors that it is made of, or its .data if that is all of it"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Refused(f"it is {'nested' if tensor.is_nested else tensor.layout}, not strided")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise Refused("its elements are not what is in its memory: it is quantized, conjugated or negated lazily")


def device_name(tensor: Any) -> str:
    """Its device as the library names it."""
    kind = tensor.device.type
    if kind == "cpu":
        return "host"
    if kind == "cuda":
        return f"cuda:{tensor.device.index}"
    raise Invalid(f"it is on device '{tensor.device}'; there are cpu and cuda")


def _dtype(tensor: Any) -> int:
    number = _dtypes.get(tensor.dtype)
    if number is None:
        number = _dtypes[tensor.dtype] = _values.dtype("its dtype", str(tensor.dtype).removeprefix("torch."))
    return number


class Held:
    """Keeps a tensor's memory alive, and sees when it is not the tensor's any more."""

    __slots__ = ("_tensor", "address", "local", "storage", "storage_address", "storage_nbytes")

    def __init__(self, tensor: Any, local: Any) -> None:
        self._tensor, self.local, self.storage = tensor, local, local.untyped_storage()
        self.address = local.data_ptr()
        self.storage_address, self.storage_nbytes = self.storage.data_ptr(), self.storage.nbytes()

    def alias(self, view: _tensors.View) -> Any:
        """A tensor of the memory as it was read, wherever the program's tensor is now."""
        empty = self.local.new_empty(0)
        offset = (self.address - self.storage_address) // empty.element_size()
        return empty.set_(self.storage, offset, view.shape, view.strides or _tensors.row_major(view.shape))

    @property
    def is_intact(self) -> bool:
        """Whether the memory is where it was, and as long."""
        return bool(
            self.storage.nbytes() == self.storage_nbytes and self.storage.data_ptr() == self.storage_address,
        )

    def look_again(self) -> None:
        """Raises if the memory is not the tensor's any more."""
        if not self.is_intact:
            raise Invalid("its memory was freed or resized after it was added; make the batch again")
        if local_part(self._tensor).data_ptr() != self.address:
            raise Invalid("it has moved to other memory since it was added; make the batch again, or use add_module")


def read(
    tensor: Any,
    ranks: _dtensor.RankMap | None = None,
    within: tuple[Any, ...] = (),
    *,
    plain: str | None = None,
    looks: bool = True,
) -> _tensors.View | None:
    """Where a tensor of PyTorch is; None for anything else.

    ``ranks`` maps the ranks of a DTensor's mesh to seats. If that is a sub-mesh of one of the meshes ``within``,
    the meshes beside it have copies. ``plain`` is the layout of other tensors. Without ``looks``, the caller looks at
    it again.
    """
    torch = loaded()
    if torch is None or not isinstance(tensor, torch.Tensor):
        return None
    spec = tensor._spec if is_dtensor(tensor) else None
    local = _wait(tensor if spec is None else tensor._local_tensor)
    _check(torch, local)
    shape = tuple(local.shape)
    if spec is not None and not spec.mesh._is_current_rank_part_of_mesh():
        shape = (0,) * len(spec.shape)  # torch has no shape for what this rank has: nothing
    try:
        held = Held(tensor, local)
    except (NotImplementedError, RuntimeError) as error:  # such as what torch.func.vmap passes to functions
        raise Refused(f"it has no memory: {error}") from error
    return _tensors.View(
        address=held.address if local.numel() else 0,
        dtype=_dtype(local),
        shape=shape,
        strides=None if local.is_contiguous() else tuple(local.stride()),
        device=device_name(local),
        keepalive=held,
        global_shape=None if spec is None else tuple(spec.shape),
        layout=plain if spec is None else spec_layout(spec, ranks, within),
        look_again=held.look_again if looks else None,
    )


def read_dtensor(name: str, tensor: Any, ranks: _dtensor.RankMap | None, mesh: Any) -> _tensors.View:
    """The same of what must be a DTensor."""
    if not is_dtensor(tensor):
        raise Invalid(f"tensor '{name}': ranks= and mesh= are for DTensors, and this is a {type(tensor).__name__}")
    _dtensor.check_ranks(ranks)
    if mesh is not None and not hasattr(mesh, "mesh"):
        raise Invalid(f"tensor '{name}': mesh must be a DeviceMesh, not {type(mesh).__name__}")
    view = read(tensor, ranks, () if mesh is None else (mesh,))
    assert view is not None
    return view


def current_stream(device: str) -> int | None:
    """The handle of the stream that the program uses on a device such as "cuda:0"; None if torch has none there."""
    torch = loaded()
    if torch is None or not device.startswith("cuda") or not torch.cuda.is_initialized():
        return None
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


def torch_allocator() -> Any:
    """A ``torch.cuda.MemPool`` of memory that GPUs of other processes read in place.

    Memory that PyTorch allocates in it, ``with torch.cuda.use_mem_pool(pool):``, is sent to processes of the same
    machine without an additional copy. Keep the pool as long as its tensors.
    """
    import torch

    if not torch.cuda.is_available():
        raise Refused("tb.torch_allocator() is for GPUs, and torch sees none; tb.share(module) is for CPU memory")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(lib._name, "tb_torch_alloc", "tb_torch_free")
    pool: Any = torch.cuda.MemPool(allocator.allocator())
    pool.tensorbus_allocator = allocator  # which the pool uses
    return pool


_tensors.READERS.insert(0, read)
_tensors.current_stream = current_stream
