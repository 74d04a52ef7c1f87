"""Programs, agents and stores as processes, driven from Python: what the tests of the public API share.

A Program is tests/api/program.c. Scripts find it in $TB_PROGRAM and the command in $TENSORBUS; a script that compares
releases gives others. Each method sends one command and takes its answer; ask() only sends it, and answer() takes the
answer later, so that several programs can be in a call at once."""

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PATIENCE = 90  # seconds; only a hang takes them
PATIENCE_MS = PATIENCE * 1000
SHORT_MS = 200  # for what is meant to time out

RELEASED, ARRIVED, COMMITTED, DECIDED = 1, 2, 4, 8


class Failed(Exception):
    """A check that does not hold."""


def check(claim, what):
    if not claim:
        raise Failed(what)


def equal(got, wanted, what):
    check(got == wanted, f"{what}: {got!r}, not {wanted!r}")


class Answer:
    def __init__(self, line, command):
        self.status, _, rest = line.rstrip("\n").partition("\t")
        self.text = rest
        self.command = command

    def ok(self):
        check(self.status == "TB_OK", f"{self}")
        return self

    def fails(self, status, words=""):
        check(self.status == status and words in self.text, f"{self}; expected {status} with '{words}'")
        return self

    def values(self):
        self.ok()
        return [int(v) if re.fullmatch(r"-?\d+", v) else v for v in self.text.split("\t")]

    def __str__(self):
        return f"{self.command}: {self.status}: {self.text}"


class Release:
    """The command and the program of one release."""

    def __init__(self, tensorbus, program):
        self.tensorbus, self.program = tensorbus, program


def this_release():
    return Release(os.environ["TENSORBUS"], os.environ["TB_PROGRAM"])


class State:
    """What tb_transfer_query, or tb_transfer_pair, tells."""

    def __init__(self, values):
        (self.status, self.events, self.attempt, self.version, self.bytes_done, self.bytes_total, self.groups_done,
         self.groups_total) = values


class Program:
    def __init__(self, bed, name, release=None, pipes=None, user=None):
        self.bed, self.name = bed, name
        self.asked = []
        self.process = None
        if pipes:
            self.input, self.output = pipes
        else:
            self.process = subprocess.Popen(
                [(release or bed.release).program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                user=user)
            self.input, self.output = self.process.stdin, self.process.stdout
        bed.programs.append(self)

    def ask(self, *words, **options):
        line = [str(w) for w in words] + [f"{k}={v}" for k, v in options.items() if v is not None and v is not False]
        self.asked.append(f"{self.name}: {' '.join(line)}")
        try:
            self.input.write("\t".join(line) + "\n")
            self.input.flush()
        except BrokenPipeError:
            raise Failed(f"{self.asked[-1]}: the program has ended") from None

    def answer(self):
        command = self.asked.pop(0)
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            check(selector.select(PATIENCE), f"{command}: no answer in {PATIENCE} s")
        line = self.output.readline()
        check(line.endswith("\n"), f"{command}: the program has ended")
        return Answer(line, command)

    def call(self, *words, **options):
        self.ask(*words, **options)
        return self.answer()

    def do(self, *words, **options):
        return self.call(*words, **options).ok()

    # What is asked most.

    def wait(self, transfer, event, ms=PATIENCE_MS):
        return self.call("wait", transfer, event, ms)

    def look(self, memory):
        """The version that every element has; "poison" if all are; else "mixed"."""
        return self.do("look", memory).values()[0]

    def query(self, transfer):
        return State(self.do("query", transfer).values())

    def query_pair(self, transfer, pair):
        return State(self.do("query_pair", transfer, pair).values())

    def readable(self, transfer, ms=PATIENCE_MS):
        return bool(self.do("readable", transfer, ms).values()[0])

    def version(self, batch, pair):
        """(version, is_torn) of the tensors that are received through the pair."""
        version, is_torn = self.do("version", batch, pair).values()
        return version, bool(is_torn)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        """Closes its input, which ends it; it must not fail."""
        self.input.close()
        if self.process:
            equal(self.process.wait(PATIENCE), 0, f"{self.name} ends with")
            self.output.close()
        self.bed.programs.remove(self)


class Server:
    """An agent, or a store."""

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.bed.agents.remove(self)

    def stop(self):
        self.process.terminate()
        equal(self.process.wait(PATIENCE), 0, f"{self} ends with")
        self.process.stdout.close()
        self.bed.agents.remove(self)


class Agent(Server):
    def __init__(self, bed, group, index, size, *options, release=None, store=None, socket=None, user=None,
                 wait=True):
        self.bed, self.group, self.index = bed, group, index
        self.socket = socket or f"{bed.folder}/{group}-{index}"
        self.errors = f"{bed.folder}/errors-{bed.count()}"
        with open(self.errors, "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [(release or bed.release).tensorbus, "agent", "--name", group, "--rank", str(index), "--size", str(size),
                 "--store", store or bed.url, "--socket", self.socket, "--workers", "1", *options],
                stdout=subprocess.PIPE, stderr=errors, text=True, user=user)
        bed.agents.append(self)
        if wait:
            self.listening()

    def __str__(self):
        return f"agent {self.group} {self.index}"

    def listening(self):
        line = self.process.stdout.readline()
        check(" listens at " in line, f"{self}: {line} {self.said()}")
        return line

    def said(self):
        with open(self.errors, encoding="utf-8") as errors:
            return errors.read()


