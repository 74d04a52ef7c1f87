"""In the place of SGLang's compiled kernels for CPUs, which no package registry has: imports work, calls fail."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"sgl_kernel.{name} is not installed")

    return missing
