"""Runs the commands in the documents, and compares what they print, and the pictures they draw, with the documents.

usage: samples.py TENSORBUS [--update] [PAGE...]

Two kinds of fenced blocks are run. `console`: `$ COMMAND`, lines that end with a backslash go on, and below it what the
command prints, without its error output; `...` stands for any text in a line, and alone in a line for any lines. `sh`:
commands whose output is not shown. Before a block may stand, as comments of HTML:

  first: COMMANDS    run before the block, and not shown
  file: NAME         the block is not run, but written into this file, for commands that follow
  then: COMMANDS     run after the block, and not shown
  ends with: N       the exit status of the block's last command, where it is not 0
  from, checked by, not run: what excerpts.py looks at; the block is not run here

The commands of a page run one after the other in one shell, in a folder of their own. Where documents have a folder or
an address that a test must not use, another takes its place. Pictures are compared with the repository's. --update
writes what was printed into the documents.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"((?:^<!-- (?:(?!-->).)*? -->\n+)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (first|then|file|ends with|from|checked by|not run):? (.*?) -->", re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)
END = "end-of-sample"
PATIENCE_S = 60.0


def matches(wanted: str, printed: str) -> bool:
    """Whether the command printed what the document has."""
    parts = re.split(r"(^\.\.\.\n|\.\.\.)", wanted, flags=re.MULTILINE)
    pattern = "".join({"...\n": r"(?:.*\n)*?", "...": r"[^\n]*"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(pattern, printed) is not None


class Shell:
    """One shell for the commands of a page, and the processes that they leave in the background."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                ["bash", "--norc"],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def run(self, command: str) -> tuple[str, int | None]:
        """What a command prints, and its exit status; None: it takes too long, or ends the shell."""
        assert self.process.stdin
        assert self.process.stdout
        hidden = re.sub(r" &$", " >>background 2>&1 &", command, flags=re.MULTILINE)
        self.process.stdin.write(f"{{ {hidden}\n}} </dev/null\nprintf '\\n%s %d\\n' {END} $?\n".encode())
        self.process.stdin.flush()
        printed, until = b"", time.monotonic() + PATIENCE_S
        while not (end := re.search(rb"\n%s (\d+)\n$" % END.encode(), printed)):
            if not select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                return printed.decode(), None
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                return printed.decode(), None
            printed += part
        return printed[: end.start()].decode(), int(end[1])

    def stop(self) -> None:
        """Ends it and what runs in the background."""
        for number in signal.SIGTERM, signal.SIGKILL:
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(1.0)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        self.process.wait()


class Samples:
    """The samples of all documents."""

    def __init__(self, tool: Path, folder: Path, update: bool) -> None:
        self.folder, self.update = folder, update
        self.failures: list[str] = []
        self.count = 0
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "tensorbus").symlink_to(tool.resolve())
        (bin_folder / "python").symlink_to(sys.executable)
        hidden = {name for name in os.environ if name.startswith("TENSORBUS")}
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "LC_ALL": "C",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT / "python"),
            "ROOT": str(ROOT),
            "TENSORBUS_LIBRARY": str(tool.resolve().parent / "libtensorbus.so"),
        }
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.places = {
            "/run/tensorbus": f"{folder}/run",
            "/etc/tensorbus": f"{folder}/etc",
            "build/release/": f"{tool.resolve().parent}/",
            "tcp://node0:7000": f"tcp://127.0.0.1:{port}",
            "tcp://0.0.0.0:7000": f"tcp://127.0.0.1:{port}",
        }
        (folder / "run").mkdir(mode=0o700)
        self.environment["XDG_RUNTIME_DIR"] = f"{folder}/run"

    def placed(self, text: str) -> str:
        """With the places that a test may use."""
        for shown, used in self.places.items():
            text = text.replace(shown, used)
        return text

    def run(self, shell: Shell, where: str, command: str, wanted_status: int = 0) -> str:
        """What a command prints; its failure is told."""
        self.count += 1
        targets = re.findall(r"--svg (\S+)", command)
        for target in targets:
            (self.folder / where / target).parent.mkdir(parents=True, exist_ok=True)
        command = self.placed(command)
        before = shell.errors.stat().st_size
        printed, status = shell.run(command)
        if status != wanted_status:
            ending = "does not end" if status is None else f"ended with {status}, not {wanted_status}"
            self.failures.append(f"{where}: `{command}` {ending}: {printed}{shell.errors.read_text()[before:]}")
        for target in targets:
            self.compare_picture(command, self.folder / where / target, target)
        for shown, used in self.places.items():
            printed = printed.replace(used, shown)
        return printed

    def compare_picture(self, command: str, drawn: Path, target: str) -> None:
        """The picture that a command has drawn is the one in the repository, if it is one of the documents'."""
        kept = ROOT / target
        if not target.startswith("docs/"):
            return
        if self.update:
            kept.write_bytes(drawn.read_bytes())
        elif not kept.exists() or kept.read_bytes() != drawn.read_bytes():
            self.failures.append(f"`{command}` draws another picture than {target}")

    def console(self, shell: Shell, where: str, text: str, ends_with: int) -> str:
        """A block of commands and what they print, as it should be."""
        parts = COMMAND.split(text)
        if parts[0]:
            self.failures.append(f"{where}: a block of kind console begins with '{parts[0].splitlines()[0]}'")
        out = ""
        pairs = list(zip(parts[1::2], parts[2::2], strict=True))
        for i, (command, wanted) in enumerate(pairs):
            printed = self.run(shell, where, command, ends_with if i + 1 == len(pairs) else 0)
            is_same = matches(wanted, printed)
            if not is_same and not self.update:
                self.failures.append(f"{where}: `{command}` prints\n{printed}and not\n{wanted}")
            out += f"$ {command}\n{wanted if is_same else printed}"
        return out

    def page(self, page: Path) -> None:
        """All blocks of a page."""
        text, where = page.read_text(), "-".join(page.relative_to(ROOT).with_suffix("").parts)
        (self.folder / where).mkdir()
        shell = Shell(self.folder / where, self.environment)

        def block(match: re.Match[str]) -> str:
            marks = dict(MARK.findall(match[1]))
            body, kind, ends_with = match[3], match[2], int(marks.get("ends with", "0"))
            if "first" in marks:
                self.run(shell, where, marks["first"])
            if "file" in marks:
                (self.folder / where / marks["file"]).write_text(self.placed(body))
            elif marks.keys() & {"from", "checked by", "not run"}:
                pass
            elif kind == "console":
                body = self.console(shell, where, body, ends_with)
            elif kind == "sh":
                self.run(shell, where, body.rstrip("\n"), ends_with)
            if "then" in marks:
                self.run(shell, where, marks["then"])
            return f"{match[1]}```{kind}\n{body}```"

        try:
            new = BLOCK.sub(block, text)
        finally:
            shell.stop()
        if self.update and new != text:
            page.write_text(new)


def main() -> int:
    """Runs all samples."""
    named = [Path(name).resolve() for name in sys.argv[2:] if not name.startswith("--")]
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(Path(sys.argv[1]), Path(folder), "--update" in sys.argv)
        for page in named or (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
            samples.page(page)
    print("\n".join(samples.failures))
    print(f"{samples.count} samples, {len(samples.failures)} failures")
    return 1 if samples.failures or not samples.count else 0


if __name__ == "__main__":
    sys.exit(main())
