"""The order of events: over commit mode x transport x memory x agent or none.

What is guaranteed, and checked here on every rank of two senders and two receivers, with every element:

 1. Sending: TB_COMMITTED never without TB_RELEASED. After TB_RELEASED the tensors may change: what is received is what
    they had before. TB_COMMITTED not before every receiver of the data has begun, and has the version.
 2. Receiving: TB_COMMITTED never without TB_ARRIVED; with shadow, on no rank before all ranks of the group have their
    data. At TB_ARRIVED in place, and at TB_COMMITTED always, the rank's tensors have the version.
 3. Tensor groups arrive in ascending order: when one has, all lower ones have. At TB_ARRIVED all have.
 4. Shadow: the tensors have the version before until the group has decided; `committing` is called once before they
    change, when they have the old version, and once after, when they have the new one. In place it is never called.
 5. Shadow and hold: TB_DECIDED comes after TB_ARRIVED; then nothing changes before tb_proceed, neither the tensors nor
    the events of senders. tb_proceed may come before the decision. Without hold, and in place, there is nothing to let
    go on: tb_proceed fails.
 6. With `snapshot`, from the second transfer on, and for memory that an agent copies, TB_RELEASED needs no receiver.
 7. `progress` is called at least once; bytes, tensor groups and events never go back, bytes end at their total.
 8. tb_transfer_fd is readable when something has come about, and no longer once a query has seen it. A wait of 0 ms
    looks; it returns TB_OK for what has come about, again and again. Events of the other direction are TB_INVALID.
 9. The transfers' attempt and version are 1, 2, 3, ... on every rank; the receivers' batch has that version.
"""

import os
import subprocess

from bus import (ARRIVED, COMMITTED, DECIDED, PATIENCE_MS, RELEASED, Agent, Bed, Program, all_do, check, equal,
                 has_ucx, main, until)

SHAPE = 48, 40
GROUPS = (0, 10, 20)  # one tensor in each; the receiving side's numbers count
GARBAGE = 99

# name, kind of memory, options of the batch
MEMORIES = (
    ("alloc", "alloc", {}),
    ("malloc", "malloc", {}),
    ("snapshot", "alloc", {"snapshot": 1}),
    ("malloc-snapshot", "malloc", {"snapshot": 1}),
    ("staged", "alloc", {"staged": 1}),
    ("malloc-staged", "malloc", {"staged": 1}),
    ("buckets", "alloc", {"staged": 1, "bucket_size": 1}),
    ("checksum", "alloc", {"checksum": 1}),
)


class Rank:
    """A program as a member of one group, its batch and its transfer."""

    def __init__(self, program, group, seat, layout, pair, shape):
        self.program, self.group, self.seat, self.layout, self.pair = program, group, seat, layout, pair
        self.shape = shape
        self.is_sender = group == "a"
        self.batch = None

    def memories(self):
        return [f"{self.batch}/{self.group}/{g}" for g in GROUPS]

    def make_memory(self, batch, kind):
        self.batch = batch
        for key in self.memories():
            tensor = key.rsplit("/", 1)[1]
            self.program.do("memory", key, kind, self.layout, self.seat, *self.shape, tensor)

    def add_tensors(self):
        for g, key in zip(GROUPS, self.memories()):
            self.program.do("add", self.batch, self.pair, f"t{g}", key, group=None if self.is_sender else g)

    def fill(self, version):
        for key in self.memories():
            self.program.do("fill", key, version)

    def content(self):
        found = {self.program.look(key) for key in self.memories()}
        return found.pop() if len(found) == 1 else "mixed"

    @property
    def key(self):
        return f"{self.batch}/{'send' if self.is_sender else 'recv'}"

    def begin(self, **options):
        direction = "send" if self.is_sender else "recv"
        options.setdefault("timeout", PATIENCE_MS)
        self.program.do("begin", self.key, self.batch, direction, group=self.group, watched=self.pair, **options)

    def wait(self, event, ms=PATIENCE_MS):
        return self.program.wait(self.key, event, ms)

    def not_yet(self, event, ms=0):
        self.wait(event, ms).fails("TB_TIMEOUT")

    def events(self):
        return self.program.query(self.key).events


