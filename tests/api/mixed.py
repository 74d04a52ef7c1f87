"""Whether this release mixes with an older one, as docs/operations.md promises ("Upgrading"): the tests of events and
versions with members of both in one bus.

The older release is that of $TENSORBUS_OLD: a build folder, or a folder with the command `tensorbus` and
libtensorbus.so. Without it, the commit below is built in $TB_BUILD/old, if the clone has it; else the test is skipped."""

import os
import shutil
import subprocess
import sys

import events
import versions
from bus import Bed, Program, Release, Store, check, equal, has_ucx, main, this_release

OLD_COMMIT = "53d8f8f"  # 0.1.0
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")

MEMORIES = [m for m in events.MEMORIES if m[0] in ("alloc", "malloc-staged", "buckets", "checksum")]
LARGE = [m for m in events.MEMORIES if m[0] in ("alloc", "malloc-staged")]
LARGE_SHAPE = 1000, 800  # 2.4 MB from each rank to each: more than a ring of shm holds


# ---- The older release -----------------------------------------------------------------------------------------------


def run_quietly(*words, **options):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    check(done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}")


def build_old(folder):
    """The commit's sources and their build, made once; None if the clone lacks it."""
    probe = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{OLD_COMMIT}^{{commit}}"], capture_output=True,
                           check=False)
    if probe.returncode != 0:
        return None
    if not os.path.exists(f"{folder}/built"):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        run_quietly("git", "-C", ROOT, "archive", "-o", f"{folder}/old.tar", OLD_COMMIT)
        run_quietly("tar", "-xf", f"{folder}/old.tar", "-C", folder)
        run_quietly("cmake", "-G", "Ninja", "-S", folder, "-B", f"{folder}/build", "-DCMAKE_BUILD_TYPE=",
                    "-DTB_BUILD_TESTS=OFF")
        run_quietly("ninja", "-C", f"{folder}/build", "tensorbus", "tensorbus_shared")
        with open(f"{folder}/built", "w", encoding="utf-8") as file:
            file.write(OLD_COMMIT + "\n")
    return f"{folder}/build"


def find_old():
    build = os.environ["TB_BUILD"]
    place = os.environ.get("TENSORBUS_OLD") or build_old(f"{build}/old")
    if not place:
        print(f"skipped: $TENSORBUS_OLD is not set, and this clone has no commit {OLD_COMMIT}")
        sys.exit(77)
    include = next(p for p in (f"{place}/include", f"{place}/../include", f"{ROOT}/include") if os.path.isdir(p))
    program = f"{build}/tests/api/program_old"
    run_quietly(os.environ.get("CC", "cc"), "-std=gnu17", "-O1", f"-I{include}", f"{HERE}/program.c", "-o", program,
                f"-L{place}", f"-Wl,-rpath,{os.path.abspath(place)}", "-ltensorbus", "-lpthread")
    return Release(f"{place}/tensorbus", program)


def version_of(release):
    with Bed(release) as bed:
        return Program(bed, "probe").do("release").text


# ---- Beds with two releases ------------------------------------------------------------------------------------------


class MixedBed(Bed):
    """`choose` gives the release of each seat's agent and program. With `upgrades`, whoever is started in a seat again
    has the other one."""

    is_mixed = True

    def __init__(self, choose, upgrades=False):
        super().__init__()
        self.choose, self.upgrades = choose, upgrades
        self.starts = {}

    def release_of(self, group, seat, is_agent):
        key = group, seat, is_agent
        release = self.choose(*key)
        self.starts[key] = self.starts.get(key, 0) + 1
        if self.upgrades and self.starts[key] > 1:
            return OLD if release is NEW else NEW
        return release


def old_group(name):
    """One group, with its programs."""
    return lambda group, seat, is_agent: OLD if group == name else NEW


def old_seats(number):
    """In every group of two, one of the two."""
    return lambda group, seat, is_agent: OLD if seat == number else NEW


def old_programs(group, seat, is_agent):
    return NEW if is_agent else OLD


