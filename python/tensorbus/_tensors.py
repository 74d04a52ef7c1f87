"""Tensors of other packages: where one is, and what it says of itself.

``read`` turns a NumPy array, a ``tb.Memory`` or anything with DLPack into a ``View``. Another kind of tensor has a
reader in ``READERS``: a function that returns a View, or None for what is not of its kind. Nothing here imports a
package that the program has not imported.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from dataclasses import dataclass
from typing import Any

from . import _values
from ._c import lib
from ._errors import Error, Invalid


@dataclass(slots=True)  # not frozen: tens of thousands are made, and that takes three times as long
class View:
    """A tensor in memory, and never changed. What it is a part of is known to those that bring a layout."""

    address: int
    dtype: int  # the number of a tb_dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None: row-major without gaps
    device: str  # as tb_tensor.memory names it: "host", "cuda:0"
    keepalive: object  # whatever owns the memory
    is_readonly: bool = False
    global_shape: tuple[int, ...] | None = None
    layout: str | None = None
    look_again: Callable[[], None] | None = None  # raises if the memory is not the tensor's any more


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements follow each other. Strides of dimensions with one index do not matter."""
    return 0 in shape or all(n == 1 or s == r for n, s, r in zip(shape, strides, row_major(shape), strict=True))


def in_elements(nbytes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in elements of those in bytes."""
    if any(n % itemsize for n in nbytes):
        raise Invalid(f"its strides, {nbytes} bytes, are not whole elements of {itemsize} bytes")
    return tuple(n // itemsize for n in nbytes)


def span(view: View) -> tuple[int, int]:
    """The first byte of the tensor's elements, and the one after the last."""
    if 0 in view.shape:
        return view.address, view.address
    strides = view.strides or row_major(view.shape)
    reach = [(n - 1) * s for n, s in zip(view.shape, strides, strict=True)]
    bits = _values.dtype_bits(view.dtype)
    first = sum(r for r in reach if r < 0)
    last = sum(r for r in reach if r > 0) + 1
    return view.address + first * bits // 8, view.address + -(-last * bits // 8)


# ---- NumPy ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _numpy_dtype(dtype: Any) -> int:
    return _values.dtype("its dtype", dtype)


def _read_numpy(tensor: Any) -> View | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(tensor, numpy.ndarray):
        return None
    if not tensor.dtype.isnative:
        raise Invalid(f"its dtype, {tensor.dtype.str}, has the other byte order")
    contiguous = tensor.flags.c_contiguous
    owner = tensor
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    before = (owner.ctypes.data, owner.nbytes)

    def look_again() -> None:
        if (owner.__array_interface__["data"][0], owner.nbytes) != before:
            raise Invalid("its memory was freed or resized after it was added; make the batch again")

    return View(
        address=tensor.ctypes.data,
        dtype=_numpy_dtype(tensor.dtype),
        shape=tensor.shape,
        strides=None if contiguous else in_elements(tensor.strides, tensor.itemsize),
        device="host",
        keepalive=tensor,
        is_readonly=not tensor.flags.writeable,
        look_again=look_again if owner.flags.owndata else None,
    )


# ---- DLPack ---------------------------------------------------------------------------------------------------------


class _DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _DLVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY = 1
_DEVICES = {1: "host", 2: "cuda", 3: "host", 13: "cuda"}  # CPU, CUDA, CUDA's pinned and managed memory
_DTYPES = {
    (0, 8): "i8",
    (0, 16): "i16",
    (0, 32): "i32",
    (0, 64): "i64",
    (1, 8): "u8",
    (1, 16): "u16",
    (1, 32): "u32",
    (1, 64): "u64",
    (2, 16): "f16",
    (2, 32): "f32",
    (2, 64): "f64",
    (4, 16): "bf16",
    (6, 8): "bool",
    (10, 8): "f8e4m3",
    (12, 8): "f8e5m2",
    (14, 8): "e8m0",
}

_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes = [py_object, ctypes.c_char_p]
_is_capsule.restype = ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [py_object, ctypes.c_char_p]
_capsule_pointer.restype = c_void_p


def _export(tensor: Any) -> Any:
    """The tensor's capsule. Nothing is waited for: transfers have a stream of their own."""
    try:
        kind, _ = tensor.__dlpack_device__()
        stream: dict[str, Any] = {} if kind == 1 else {"stream": -1}
        try:
            return tensor.__dlpack__(max_version=(1, 1), **stream)
        except TypeError:  # of before DLPack 1.0
            return tensor.__dlpack__(**stream)
    except Exception as error:
        raise Invalid(f"its DLPack is of no use: {type(error).__name__}: {error}") from error


def _read_dlpack(tensor: Any) -> View | None:
    if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
        return None
    capsule = _export(tensor)
    is_readonly = False
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _DLVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise Invalid(f"its DLPack has version {versioned.major}.{versioned.minor}; 1 is known")
        is_readonly = bool(versioned.flags & _READ_ONLY)
        t = versioned.tensor
    elif _is_capsule(capsule, b"dltensor"):
        t = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise Invalid(f"its __dlpack__ returned no DLPack capsule, but {type(capsule).__name__}")
    device = _DEVICES.get(t.device_type)
    name = _DTYPES.get((t.code, t.bits))
    if device is None:
        raise Invalid(f"it is on DLPack's device type {t.device_type}, which tensorbus does not know")
    if name is None or t.lanes != 1:
        raise Invalid(f"it has DLPack's dtype code {t.code} with {t.bits} bits and {t.lanes} lanes")
    shape = tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] for i in range(t.ndim)) if t.strides else None
    return View(
        address=(t.data or 0) + t.byte_offset,
        dtype=_values.dtype("its dtype", name),
        shape=shape,
        strides=None if strides is None or is_row_major(shape, strides) else strides,
        device=device if device == "host" else f"{device}:{t.device_id}",
        keepalive=capsule,  # which frees its tensor when it goes
        is_readonly=is_readonly,
    )


