"""The numbers of versions: after transfers that were cancelled, timed out or lost, and with members that come and go.

A version is the number of a send. What is guaranteed, for commits in place and by shadow, through agents and without:

 1. Sends of a batch are counted from 1 by its sender: those that failed, too, whatever the reason, and whoever was
    passed over. Both ends see the number as attempt and version; each rank of both groups sees the same.
 2. Receives are not counted: one that timed out, or was cancelled, before anybody sent takes no number, and the next
    one receives what is sent then. A send that has begun fails with TB_CANCELLED if its receiver cancels, and has taken
    its number.
 3. tb_batch_version, and a client's query of the pair, tell the number of the last receive that was completed, by pair.
    What fails does not change it. It stays in a batch that others leave and join.
 4. Numbers belong to the sender's batch: a pair that is made again, or one that comes late, goes on with its next
    number. A batch that is made again begins with 1, at a sender that was restarted, too.
 5. The two directions of a batch are counted apart.
"""

from bus import PATIENCE_MS, SHORT_MS, Agent, Bed, Program, Store, all_of, check, equal, main

ROWS, COLUMNS = 24, 20
LAYOUT = {1: "mesh=1 place=R", 2: "mesh=2 place=S0"}
SIZES = {"trainer": 2, "east": 1, "west": 1}


class Member:
    """One seat: its program and, if there are agents, its agent."""

    def __init__(self, bus, group, seat):
        self.bus, self.group, self.seat = bus, group, seat
        self.size = SIZES[group]
        self.layout = LAYOUT[self.size]
        self.remotes = ["trainer"] if group != "trainer" else []
        self.agent = None
        self.start()

    def start(self):
        bed = self.bus.bed
        self.program = Program(bed, f"{self.group} {self.seat}", release=bed.release_of(self.group, self.seat, False))
        if self.bus.with_agents:
            self.agent = Agent(bed, self.group, self.seat, self.size, wait=False,
                               release=bed.release_of(self.group, self.seat, True))
            self.program.ask("connect", self.agent.socket, timeout=PATIENCE_MS)
        else:
            self.program.ask("join", bed.url, self.group, self.seat, self.size, timeout=PATIENCE_MS)
        self.program.answer().ok()

    def kill(self):
        """The seat is lost, and with it all that the program had."""
        self.program.kill()
        self.bus.bed.programs.remove(self.program)
        if self.agent:
            self.agent.kill()
            self.agent = None

    def pair_of(self, remote):
        return f"{'-'.join(sorted((self.group, remote)))}"

    def ask_pair(self, remote):
        pair = self.pair_of(remote)
        self.program.ask("pair", pair, pair, remote, self.layout, timeout=PATIENCE_MS)

    def make_batch(self):
        self.program.do("batch", "step", "step", commit=self.bus.commit)

    def add(self, remote):
        """The same tensor goes to all; an engine has one, which it keeps when it makes the batch again."""
        if not getattr(self, "has_memory", False):
            self.program.do("memory", "w", self.bus.kind, self.layout, self.seat, ROWS, COLUMNS, "w")
            self.has_memory = True
        self.program.do("add", "step", self.pair_of(remote), "w", "w")

    def begin(self, direction, **options):
        options.setdefault("timeout", PATIENCE_MS)
        self.program.do("begin", direction, "step", direction, **options)

    def version(self, remote):
        return self.program.version("step", self.pair_of(remote))