class Store(Server):
    def __init__(self, bed, url, *options, release=None):
        self.bed = bed
        self.process = subprocess.Popen(
            [(release or bed.release).tensorbus, "store", "--listen", url, *options], stdout=subprocess.PIPE, text=True)
        bed.agents.append(self)
        check(self.process.stdout.readline().startswith("serving "), "the store does not serve")


class Bed:
    """A folder with a store's address, and all processes that were started in it, which end with it."""

    def __init__(self, release=None):
        self.release = release or this_release()
        self.folder = tempfile.mkdtemp(prefix="tb-api-")
        self.url = f"unix:{self.folder}/store"
        self.programs, self.agents = [], []
        self.mpi = None  # the launcher of programs with MPI
        self.number = 0

    def count(self):
        self.number += 1
        return self.number

    def release_of(self, group, seat, is_agent):
        """Of the agent, or of the program, in that seat."""
        return self.release

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for p in list(self.programs) + list(self.agents):
            if p.process:
                p.process.kill()
                p.process.wait()
        if self.mpi and self.mpi.poll() is None:
            self.mpi.terminate()
            self.mpi.wait()
        shutil.rmtree(self.folder)

    def end(self):
        """Programs and agents end, and say that all is well. The first has the store."""
        for p in reversed(list(self.programs)):
            p.end()
        for a in reversed(list(self.agents)):
            a.stop()


def all_of(programs, *words, **options):
    """All are in the call at once; the answers."""
    for p in programs:
        p.ask(*words, **options)
    return [p.answer() for p in programs]


def all_do(programs, *words, **options):
    return [a.ok() for a in all_of(programs, *words, **options)]


DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs")


def stop(process):
    """Stops all threads of a child, until SIGCONT. A signal alone is on its way for a while."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def read_page(name):
    with open(os.path.join(DOCS, name), encoding="utf-8") as page:
        return page.read()


def table_rows(text):
    """The cells of all table rows of a page's text, without heads and rules."""
    rows = [[c.strip() for c in line.strip().strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [cells for cells in rows if not set(cells[0]) <= set("-|") and cells[0].startswith("`")]


def until(claim, what):
    end = time.monotonic() + PATIENCE
    while not claim():
        check(time.monotonic() < end, what)
        time.sleep(0.01)


def has_ucx():
    """Whether this machine can have worlds that use ucx."""
    with Bed() as bed:
        p = Program(bed, "probe")
        answer = p.call("join", bed.url, "probe", 0, 1, transport="ucx", timeout=PATIENCE_MS)
        return answer.status == "TB_OK"


def main(cases, skips=()):
    """Runs cases, (name, function) each; words on the command line choose among them."""
    wanted = sys.argv[1:]
    failures = 0
    for name, run in cases:
        if wanted and not any(w in name for w in wanted):
            continue
        begun = time.monotonic()
        try:
            run()
            print(f"ok      {name} ({time.monotonic() - begun:.2f} s)", flush=True)
        except Failed as failed:
            failures += 1
            print(f"FAILED  {name}: {failed}", flush=True)
    for why in skips:
        print(f"skipped {why}")
    sys.exit(1 if failures else 0)