# ---- All of them ----------------------------------------------------------------------------------------------------

READERS: list[Callable[[Any], View | None]] = [_read_numpy, _read_dlpack]


def read(tensor: Any) -> View:
    """Where the tensor is; its memory stays as long as the View's ``keepalive``."""
    if isinstance(tensor, View):
        return tensor
    for reader in READERS:
        view = reader(tensor)
        if view is not None:
            return view
    raise Invalid(f"{type(tensor).__name__} is no tensor: NumPy arrays, PyTorch tensors and what has DLPack are")


def read_for(what: str, tensor: Any, is_target: bool) -> View:
    """The same for what is called ``what``; what is received into can be written."""
    try:
        view = read(tensor)
        if is_target and view.is_readonly:
            raise Invalid("it is read-only, and can't be received into")
    except Error as error:
        raise type(error)(f"{what}: {error}", error.status) from None
    return view


def read_all(parameter: str, tensors: Any, is_target: bool) -> dict[str, View]:
    """The same for a dict of tensors by name."""
    return {
        name: read_for(f"{parameter} {name!r}", tensor, is_target)
        for name, tensor in _values.mapping(parameter, tensors).items()
    }


def read_scales(data: View, encode: bytes, scales: Any, scale: Any) -> dict[str, View]:
    """What is given of a quantised tensor's scales; the library can't see how long their memory is."""
    wanted = c_size_t(), c_size_t(), c_size_t()
    lib.tb_encode_nbytes(encode, byref(_values.shape("shape", data.shape)), *map(byref, wanted))
    views: dict[str, View] = {}
    for field, tensor, nbytes in ("scales", scales, wanted[1].value), ("scale", scale, wanted[2].value):
        if tensor is None:
            continue
        view = read(tensor)
        first, last = span(view)
        if view.strides is not None or last - first != nbytes:
            raise Invalid(f"{field} must have {nbytes} bytes without gaps, not {last - first}")
        if view.device != data.device:
            raise Invalid(f"{field} is on {view.device}, and the data on {data.device}")
        views[field] = view
    return views


# ---- Streams --------------------------------------------------------------------------------------------------------


def _no_stream(_device: str) -> int | None:
    return None


# Of a device such as "cuda:0": the handle of the program's current stream, or None. Set by whoever knows devices.
current_stream: Callable[[str], int | None] = _no_stream