class Bus:
    """A trainer of two ranks that sends to one engine or two."""

    def __init__(self, bed, commit, with_agents, engines):
        self.bed, self.commit, self.with_agents = bed, commit, with_agents
        self.kind = "malloc" if with_agents else "alloc"
        self.trainers = [Member(self, "trainer", i) for i in range(SIZES["trainer"])]
        self.engines = {}
        self.nsent = 0
        for e in engines:
            self.engines[e] = Member(self, e, 0)
        for e in engines:
            self.make_pair(e)
        for m in [*self.trainers, *self.engines.values()]:
            m.make_batch()
            for remote in m.remotes or engines:
                m.add(remote)
        self.register()

    def make_pair(self, engine):
        members = [*self.trainers, self.engines[engine]]
        for m in members:
            m.ask_pair("trainer" if m.group == engine else engine)
        for m in members:
            m.program.answer().ok()

    def register(self, *engines):
        members = [*self.trainers, *(self.engines[e] for e in engines or self.engines)]
        for answer in all_of([m.program for m in members], "register", "step", timeout=PATIENCE_MS):
            answer.ok()

    def send(self, **options):
        """Begins a send of the next number, whose elements have it, too."""
        self.nsent += 1
        for t in self.trainers:
            t.program.do("fill", "w", self.nsent)
            t.begin("send", **options)

    def end_send(self, *engines, status="TB_OK", words=""):
        for t in self.trainers:
            answer = t.program.wait("send", "committed")
            answer.ok() if status == "TB_OK" else answer.fails(status, words)
            state = t.program.query("send")
            if status == "TB_OK":
                equal(state.attempt, self.nsent, "the send's attempt")
                for e in engines or self.engines:
                    equal(t.program.query_pair("send", t.pair_of(e)).version, self.nsent, f"the send's version for {e}")
            else:
                # A rank that hears of another's cancel before it has begun has no number.
                check(state.version == 0 and (state.attempt == self.nsent or
                                              (state.attempt == 0 and status == "TB_CANCELLED")),
                      f"the failed send's attempt and version: {(state.attempt, state.version)}, not {(self.nsent, 0)}")
            t.program.do("end", "send")

    def begin_receive(self, engine, **options):
        e = self.engines[engine]
        e.program.do("poison", "w")
        e.begin("recv", **options)

    def end_receive(self, engine, status="TB_OK", words=""):
        """One that succeeds has the number of the last send; one that fails leaves the version as it was."""
        e = self.engines[engine]
        before = e.version("trainer")
        answer = e.program.wait("recv", "committed")
        if status == "TB_OK":
            answer.ok()
            state = e.program.query("recv")
            equal((state.attempt, state.version), (self.nsent, self.nsent), f"{engine}: attempt and version")
            equal(e.program.look("w"), self.nsent, f"{engine}: the tensor has version")
            equal(e.version("trainer"), (self.nsent, False), f"{engine}: the pair's version")
        else:
            answer.fails(status, words)
            equal(e.version("trainer"), before, f"{engine}: the pair's version after a failure")
        e.program.do("end", "recv")

    def move(self, *engines, **options):
        """A send that all of the engines named receive."""
        for e in engines or self.engines:
            self.begin_receive(e)
        self.send(**options)
        for e in engines or self.engines:
            self.end_receive(e)
        self.end_send(*engines)

    def take_out(self, engine):
        for t in self.trainers:
            t.program.do("remove", "step", t.pair_of(engine))
            t.program.do("drop_pair", t.pair_of(engine))

    def bring_in(self, engine):
        """An engine that joins, late or again."""
        self.engines[engine] = e = Member(self, engine, 0)
        self.make_pair(engine)
        e.make_batch()
        e.add("trainer")
        for t in self.trainers:
            t.add(engine)
        self.register(engine)


# ---- Scenarios -------------------------------------------------------------------------------------------------------


def sends_that_fail(bus):
    """Nobody receives: each send that times out or is cancelled has taken its number."""
    bus.move()
    for _ in range(2):
        bus.send(timeout=SHORT_MS)
        bus.end_send(status="TB_TIMEOUT", words="has not ended")
    equal(bus.engines["east"].version("trainer"), (1, False), "the version after sends that nobody received")
    bus.send()
    for t in bus.trainers:
        t.program.do("cancel", "send")
    bus.end_send(status="TB_CANCELLED")
    bus.move()  # sends that were given up before are nothing to a receive that begins now
    bus.move()


def receives_that_fail(bus):
    """Nobody sends: no number is taken."""
    bus.move()
    for _ in range(2):
        bus.begin_receive("east", timeout=SHORT_MS)
        bus.end_receive("east", "TB_TIMEOUT", "has not ended")
    bus.move()
    equal(bus.nsent, 2, "sends so far")


def receives_that_are_cancelled(bus):
    """Before anybody sends, and when one of two senders has begun."""
    bus.move()
    bus.begin_receive("east")
    bus.engines["east"].program.do("cancel", "recv")
    bus.end_receive("east", "TB_CANCELLED")
    bus.move()
    if bus.with_agents:  # which begin a transfer some time after their program's call
        equal(bus.nsent, 2, "sends so far")
        return
    first, second = bus.trainers
    bus.nsent += 1
    first.begin("send")
    bus.begin_receive("east")
    bus.engines["east"].program.do("cancel", "recv")
    bus.end_receive("east", "TB_CANCELLED")
    bus.begin_receive("east")  # waits for the next one
    second.begin("send")
    for t in bus.trainers:
        answer = t.program.wait("send", "committed")
        # In place, what the first one sent may have been received before.
        is_received = t is first and bus.commit == "in_place" and answer.status == "TB_OK"
        check(is_received or answer.status == "TB_CANCELLED", f"a send that was given up: {answer}")
        check(t.program.query("send").attempt in (0, bus.nsent), "the attempt of a send that was given up")
        t.program.do("end", "send")
    bus.send()
    bus.end_receive("east")
    bus.end_send()
    bus.move()
    equal(bus.nsent, 5, "sends so far")


