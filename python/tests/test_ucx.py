"""Where the library looks for UCX."""

import os
import subprocess
import sys
from pathlib import Path


def look(folder: Path, **environment: str) -> str:
    program = "import os, tensorbus; print(os.environ.get('TENSORBUS_UCX', 'unset'))"
    kept = {name: value for name, value in os.environ.items() if name != "TENSORBUS_UCX"}
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
