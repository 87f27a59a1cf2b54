"""The faults: what each does to the hosts, what may come of it, and how that is judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .hosts import RANKS
from .trial import EVERY, EVERY_ON_DISK, SETTLED_STEPS, Hang, Outcome, Trial

BACK_S = 60.0  # for a first step after a fault, with the time in which it lasts added
WHOLE_S = 150.0  # for all ranks to be there again


@dataclass(frozen=True)
class Fault:
    """A row of the page.

    Attributes:
        run: lets it happen, and calls ``trial.now()`` at that time. It returns when the hosts are
            complete again, or will be without its help.
        expected: for the page.
        sources: where the state of an attempt after it may be from. Empty: no attempt may follow.
        most_repeated: steps, over all attempts after it.
        restarts: whether an attempt must follow. A slow or a cut network may end in a wait.
        needs_network: whether it needs namespaces.
        weight: how often it is among the random ones.
        is_for_stock: whether it makes sense for stock torch, which has no memory checkpoints.
    """

    name: str
    run: Callable[[Trial], None]
    expected: str
    sources: frozenset[str]
    most_repeated: int
    restarts: bool = True
    needs_network: bool = False
    weight: float = 1.0
    is_for_stock: bool = True


# A checkpoint on disk is used if it is newer than what is whole in memory. How many steps are
# repeated is the same with both.
NEWEST, DISK = frozenset({"memory", "disk"}), frozenset({"disk"})


def one_rank(trial: Trial) -> None:
    host = trial.any_host()
    trial.tell(f"kill -9 of a rank of {host.name}")
    host.kill_rank(trial.chance.randrange(RANKS))
    trial.now()


def one_host(trial: Trial) -> None:
    host = trial.any_host()
    trial.tell(f"{host.name} dies, with its memory")
    trial.now()
    trial.hosts.remove(host)
    trial.wait_for_ranks(RANKS, BACK_S)
    trial.tell("a new host joins")
    trial.hosts.add()


def host_with_old_state(trial: Trial) -> None:
    host = trial.any_host()
    trial.tell(f"{host.name} dies; its memory remains")
    trial.now()
    trial.hosts.remove(host, keep_memory=True)
    trial.wait_for_ranks(RANKS, BACK_S, SETTLED_STEPS)
    trial.tell(f"{host.name} comes back with its old state")
    trial.hosts.add(host.memory)


def cut(seconds: float) -> Callable[[Trial], None]:
    def run(trial: Trial) -> None:
        host = trial.any_host()
        trial.tell(f"{host.name} is cut off for {seconds:g} s")
        host.cut()
        trial.now()
        trial.sleep(seconds)
        trial.tell(f"{host.name} is connected again")
        host.mend()

    return run


def slow_host(trial: Trial) -> None:
    host = trial.any_host()
    trial.tell(f"{host.name} gets a tenth of its time for 20 s")
    host.slow(0.1)
    trial.now()
    trial.sleep(20)
    host.fast()
    trial.tell(f"{host.name} is as fast as before")


def full_memory(trial: Trial) -> None:
    host = trial.any_host()
    trial.tell(f"{host.name} dies; the memory of the host that replaces it is full")
    trial.now()
    trial.hosts.remove(host)
    trial.wait_for_ranks(RANKS, BACK_S)
    new = trial.hosts.add(full=True)
    trial.wait_for_ranks(2 * RANKS, WHOLE_S, EVERY + 1)
    new.empty_memory()
    trial.tell(f"the memory of {new.name} is free again")
    trial.wait_for_ranks(2 * RANKS, WHOLE_S, SETTLED_STEPS, since=time.time())


def full_survivor(trial: Trial) -> None:
    host = trial.any_host()
    trial.tell(f"the memory of {host.name} is full, and one of its ranks is killed")
    host.fill_memory()
    host.kill_rank(trial.chance.randrange(RANKS))
    trial.now()
    trial.wait_for_ranks(2 * RANKS, WHOLE_S, EVERY + 1)
    host.empty_memory()
    trial.tell(f"the memory of {host.name} is free again")
    trial.wait_for_ranks(2 * RANKS, WHOLE_S, SETTLED_STEPS, since=time.time())


def two_ranks(trial: Trial) -> None:
    trial.tell("kill -9 of a rank of each host, at once")
    for host in trial.hosts.here:
        host.kill_rank(trial.chance.randrange(RANKS))
    trial.now()


def rank_then_host(trial: Trial) -> None:
    host = trial.any_host()
    trial.tell(f"kill -9 of a rank; while it restarts, {host.name} dies with its memory")
    trial.any_host().kill_rank(trial.chance.randrange(RANKS))
    trial.now()
    trial.sleep(trial.chance.uniform(0.0, 6.0))
    trial.hosts.remove(host)
    trial.wait_for_ranks(RANKS, BACK_S + 30)
    trial.tell("a new host joins")
    trial.hosts.add()


def all_hosts(trial: Trial) -> None:
    trial.tell("both hosts die at once, with their memory: more than replicas=1 covers")
    trial.now()
    for host in list(trial.hosts.here):
        trial.hosts.remove(host)
    for _ in range(2):
        trial.hosts.add()


_FEW, _MANY = 2 * EVERY, EVERY_ON_DISK + 2 * EVERY
FAULTS = [
    Fault("kill -9 of a rank", one_rank, "from memory", NEWEST, _FEW, weight=4.0),
    Fault(
        "a host dies with its memory; later a new one joins",
        one_host,
        "from memory, on the other host; then from memory, on both",
        NEWEST,
        _FEW,
    ),
    Fault(
        "a host dies, and comes back with its old memory",
        host_with_old_state,
        "from memory; then from the newer state of the other host",
        NEWEST,
        _FEW,
    ),
    Fault(
        "the network of a host is cut for 5 s",
        cut(5),
        "the training waits, and goes on",
        NEWEST,
        _FEW,
        restarts=False,
        needs_network=True,
    ),
    Fault(
        "the network of a host is cut for 30 s",
        cut(30),
        "from memory, if ranks were started again",
        NEWEST,
        _FEW,
        restarts=False,
        needs_network=True,
    ),
    Fault(
        "the network of a host is cut for 90 s",
        cut(90),
        "from memory, if ranks were started again",
        NEWEST,
        _FEW,
        restarts=False,
        needs_network=True,
        weight=0.5,
    ),
    Fault(
        "a host gets 10% of its time for 20 s",
        slow_host,
        "slow steps; from memory, if ranks were started again",
        NEWEST,
        _FEW,
        restarts=False,
    ),
    Fault(
        "a host dies; the memory of its replacement is full",
        full_memory,
        "from memory or disk, with a warning",
        NEWEST,
        _MANY,
        needs_network=True,  # for a tmpfs
        is_for_stock=False,
    ),
    Fault(
        "memory is full when a rank is killed",
        full_survivor,
        "from memory or disk, with a warning",
        NEWEST,
        _MANY,
        needs_network=True,
        is_for_stock=False,
    ),
    Fault("kill -9 of a rank on each host", two_ranks, "from memory", NEWEST, _FEW, weight=2.0),
    Fault(
        "kill -9 of a rank; a host dies during the restart",
        rank_then_host,
        "from memory, on the other host; then from memory, on both",
        NEWEST,
        2 * _FEW,
    ),
    Fault(
        "both hosts die with their memory",
        all_hosts,
        "from disk, with a warning",
        DISK,
        _MANY,
    ),
]


def happen(trial: Trial, fault: Fault) -> Outcome:
    """Let a fault happen to a training on both hosts, wait until it is over, and judge."""
    outcome = Outcome(fault.name)
    before = trial.watch.newest()
    assert before is not None, "the training is under way"
    trial.notes, trial.num_revived = [], 0
    try:
        fault.run(trial)
        since = None if fault.restarts else time.time()
        trial.wait_for_ranks(2 * RANKS, WHOLE_S, SETTLED_STEPS, is_new=fault.restarts, since=since)
    except Hang as hang:
        outcome.fault = f"hang: {hang}"
    trial.watch.read()
    after = [each for each in trial.watch.attempts() if each.number > before.number]
    outcome.attempts = [(each.size, each.source, each.repeated) for each in after]
    outcome.repeated = sum(each.repeated for each in after)
    outcome.notes, outcome.revived = trial.notes, trial.num_revived
    first = next((each for each in after if each.first is not None), None)
    later = [made.at for made in trial.watch.made if made.at > trial.at]
    if first is not None and first.first is not None:
        outcome.seconds, outcome.parts = first.first.at - trial.at, first.parts(trial.at)
    elif later:
        outcome.seconds = trial.watch.longest_gap(trial.at, max(later))
    outcome.fault = judged(fault, outcome)
    return outcome


def judged(fault: Fault, outcome: Outcome) -> str:
    """What is not as expected; empty if all is."""
    if outcome.is_hang:
        return outcome.fault
    others = {source for _, source, _ in outcome.attempts} - fault.sources
    if others:
        return f"the state was from {', '.join(sorted(others))}"
    if outcome.repeated > fault.most_repeated:
        return f"{outcome.repeated} steps were repeated, at most {fault.most_repeated} expected"
    return ""
