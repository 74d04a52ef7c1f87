"""Runs the commands in the documents, and compares what they print, and the pictures they draw, with the documents.

usage: samples.py TENSORBUS [--update]

A sample is a fenced block of kind `console`: `$ COMMAND`, lines that end with a backslash go on, and below it what the
command prints, without its error output. A line that is `...` stands for any lines. Commands run in a folder of their
own, where pictures are put in the place that they have in the repository. --update writes what was printed into the
documents.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)


def matches(wanted: str, printed: str) -> bool:
    """Whether the command printed what the document has."""
    pattern = "".join(".*" if line == "...\n" else re.escape(line) for line in wanted.splitlines(keepends=True))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


class Samples:
    """The samples of all documents."""

    def __init__(self, tool: Path, folder: Path, update: bool) -> None:
        self.folder, self.update = folder, update
        self.failures: list[str] = []
        self.count = 0
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "tensorbus").symlink_to(tool.resolve())
        hidden = {name for name in os.environ if name.startswith("TENSORBUS")}
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "LC_ALL": "C"}

    def run(self, command: str) -> str:
        """What a command prints; its failure is told."""
        for target in re.findall(r"--svg (\S+)", command):
            (self.folder / target).parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, text=True, capture_output=True, timeout=60
        )
        if done.returncode != 0:
            self.failures.append(f"`{command}` failed with {done.returncode}: {done.stderr}")
        for target in re.findall(r"--svg (\S+)", command):
            self.compare_picture(command, target)
        return done.stdout

    def compare_picture(self, command: str, target: str) -> None:
        """The picture that a command has drawn is the one in the repository."""
        drawn, kept = self.folder / target, ROOT / target
        if self.update:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(drawn.read_bytes())
        elif not kept.exists() or kept.read_bytes() != drawn.read_bytes():
            self.failures.append(f"`{command}` draws another picture than {target}")

    def block(self, page: Path, text: str) -> str:
        """One block, as it should be."""
        parts = COMMAND.split(text)
        if parts[0]:
            self.failures.append(f"{page.name}: a block of kind console begins with '{parts[0].splitlines()[0]}'")
        out = ""
        for command, wanted in zip(parts[1::2], parts[2::2], strict=True):
            self.count += 1
            printed = self.run(command)
            if not matches(wanted, printed):
                self.failures.append(f"{page.name}: `{command}` prints\n{printed}and not\n{wanted}")
            out += f"$ {command}\n{wanted if matches(wanted, printed) else printed}"
        return out

    def page(self, page: Path) -> None:
        """All blocks of a page."""
        text = page.read_text()
        new = BLOCK.sub(lambda match: f"```console\n{self.block(page, match[1])}```", text)
        if self.update and new != text:
            page.write_text(new)


def main() -> int:
    """Runs all samples."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(Path(sys.argv[1]), Path(folder), "--update" in sys.argv)
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
            samples.page(page)
    print("\n".join(samples.failures))
    print(f"{samples.count} samples, {len(samples.failures)} failures")
    return 1 if samples.failures or not samples.count else 0


if __name__ == "__main__":
    sys.exit(main())
