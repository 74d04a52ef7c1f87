"""Where the library looks for UCX, NCCL and NVSHMEM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def look(folder: Path, variable: str = "TENSORBUS_UCX", **environment: str) -> str:
    program = f"import os, tensorbus; print(os.environ.get('{variable}', 'unset'))"
    kept = {name: value for name, value in os.environ.items() if name != variable}
    path = f"{folder}:{kept.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**kept, "PYTHONPATH": path, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ucx_of_a_package(tmp_path: Path) -> None:
    """That of the system comes first; what the user has set is left alone."""
    package = tmp_path / "libucx"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported')\n")
    assert look(tmp_path) == "unset"
    file = package / "lib" / "libucp.so.0"
    file.touch()
    assert look(tmp_path) == f"libucp.so.0:{file}"
    assert look(tmp_path, TENSORBUS_UCX="mine") == "mine"


@pytest.mark.parametrize(
    ("name", "library", "variable"),
    [("nccl", "libnccl.so.2", "TENSORBUS_NCCL"), ("nvshmem", "libnvshmem_host.so.3", "TENSORBUS_NVSHMEM")],
)
def test_packages_of_nvidia(tmp_path: Path, name: str, library: str, variable: str) -> None:
    """They are in a folder of a package that others share, and that has no __init__.py."""
    assert look(tmp_path, variable) == "unset"
    file = tmp_path / "nvidia" / name / "lib" / library
    file.parent.mkdir(parents=True)
    assert look(tmp_path, variable) == "unset"
    file.touch()
    assert look(tmp_path, variable) == f"{library}:{file}"
    assert look(tmp_path, variable, **{variable: "mine"}) == "mine"
