"""The scripts of docs/python.md, as it says to run them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples/python"
PATIENCE_S = 120.0


def test_what_is_run_on_gpus_can_be_run() -> None:
    """What of it needs no GPU."""
    program = EXAMPLES.parents[1] / "tests/gpu/torch_engine.py"
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1] / "python")}
    command = [sys.executable, str(program), "--cpu", "unmapped"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 times, with a graph from before; 12 of 16 modules" in ran.stdout
    assert "1 of 1 passed" in ran.stdout


class Script:
    """A process and the lines that it has written."""

    def __init__(self, folder: Path, name: str, *command: str) -> None:
        env = os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1] / "python"), "OMP_NUM_THREADS": "1"}
        self.path = folder / f"{name}.log"
        with self.path.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=EXAMPLES, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_written(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Waits for so many matches in what it has written."""
        until = time.monotonic() + PATIENCE_S
        while True:
            found = list(re.finditer(pattern, self.path.read_text()))
            if len(found) >= count:
                return found
            assert time.monotonic() < until, f"no {pattern!r} in\n{self.path.read_text()[-4000:]}"
            assert self.process.poll() is None, self.path.read_text()[-4000:]
            time.sleep(0.02)

    def ends(self, code: int = 0) -> str:
        assert self.process.wait(PATIENCE_S) == code, self.path.read_text()[-4000:]
        return self.path.read_text()

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: itself and its ranks
            self.process.wait()


def test_two_scripts(tmp_path: Path) -> None:
    scripts = [
        Script(tmp_path, f"{name}{seat}", sys.executable, name, seat)
        for name, seat in (("send.py", "0"), ("send.py", "1"), ("recv.py", ""))
    ]
    try:
        texts = [script.ends() for script in scripts]
    finally:
        for script in scripts:
            script.stop()
    assert "engine: version 3, last row [350.0, 351.0, 352.0, 353.0]" in texts[2]


def torchrun(folder: Path, name: str, nranks: int, *args: str) -> Script:
    url = f"unix:{folder}/bus.sock"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nranks)]
    return Script(folder, f"{name}-{args[0]}-{args[1]}", *run, f"{name}.py", "--url", url, *args)


def test_trainer_and_engine(tmp_path: Path) -> None:
    engine = torchrun(tmp_path, "engine", 2, "--last", "5")
    trainer = torchrun(tmp_path, "trainer", 4, "--last", "5", "--pause", "2")
    again = None
    try:
        engine.has_written(r"engine \d: version 3, equal", 2)
        pid = int(trainer.has_written(r"trainer 2 \(process (\d+)\): sent version 3")[0][1])
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
        for said in engine.has_written(r"at ([\d.]+): lost trainer (\d); version 3 is (\w+)", 2):
            print(f"named after {float(said[1]) - killed:.3f} s")
            assert (said[2], said[3]) == ("2", "whole")
            assert float(said[1]) - killed < 1
        trainer.stop()
        again = torchrun(tmp_path, "trainer", 4, "--first", "4", "--pause", "0.1")
        text = engine.ends()
        assert len(re.findall(r"engine \d: version 4, equal", text)) == 2
        assert len(re.findall(r"engine \d: version 5, equal", text)) == 2
        assert "DIFFERENT" not in text
        again.ends()
    finally:
        for script in (engine, trainer, again):
            if script is not None:
                script.stop()