def an_engine_that_rejoins(bus):
    """Its pair goes on with the number of the trainer's batch; the other pair notices nothing."""
    bus.move()
    bus.move()
    bus.engines["east"].kill()
    until_lost(bus, "east")
    bus.move("west", skip_lost=1)
    bus.take_out("east")
    bus.move("west")
    bus.bring_in("east")
    equal(bus.engines["east"].version("trainer"), (0, False), "the version of an engine that has come back")
    equal(bus.engines["west"].version("trainer"), (bus.nsent, False), "the version of the other engine")
    bus.move()


def until_lost(bus, engine):
    """Sends that pass over whom they find lost succeed for the others; one that had begun with it fails by name. Here
    nobody has begun, so each fails or goes without it, and all take a number."""
    for t in bus.trainers:
        t.lost = False
    while not all(t.lost for t in bus.trainers):
        bus.begin_receive("west")
        bus.send(skip_lost=1)
        for t in bus.trainers:
            answer = t.program.wait("send", "committed")
            check(answer.status in ("TB_OK", "TB_LOST"), f"a send after {engine} was lost: {answer}")
            t.lost = t.program.query_pair("send", t.pair_of(engine)).status == "TB_LOST"
        for t in bus.trainers:
            t.program.do("end", "send")
        bus.end_receive("west")


def an_engine_that_comes_late(bus):
    bus.move()
    bus.send(timeout=SHORT_MS)
    bus.end_send(status="TB_TIMEOUT")
    bus.bring_in("west")
    equal(bus.engines["west"].version("trainer"), (0, False), "the version of an engine that has just come")
    bus.move()  # sends that were given up before are nothing to a receive that begins now
    bus.move()
    equal(bus.nsent, 4, "sends so far")


def trainers_that_restart(bus):
    """Their batch is a new one, which counts from 1; so is the engine's, which makes pair and batch again."""
    bus.move()
    bus.move()
    for t in bus.trainers:
        t.kill()
    bus.trainers = [Member(bus, "trainer", i) for i in range(2)]
    e = bus.engines["east"]
    e.program.do("drop_batch", "step")
    e.program.do("drop_pair", e.pair_of("trainer"))
    bus.make_pair("east")
    for m in [*bus.trainers, e]:
        m.make_batch()
        m.add("trainer" if m is e else "east")
    bus.register()
    bus.nsent = 0
    equal(e.version("trainer"), (0, False), "the version in a batch that was made again")
    bus.move()
    bus.move()


def trainers_that_restart_for_a_batch_that_stays(bus):
    """The engine keeps its batch, and puts the new pair in place of the old one. The new trainers count on."""
    bus.move()
    bus.move()
    for t in bus.trainers:
        t.kill()
    bus.trainers = [Member(bus, "trainer", i) for i in range(2)]
    e = bus.engines["east"]
    e.program.do("remove", "step", e.pair_of("trainer"))
    e.program.do("drop_pair", e.pair_of("trainer"))
    bus.make_pair("east")
    for t in bus.trainers:
        t.make_batch()
        t.add("east")
    e.add("trainer")
    bus.register()
    bus.move()
    bus.move()


def both_directions(bus):
    """What the engine sends is counted by the engine."""
    bus.move()
    bus.move()
    e = bus.engines["east"]
    for number in (1, 2):
        e.program.do("fill", "w", 100 + number)
        for t in bus.trainers:
            t.begin("recv")
        e.begin("send")
        for t in bus.trainers:
            t.program.wait("recv", "committed").ok()
            equal(t.program.look("w"), 100 + number, "what came back")
            equal(t.version("east"), (number, False), "the version that came back")
            t.program.do("end", "recv")
        e.program.wait("send", "committed").ok()
        e.program.do("end", "send")
        equal(e.version("trainer"), (2, False), "the version that the engine has received")
    bus.move()
    equal(bus.nsent, 3, "sends so far")


# function, engines
SCENARIOS = (
    (sends_that_fail, ("east",)),
    (receives_that_fail, ("east",)),
    (receives_that_are_cancelled, ("east",)),
    (an_engine_that_rejoins, ("east", "west")),
    (an_engine_that_comes_late, ("east",)),
    (trainers_that_restart, ("east",)),
    (trainers_that_restart_for_a_batch_that_stays, ("east",)),
    (both_directions, ("east",)),
)


def run_scenario(bed, scenario, engines, commit, with_agents):
    Store(bed, bed.url)  # so that nobody takes the store along
    bus = Bus(bed, commit, with_agents, engines)
    scenario(bus)
    bed.end()


def run_scenario_in_bed(*args):
    with Bed() as bed:
        run_scenario(bed, *args)


def cases():
    for scenario, engines in SCENARIOS:
        for commit in ("in_place", "shadow"):
            for with_agents in (False, True):
                name = f"{scenario.__name__}, {commit}, {'through agents' if with_agents else 'worlds'}"
                yield name, lambda args=(scenario, engines, commit, with_agents): run_scenario_in_bed(*args)


if __name__ == "__main__":
    main(cases())
