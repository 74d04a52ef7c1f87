"""Memory that peers read in place."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any

from . import _tensors, _values
from ._c import lib
from ._errors import Invalid, Refused
from ._handle import forks

# NumPy's dtypes for ours. Those that NumPy lacks are unsigned integers of the same width, with the same bits.
_NUMPY = {"bool": "?", "f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2"}


# Codes of Python's struct module.
_PYTHON = {
    "bool": "?",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "f32": "f",
    "f64": "d",
}


def _numpy_code(name: str) -> str:
    if name in _NUMPY:
        return _NUMPY[name]
    return name[0] + str(int(name[1:]) // 8) if name[1:].isdigit() else "u1"


_live: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()  # by address


def begins_at(address: int) -> bool:
    """Whether memory of ``tb.empty`` begins there."""
    return address in _live


class Memory:
    """A tensor in memory that other processes of this machine read in place; made by ``tb.empty``.

    It goes back when neither this object nor an array or tensor that was made from it is there any more. It is not for
    forked children: there it makes no arrays, and touching one that was made before is a fault.
    """

    def __init__(self, shape: Any, dtype: Any, device: Any) -> None:
        self.shape = _values.dims("shape", shape)
        name = str(device)  # a torch.device, too
        self.device = "cpu" if name == "host" else name
        self._dtype = _values.dtype("dtype", dtype)
        nbytes = ctypes.c_int64()
        lib.tb_shape_size(_values.shape("shape", self.shape), self._dtype, None, ctypes.byref(nbytes))
        self.nbytes = nbytes.value
        self._forks_before = forks()
        self._address = ctypes.c_void_p()
        where = "host" if self.device == "cpu" else self.device
        lib.tb_alloc_on(_values.text("device", where), self.nbytes, ctypes.byref(self._address))
        _live[self._address.value or 0] = self

    @property
    def dtype(self) -> str:
        """Its dtype, by our name."""
        return _values.dtype_name(self._dtype)

    @property
    def address(self) -> int:
        """Where it begins."""
        if self._forks_before != forks():
            raise Refused(f"{self!r} is not mapped in a forked child: make new memory there, or spawn the process")
        return self._address.value or 0

    def __repr__(self) -> str:
        return f"<tensorbus.Memory {self.dtype}{list(self.shape)} on {self.device}>"

    def numpy(self) -> Any:
        """A NumPy array of it. Dtypes that NumPy lacks are unsigned integers with the same bits: bf16 is uint16.

        >>> import tensorbus as tb
        >>> x = tb.empty((2, 3), "f32").numpy()
        >>> x[:] = 7
        >>> float(x.sum())
        42.0
        """
        import numpy

        if self.device not in ("cpu", "pinned"):
            raise Invalid(f"{self!r} can't be a NumPy array: NumPy has CPU memory only")
        code = _numpy_code(self.dtype)
        shape = self.shape
        if _values.dtype_bits(self._dtype) < 8:  # two to a byte, along the last dimension
            shape = (self.nbytes,) if not shape or shape[-1] % 2 else (*shape[:-1], shape[-1] // 2)
        if math.prod(shape) == 0:
            return numpy.empty(shape, code)
        owner: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        owner.memory = self  # the array has the buffer, and the buffer has this
        return numpy.frombuffer(owner, code).reshape(shape)

    def memoryview(self) -> Any:
        """A view of it that needs neither NumPy nor PyTorch. Python knows integers, bool, f32 and f64.

        >>> import tensorbus as tb
        >>> x = tb.empty((2, 3), "i32").memoryview()
        >>> x[1, 2] = 7
        >>> x.tolist()[1][2]
        7
        """
        code = _PYTHON.get(self.dtype)
        if self.device not in ("cpu", "pinned") or code is None or 0 in self.shape:
            raise Invalid(f"{self!r} can't be a memoryview")
        owner: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        owner.memory = self
        view: Any = memoryview(owner)
        return view.cast("B").cast(code, self.shape)

    def torch(self) -> Any:
        """A PyTorch tensor of it, of the same dtype."""
        import torch

        dtype = getattr(torch, _TORCH.get(self.dtype, ""), None)
        if dtype is None:
            raise Invalid(f"PyTorch has no dtype {self.dtype}")
        return torch.from_numpy(self.numpy()).view(dtype)

    def __del__(self, free: Callable[..., None] = lib.tb_free) -> None:
        if address := getattr(self, "_address", None):
            free(address)


_TORCH = {
    "bool": "bool",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "e8m0": "float8_e8m0fnu",
}


def _read_memory(tensor: Any) -> _tensors.View | None:
    if not isinstance(tensor, Memory):
        return None
    device = tensor.device if tensor.device.startswith("cuda") else "host"
    return _tensors.View(tensor.address, tensor._dtype, tensor.shape, None, device, tensor)


_tensors.READERS.insert(0, _read_memory)


def empty(shape: Any, dtype: Any = "f32", device: Any = "cpu") -> Memory:
    """Memory for a tensor that peers on this machine read in place, without a copy.

    ``device`` is "cpu", "pinned" (memory of the CPU that GPUs read and write at full speed), "cuda" or "cuda:1". The
    memory's initial contents are undefined.

    >>> import tensorbus as tb
    >>> tb.empty((4096, 4096), "bf16")
    <tensorbus.Memory bf16[4096, 4096] on cpu>
    """
    return Memory(shape, dtype, device)
