"""An older minor version and this one in one bus, as docs/operations.md promises ("Upgrading"): they refuse each other,
by name and soon. Programs and agents of both work together, if the agents are the newer ones.

The older release is that of $TENSORBUS_OLD: a build folder, or a folder with the command `tensorbus` and
libtensorbus.so. Without it, the commit below is built in $TB_BUILD/old, if the clone has it; else the test is skipped."""

import os
import shutil
import subprocess
import sys
import time

import events
from bus import Agent, Bed, Failed, Program, Release, Store, check, main, this_release

OLD_COMMIT = "53d8f8f"  # 0.1.0
OLD_PROGRAM = "fbee3a0"  # the last with a tests/api/program.c that can be built with it
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")

MEMORIES = [m for m in events.MEMORIES if m[0] in ("alloc", "malloc-staged", "buckets", "checksum")]
SOON = 15  # seconds in which a refusal is to come; waits that are given no other time take 30
LAYOUT = "mesh=1 place=R"


# ---- The older release -----------------------------------------------------------------------------------------------


def run_quietly(*words, **options):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    check(done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}")


def build_old(folder):
    """The commits' sources and their build, made once; None if the clone lacks them."""
    for commit in (OLD_COMMIT, OLD_PROGRAM):
        probe = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True,
                               check=False)
        if probe.returncode != 0:
            return None
    if not os.path.exists(f"{folder}/built"):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        run_quietly("git", "-C", ROOT, "archive", "-o", f"{folder}/old.tar", OLD_COMMIT)
        run_quietly("tar", "-xf", f"{folder}/old.tar", "-C", folder)
        run_quietly("git", "-C", ROOT, "archive", "-o", f"{folder}/api.tar", OLD_PROGRAM, "tests/api")
        run_quietly("tar", "-xf", f"{folder}/api.tar", "-C", folder)
        run_quietly("cmake", "-G", "Ninja", "-S", folder, "-B", f"{folder}/build", "-DCMAKE_BUILD_TYPE=",
                    "-DTB_BUILD_TESTS=OFF")
        run_quietly("ninja", "-C", f"{folder}/build", "tensorbus", "tensorbus_shared")
        with open(f"{folder}/built", "w", encoding="utf-8") as file:
            file.write(OLD_COMMIT + "\n")
    return f"{folder}/build"


def find_old():
    build = os.environ["TB_BUILD"]
    place = os.environ.get("TENSORBUS_OLD") or build_old(f"{build}/old-{OLD_COMMIT[:12]}-{OLD_PROGRAM[:12]}")
    if not place:
        print(f"skipped: $TENSORBUS_OLD is not set, and this clone has no commit {OLD_COMMIT}")
        sys.exit(77)
    include = next(p for p in (f"{place}/include", f"{place}/../include", f"{ROOT}/include") if os.path.isdir(p))
    program = f"{build}/tests/api/program_old"
    source = next(p for p in (f"{place}/../tests/api/program.c", f"{HERE}/program.c") if os.path.exists(p))
    run_quietly(os.environ.get("CC", "cc"), "-std=gnu17", "-O1", f"-I{include}", source, "-o", program,
                f"-L{place}", f"-Wl,-rpath,{os.path.abspath(place)}", "-ltensorbus", "-lpthread")
    return Release(f"{place}/tensorbus", program)


def version_of(release):
    with Bed(release) as bed:
        return Program(bed, "probe").do("release").text


# ---- Ranks -----------------------------------------------------------------------------------------------------------


def soon(what):
    """What `what` returns, if that does not take long."""
    begun = time.monotonic()
    answer = what()
    check(time.monotonic() - begun < SOON, f"took {time.monotonic() - begun:.0f} s")
    return answer


def join(bed, group, release, size=1):
    program = Program(bed, group, release=release)
    program.do("join", bed.url, group, 0, size)
    return program


def other_store(ranks, store):
    """Nobody gets onto a bus whose store is of the other release; which goes on, with others of its own."""
    with Bed() as bed:
        Store(bed, bed.url, release=store)
        a = join(bed, "a", store)
        late = Program(bed, "late", release=ranks)
        soon(lambda: late.call("join", bed.url, "late", 0, 1)).fails("TB_REFUSED", STORE_SENTENCES[ranks])
        b = join(bed, "b", store)
        a.ask("pair", "p", "p", "b", LAYOUT)
        b.do("pair", "p", "p", "a", LAYOUT)
        a.answer().ok()


def new_agent_of_old_store():
    with Bed() as bed:
        Store(bed, bed.url, release=OLD)
        try:
            soon(lambda: Agent(bed, "b", 0, 1, release=NEW))
        except Failed as failure:
            check(STORE_SENTENCES[NEW] in str(failure), f"the agent said: {failure}")
        else:
            raise Failed("the agent has started")


# ---- Programs and agents ---------------------------------------------------------------------------------------------


class MixedBed(Bed):
    """Programs of one release, agents of the other."""

    def __init__(self, programs, agents):
        super().__init__()
        self.of_programs, self.of_agents = programs, agents

    def release_of(self, group, seat, is_agent):
        return self.of_agents if is_agent else self.of_programs


def run_events(programs, agents):
    with MixedBed(programs, agents) as bed:
        events.run_cast(bed, "shm", True, MEMORIES, is_old=programs == OLD)


def new_program_of_old_agent():
    """It asks for what that agent does not have."""
    with Bed() as bed:
        agent = Agent(bed, "a", 0, 1, release=OLD)
        Program(bed, "a 0", release=NEW).call("connect", agent.socket, timeout=1000 * SOON).fails(
            "TB_REFUSED", "version 2 of the bus protocol, the agent version 1")


def cases():
    yield "a new rank at an old store", lambda: other_store(NEW, OLD)
    yield "an old rank at a new store", lambda: other_store(OLD, NEW)
    yield "a new agent at an old store", new_agent_of_old_store
    yield "events: old programs, new agents", lambda: run_events(OLD, NEW)
    yield "new programs, old agents", new_program_of_old_agent


if __name__ == "__main__":
    NEW, OLD = this_release(), find_old()
    STORE_SENTENCES = {
        NEW: "the client speaks version 5 of the store's protocol, the server version 1",
        OLD: "the client speaks version 1 of the store's protocol, the server version 5",
    }
    print(f"old: {version_of(OLD)}, new: {version_of(NEW)}")
    main(cases())
