"""Arguments of users as values for C. Where ctypes would truncate, these refuse, by the parameter's name."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

from ._c import TB_MAX_DIMS, lib, tb_shape
from ._errors import Invalid

MOST_I32, MOST_U32, MOST_I64 = 2**31 - 1, 2**32 - 1, 2**63 - 1


def text(parameter: str, value: Any) -> bytes:
    """A str as UTF-8 for C."""
    if not isinstance(value, str):
        raise Invalid(f"{parameter} must be a str, not {type(value).__name__}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{parameter} is not valid Unicode: {value!r}") from None
    if b"\0" in encoded:
        raise Invalid(f"{parameter} has a NUL character: {value!r}")
    return encoded


def optional_text(parameter: str, value: Any) -> bytes | None:
    """The same; None stays None, which is C's NULL."""
    return None if value is None else text(parameter, value)


def integer(parameter: str, value: Any, least: int, most: int) -> int:
    """An int (or what has ``__index__``) in a range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise Invalid(f"{parameter} must be an int, not {type(value).__name__}") from None
    if not least <= number <= most:
        raise Invalid(f"{parameter} is {number}; it must be {least} to {most}")
    return number


def flag(parameter: str, value: Any) -> bool:
    """A bool, and not something that is merely true."""
    if not isinstance(value, bool):
        raise Invalid(f"{parameter} must be a bool, not {type(value).__name__}")
    return value


def choice(parameter: str, value: Any, choices: Mapping[str, int]) -> int:
    """The number that a text stands for."""
    if not isinstance(value, str) or value not in choices:
        raise Invalid(f"{parameter} is {value!r}; there are {', '.join(map(repr, choices))}")
    return choices[value]


def items(parameter: str, value: Any) -> list[Any]:
    """A list of what can be iterated over; a str is no list."""
    try:
        if not isinstance(value, str | bytes):
            return list(value)
    except TypeError:
        pass
    raise Invalid(f"{parameter} must be a list or tuple, not {type(value).__name__}")


def mapping(parameter: str, value: Any) -> Mapping[Any, Any]:
    """A dict, or what is like one; {} for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Invalid(f"{parameter} must be a dict, not {type(value).__name__}")
    return value


def milliseconds(parameter: str, seconds: Any) -> int:
    """Seconds as C's milliseconds, at least 1; 0, the default, for None."""
    if seconds is None:
        return 0
    try:
        number = float(seconds)
    except (TypeError, ValueError, OverflowError):
        raise Invalid(f"{parameter} must be a number of seconds, not {seconds!r}") from None
    if math.isnan(number) or number < 0:
        raise Invalid(f"{parameter} is {seconds!r}; it must be a number of seconds, 0 or more")
    return max(1, math.ceil(min(number * 1000, MOST_I32)))


def dims(parameter: str, value: Any) -> tuple[int, ...]:
    """A shape: at most 8 non-negative ints, or one."""
    if type(value) is tuple and len(value) <= TB_MAX_DIMS and all(type(n) is int and 0 <= n <= MOST_I64 for n in value):
        return value  # as nearly all are: models have tens of thousands
    try:
        numbers = [operator.index(value)]
    except TypeError:
        numbers = items(parameter, value)
    if len(numbers) > TB_MAX_DIMS:
        raise Invalid(f"{parameter} has {len(numbers)} dimensions; there are at most {TB_MAX_DIMS}")
    return tuple(integer(f"dim {i} of {parameter}", n, 0, MOST_I64) for i, n in enumerate(numbers))


def shape(parameter: str, value: Any) -> tb_shape:
    """A shape as C's struct."""
    numbers = dims(parameter, value)
    return tb_shape(len(numbers), (ctypes.c_int64 * TB_MAX_DIMS)(*numbers))


@functools.lru_cache(maxsize=256)
def _parse_dtype(name: str) -> int:
    out = ctypes.c_int()
    lib.tb_dtype_parse(text("dtype", name), ctypes.byref(out))
    return out.value


def dtype(parameter: str, value: Any) -> int:
    """A dtype's number, by our name, or that of PyTorch, NumPy or safetensors; or from a dtype object of these."""
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(name, str):
        name = str(value)  # torch.float32
    try:
        return _parse_dtype(name)
    except Invalid as error:
        raise Invalid(f"{parameter}: {error}") from None


def dtype_name(number: int) -> str:
    """Our name of a dtype."""
    name: bytes = lib.tb_dtype_name(number)
    return name.decode()


def dtype_bits(number: int) -> int:
    """How many bits an element has."""
    bits: int = lib.tb_dtype_bits(number)
    return bits