def old_agents(group, seat, is_agent):
    return OLD if is_agent else NEW


def all_old(group, seat, is_agent):
    return OLD


def all_new(group, seat, is_agent):
    return NEW


# ---- Cases -----------------------------------------------------------------------------------------------------------


def run_events(choose, transport, with_agents, store):
    with MixedBed(choose) as bed:
        if store:
            Store(bed, bed.url, release=store)
        events.run_cast(bed, transport, with_agents, MEMORIES)


def run_large(choose, transport):
    with MixedBed(choose) as bed:
        events.run_cast(bed, transport, False, LARGE, LARGE_SHAPE)


def run_versions(choose, scenario, engines, commit, with_agents, upgrades=False):
    with MixedBed(choose, upgrades) as bed:
        versions.run_scenario(bed, scenario, engines, commit, with_agents)


def lose_receiver(choose, transport, commit):
    """One of two receivers is killed while all wait for it: the others are told its name. The transfer can't be whole."""
    with MixedBed(choose) as bed:
        Store(bed, bed.url)
        cast = events.Cast(bed, transport, False)
        cast.make_batch("step", commit, "alloc", {})
        for r in cast.senders:
            r.fill(1)
            r.begin()
        survivor, victim = cast.receivers
        survivor.begin()
        victim.program.kill()
        bed.programs.remove(victim.program)
        for r in cast.senders:
            r.wait("committed").fails("TB_LOST", "(b 1)")
        answer = survivor.wait("committed")
        if commit == "shadow" or answer.status != "TB_OK":
            answer.fails("TB_LOST", "(b 1)")
        if commit == "shadow":
            equal(survivor.content(), "poison", "the survivor's tensors")
        elif answer.status == "TB_OK":
            equal(survivor.content(), 1, "the survivor's tensors")


def cases():
    transports = ["shm", "ucx"] if has_ucx() else ["shm"]
    for transport in transports:
        for name, choose, store in (("old a, new b", old_group("a"), OLD), ("new a, old b", old_group("b"), NEW),
                                    ("old first seats", old_seats(0), None)):
            for with_agents in (False, True):
                what = f"events: {name}, {transport}, {'agents' if with_agents else 'worlds'}"
                yield what, lambda args=(choose, transport, with_agents, store): run_events(*args)
        name = "a" if transport == "shm" else "b"
        yield f"large tensors: old {name}, {transport}", lambda args=(old_group(name), transport): run_large(*args)
        for commit in ("in_place", "shadow"):
            for seat in (0, 1):
                what = f"a receiver that is killed: old seats {seat}, {transport}, {commit}"
                yield what, lambda args=(old_seats(seat), transport, commit): lose_receiver(*args)
    for name, choose in (("old programs, new agents", old_programs), ("new programs, old agents", old_agents)):
        yield f"events: {name}", lambda choose=choose: run_events(choose, "shm", True, None)
    for name, choose in (("old trainer", old_group("trainer")), ("old engine", old_group("east"))):
        for commit in ("in_place", "shadow"):
            for with_agents in (False, True):
                for scenario, engines, for_agents in versions.SCENARIOS:
                    if with_agents and not for_agents:
                        continue
                    what = f"{scenario.__name__}: {name}, {commit}, {'agents' if with_agents else 'worlds'}"
                    args = choose, scenario, engines, commit, with_agents
                    yield what, lambda args=args: run_versions(*args)
    for name, choose in (("to new", all_old), ("back to old", all_new)):
        for scenario in (versions.an_engine_that_rejoins, versions.trainers_that_restart):
            engines = ("east", "west") if scenario is versions.an_engine_that_rejoins else ("east",)
            for with_agents in (False, True):
                what = f"{scenario.__name__}: {name}, {'agents' if with_agents else 'worlds'}"
                args = choose, scenario, engines, "shadow", with_agents, True
                yield what, lambda args=args: run_versions(*args)


if __name__ == "__main__":
    NEW, OLD = this_release(), find_old()
    print(f"old: {version_of(OLD)}, new: {version_of(NEW)}")
    main(cases())
