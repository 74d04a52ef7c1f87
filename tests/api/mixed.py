"""An older minor version and this one in one bus, as docs/operations.md promises ("Upgrading"): they refuse each other,
by name and soon. Programs and agents of both work together, because the protocol between them is the same.

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


def sentence(theirs, ours):
    return f"has tensorbus {VERSIONS[theirs]}, we have {VERSIONS[ours]}: all ranks of a bus must have one version"


def join(bed, group, release, size=1):
    program = Program(bed, group, release=release)
    program.do("join", bed.url, group, 0, size)
    return program


def new_comes_late(store):
    """A rank of this release does not get onto a bus of the older one; which goes on, also with others of its own."""
    with Bed() as bed:
        Store(bed, bed.url, release=store)
        a = join(bed, "a", OLD)
        late = Program(bed, "late", release=NEW)
        soon(lambda: late.call("join", bed.url, "late", 0, 1)).fails("TB_REFUSED", f"(a 0) {sentence(OLD, NEW)}")
        b = join(bed, "b", OLD)
        a.ask("pair", "p", "p", "b", LAYOUT)
        b.do("pair", "p", "p", "a", LAYOUT)
        a.answer().ok()
        for program in (a, b):
            program.end()
        late.do("join", bed.url, "late", 0, 1)  # they are gone


def old_comes_late(store):
    """A rank of the older release gets onto the bus, but into no pair; all ranks of the pair are told."""
    with Bed() as bed:
        Store(bed, bed.url, release=store)
        a, b = join(bed, "a", NEW), join(bed, "b", OLD)

        def make_pair():
            a.ask("pair", "p", "p", "b", LAYOUT)
            b.ask("pair", "p", "p", "a", LAYOUT)
            return a.answer(), b.answer()

        for answer in soon(make_pair):  # whoever finds out first tells the other
            answer.fails("TB_REFUSED", "all ranks of a bus must have one version")
            check(sentence(OLD, NEW) in answer.text or sentence(NEW, OLD) in answer.text, f"{answer}")


def new_agent_comes_late():
    with Bed() as bed:
        Store(bed, bed.url)
        join(bed, "a", OLD)
        try:
            soon(lambda: Agent(bed, "b", 0, 1, release=NEW))
        except Failed as failure:
            check(sentence(OLD, NEW) in str(failure), f"the agent said: {failure}")
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
        events.run_cast(bed, "shm", True, MEMORIES)


def cases():
    for name, store in (("old", OLD), ("new", NEW)):
        yield f"a new rank on an old bus, {name} store", lambda store=store: new_comes_late(store)
        yield f"an old rank on a new bus, {name} store", lambda store=store: old_comes_late(store)
    yield "a new agent on an old bus", new_agent_comes_late
    yield "events: old programs, new agents", lambda: run_events(OLD, NEW)
    yield "events: new programs, old agents", lambda: run_events(NEW, OLD)


if __name__ == "__main__":
    NEW, OLD = this_release(), find_old()
    VERSIONS = {release: version_of(release) for release in (OLD, NEW)}
    print(f"old: {VERSIONS[OLD]}, new: {VERSIONS[NEW]}")
    main(cases())