class Cast:
    """Two groups on one transport, and the pair between them."""

    def __init__(self, bed, transport, with_agents, shape=SHAPE, is_old=False):
        self.transport, self.with_agents = transport, with_agents
        self.is_old = is_old  # programs of 0.1, which call agents otherwise, and have less there
        self.is_self = transport == "self"
        nranks = 1 if self.is_self else 2
        layouts = {"a": f"mesh={nranks} place=S0", "b": f"mesh={nranks} place=S1"}
        self.bed = bed
        programs = self.start(nranks)
        self.programs = list(dict.fromkeys(programs.values()))
        for p in self.programs:  # who is in both groups makes the pair twice
            mine = [key for key, q in programs.items() if q is p]
            for group, seat in mine[:-1]:
                p.do("pair", group, "p", "b" if group == "a" else "a", layouts[group], group=group, no_wait=1)
            group = mine[-1][0]
            p.ask("pair", group, "p", "b" if group == "a" else "a", layouts[group], group=group, timeout=PATIENCE_MS)
        for p in self.programs:
            p.answer().ok()
        self.ranks = [Rank(p, group, seat, layouts[group], group, shape) for (group, seat), p in programs.items()]
        self.senders = [r for r in self.ranks if r.is_sender]
        self.receivers = [r for r in self.ranks if not r.is_sender]

    def start(self, nranks):
        """The program of each seat."""
        if self.is_self:
            p = Program(self.bed, "self")
            p.do("join", self.bed.url, "a", 0, 1, transport="self", timeout=PATIENCE_MS)
            p.do("enter", "b", 0, 1)
            return {("a", 0): p, ("b", 0): p}
        programs = {}
        if self.transport == "mpi":
            for i, p in enumerate(mpi_programs(self.bed)):
                programs["ab"[i // nranks], i % nranks] = p
            all_do(programs.values(), "join", "", "world", 0, 0, transport="mpi", timeout=PATIENCE_MS)
            for (group, seat), p in programs.items():
                p.do("enter", group, seat, nranks)
            return programs
        for group in "ab":
            for seat in range(nranks):
                place = {"transport": self.transport, "host": f"host-{group}{seat}" if self.transport == "ucx" else None}
                p = programs[group, seat] = Program(self.bed, f"{group} {seat}",
                                                    release=self.bed.release_of(group, seat, False))
                if self.with_agents:
                    options = [w for k, v in place.items() if v for w in (f"--{k}", v)]
                    agent = Agent(self.bed, group, seat, nranks, *options, wait=False,
                                  release=self.bed.release_of(group, seat, True))
                    p.ask("connect", agent.socket, timeout=PATIENCE_MS)
                else:
                    p.ask("join", self.bed.url, group, seat, nranks, timeout=PATIENCE_MS, **place)
                p.answer().ok()
        return programs

    def make_batch(self, name, commit, kind, options):
        for p in self.programs:
            p.do("batch", name, name, commit=commit, **options)
        for r in self.ranks:
            r.make_memory(name, kind)
            r.add_tensors()
        all_do(self.programs, "register", name, timeout=PATIENCE_MS)

    def end_transfers(self):
        for r in self.ranks:
            r.program.do("end", r.key)

    def drop_batch(self, name):
        for p in self.programs:
            p.do("drop_batch", name)
        for r in self.ranks:
            for key in r.memories():
                r.program.do("free", key)


def mpi_programs(bed):
    def open_both(path, mode):
        """Opened for both, so that nobody is waited for."""
        return open(os.open(path, os.O_RDWR), mode, encoding="utf-8")

    pipes = []
    for i in range(4):
        for end in ("in", "out"):
            os.mkfifo(f"{bed.folder}/{i}.{end}")
        pipes.append((open_both(f"{bed.folder}/{i}.in", "w"), open_both(f"{bed.folder}/{i}.out", "r")))
    launcher = os.environ["TB_MPI_LAUNCHER"].split(" ")
    variables = dict(v.split("=", 1) for v in os.environ["TB_MPI_ENVIRONMENT"].split(" "))
    bed.mpi = subprocess.Popen([*launcher, os.environ["TB_PROGRAM_MPI"], bed.folder], stdin=subprocess.DEVNULL,
                               env={**os.environ, **variables})
    return [Program(bed, f"mpi {i}", pipes=both) for i, both in enumerate(pipes)]


# ---- Checks ----------------------------------------------------------------------------------------------------------


def check_end(cast, version, before, commit):
    """All are through: what all of them can see."""
    for r in cast.ranks:
        first, other = ("released", "arrived") if r.is_sender else ("arrived", "released")
        r.wait("committed").ok()
        for event in (first, "committed", first):
            r.wait(event, 0).ok()
        r.wait(other, 0).fails("TB_INVALID")
        state = r.program.query(r.key)
        equal(state.status, "TB_OK", f"{r.key}: status")
        equal(state.events & ~DECIDED, COMMITTED | (RELEASED if r.is_sender else ARRIVED), f"{r.key}: events")
        equal((state.attempt, state.version), (version, version), f"{r.key}: attempt and version")
        equal(state.bytes_done, state.bytes_total, f"{r.key}: bytes")
        if not r.is_sender:
            equal(r.content(), version, f"{r.key}: the tensors have version")
            equal((state.groups_done, state.groups_total), (len(GROUPS), len(GROUPS)), f"{r.key}: tensor groups")
            equal(r.program.version(r.batch, r.pair), (version, False), f"{r.key}: the batch's version")
        if not cast.is_old:
            check(not r.program.readable(r.key, 0), f"{r.key}: the descriptor is readable after a query")
            check_callbacks(r, state, version, before, commit)


def check_callbacks(r, state, version, before, commit):
    log, has_gone_back, events, nbytes = r.program.do("log", r.key).values()
    log = str(log).split()
    told = [int(w.split(":")[1]) for w in log if w.startswith("events:")]
    copies = [w for w in log if not w.startswith("events:")]
    check(told and not has_gone_back, f"{r.key}: progress was told {log}, which goes back")
    first = RELEASED if r.is_sender else ARRIVED
    for seen in told:
        check(not seen & COMMITTED or seen & first, f"{r.key}: committed, and not released or arrived: {log}")
        check(not seen & DECIDED or seen & ARRIVED, f"{r.key}: decided, and not arrived: {log}")
    equal(nbytes, state.bytes_total, f"{r.key}: the bytes that progress was told last")
    equal(events & ~state.events, 0, f"{r.key}: events that progress was told, and a query was not")
    wanted = [f"before:{before}", f"after:{version}"] if commit == "shadow" and not r.is_sender else []
    equal(copies, wanted, f"{r.key}: committing was told")


def take_groups(cast, r, version, commit):
    """The last arrival first: all others must have come, too."""
    if cast.is_old:
        return
    r.program.do("wait_group", r.key, GROUPS[-1], PATIENCE_MS)
    for g, key in zip(GROUPS, r.memories()):
        r.program.do("wait_group", r.key, g, 0)
        if commit == "in_place":
            equal(r.program.look(key), version, f"{key}: at the arrival of its tensor group")


def transfer_plain(cast, version, before, commit, is_released_alone):
    """Senders first; then one receiver; then all."""
    for r in cast.senders:
        r.fill(version)
        r.begin()
        r.wait("arrived", 0).fails("TB_INVALID")
        r.not_yet("committed")
    if is_released_alone:
        for r in cast.senders:
            r.wait("released").ok()
            equal(r.events(), RELEASED, f"{r.key}: events before anybody receives")
            r.fill(GARBAGE)
    first, others = cast.receivers[0], cast.receivers[1:]
    if others:
        first.begin()
        for r in cast.senders:
            r.not_yet("committed")
        if commit == "shadow":
            first.not_yet("committed", 20)
            equal(first.content(), before, f"{first.key}: before all ranks have theirs")
    for r in others or [first]:
        r.begin()
        r.wait("released", 0).fails("TB_INVALID")
    if not cast.is_old:
        check(first.program.readable(first.key), f"{first.key}: the descriptor never becomes readable")
    for r in cast.receivers:
        take_groups(cast, r, version, commit)
        r.wait("arrived").ok()
        if commit == "in_place":
            equal(r.content(), version, f"{r.key}: at TB_ARRIVED")
    for r in cast.senders:
        r.wait("released").ok()
        r.fill(GARBAGE)
    check_end(cast, version, before, commit)


def transfer_received_first(cast, version, before, commit):
    """Receivers wait; then senders come, one after the other."""
    for r in cast.receivers:
        r.begin()
        r.not_yet("arrived")
        equal(r.events(), 0, f"{r.key}: events before anybody sends")
        refused = r.program.call("proceed", r.key)
        check(refused.status in ("TB_INVALID", "TB_REFUSED"), f"{r.key}: tb_proceed without hold: {refused}")
    for i, r in enumerate(cast.senders):
        if i > 0:
            for receiver in cast.receivers:
                receiver.not_yet("arrived", 20)  # a part of it is with the sender that has not come
        r.fill(version)
        r.begin()
    for r in cast.senders:
        r.wait("released").ok()
        r.fill(GARBAGE)
    check_end(cast, version, before, commit)


def transfer_held(cast, version, before):
    for r in cast.senders:
        r.fill(version)
    for r in cast.receivers:
        r.begin(hold=1)
    for r in cast.senders:
        r.begin()
    for r in cast.receivers:
        r.wait("decided").ok()
        equal(r.events(), ARRIVED | DECIDED, f"{r.key}: events of one that is held back")
    for r in cast.ranks:
        r.not_yet("committed", 20)
    for r in cast.receivers:
        equal(r.content(), before, f"{r.key}: held back")
    for i, r in enumerate(cast.receivers):
        for later in cast.receivers[i:]:
            equal(later.content(), before, f"{later.key}: held back, while others went on")
            check(not later.events() & COMMITTED, f"{later.key}: committed while it is held back")
        for s in cast.senders:
            check(not s.events() & COMMITTED, f"{s.key}: committed while a receiver is held back")
        r.program.do("proceed", r.key)
    check_end(cast, version, before, "shadow")


def transfer_let_go_early(cast, version, before):
    for r in cast.receivers:
        r.begin(hold=1)
        # An agent of version 1 answers that it has begun a little before it takes this.
        until(lambda r=r: r.program.call("proceed", r.key).status == "TB_OK", f"{r.key} is not let go on")
    for r in cast.senders:
        r.fill(version)
        r.begin()
    check_end(cast, version, before, "shadow")


def run_case(cast, commit, memory, kind, options):
    name = f"{commit}-{memory}"
    cast.make_batch(name, commit, kind, options)
    versions = []

    def run(transfer, *more):
        before = versions[-1] if versions else "poison"
        versions.append(len(versions) + 1)
        transfer(cast, versions[-1], before, *more)
        cast.end_transfers()

    is_copied = cast.with_agents and kind == "malloc"
    run(transfer_plain, commit, is_copied)
    run(transfer_plain, commit, is_copied or "snapshot" in options)
    run(transfer_received_first, commit)
    if commit == "shadow":
        run(transfer_held)
        run(transfer_let_go_early)
    cast.drop_batch(name)


def run_cast(bed, transport, with_agents, memories=MEMORIES, shape=SHAPE, is_old=False):
    cast = Cast(bed, transport, with_agents, shape, is_old)
    for commit in ("in_place", "shadow"):
        for memory, kind, options in memories:
            run_case(cast, commit, memory, kind, options)
    bed.end()
    if transport == "mpi":
        equal(bed.mpi.wait(PATIENCE_MS / 1000), 0, "mpirun ends with")


def run_cast_in_bed(transport, with_agents):
    with Bed() as bed:
        run_cast(bed, transport, with_agents)


def cases():
    for transport in ("self", "shm", "ucx", "mpi"):
        for with_agents in (False, True):
            if with_agents and transport in ("self", "mpi"):
                continue
            if transport == "ucx" and not has_ucx():
                skips.append("ucx: this machine has none")
                break
            if transport == "mpi" and "TB_PROGRAM_MPI" not in os.environ:
                skips.append("mpi: there is none")
                break
            name = f"{transport}, {'through agents' if with_agents else 'worlds'}"
            yield name, lambda transport=transport, with_agents=with_agents: run_cast_in_bed(transport, with_agents)


skips = []
if __name__ == "__main__":
    main(cases(), skips)
