"""Ranks meet in a folder that all hosts share, again and again, without their launchers.

torchrun's rendezvous is one of agents: when a rank is lost, or a host comes, all agents kill their
ranks. Here each host has a torchrun of its own, which watches its own ranks only, and the ranks
meet by themselves. So those that survive keep their process::

    /shared/job1/
      000003/                    a round: the ranks of one world
        a-1.0.4711               a rank: its host, the number there, its process. It is touched
        a-1.1.4712               once a second while the process lives
        b-1.0.4390
        closed                   the ranks of this world in order, when nobody else can come
        store                    the address of its store
      000004/                    the next one: ranks that have lost others, or come later
      trainings                  how often each has begun and ended, by the folder of its run

A host counts when all of its ranks have come. A round is closed by the first of its ranks when the
largest number of hosts is there, or when nobody has come for a while and no rank of the former
round that lives is missing. A rank that finds a round closed without it comes to the next one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vescale_fsdp import spi
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp_elastic import sockets

MEETING, HOSTS = "VESCALE_FSDP_MEETING", "VESCALE_FSDP_HOSTS"
_log = logging.getLogger(__name__)
_BEAT_S = 0.5  # between two touches of a rank's file
_WATCHED = 8  # files that a rank looks at after each touch
_LOST_S = 2.5  # without a touch for so long, a rank is not waited for
_FIRST_CALL_S, _LAST_CALL_S = 5.0, 0.3  # how long nobody has come: at the start, and later
_AWAITED_S = 20.0  # for ranks of the former round that live and do not come
_CONNECT_S = 10.0  # shorter: a rank that tries to connect is awaited
_ANSWER_S = 120.0  # for the first rank of a host, which may start later
_POLL_S = 0.05
_TRAININGS = "trainings"  # in the folder
_ROUND = re.compile(r"[0-9]{6,}")


@dataclass(frozen=True, order=True)
class Member:
    """A rank that has come. Its name is unique: another process has another one.

    Attributes:
        host: of its launcher, and how often that has started its ranks: "name-0".
        local: its number there, and the number of ranks of that launcher.
    """

    host: str
    local: int
    num_local: int
    process: int

    @property
    def name(self) -> str:
        return f"{self.host}.{self.local}.{self.num_local}.{self.process}"

    @staticmethod
    def of(name: str) -> Member | None:
        """None for another file."""
        host, *numbers = name.rsplit(".", 3)
        if len(numbers) < 3 or not all(each.isdigit() for each in numbers):
            return None
        return Member(host, *map(int, numbers))

    @staticmethod
    def here() -> Member:
        """This process, by the environment that torchrun has set."""
        environ = os.environ
        run = environ.get("TORCHELASTIC_RUN_ID", "")
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        launcher = run or os.getppid()  # torchrun --standalone chooses a random name
        host = re.sub(r"[^A-Za-z0-9_-]", "-", f"{socket.gethostname()}-{launcher}")
        local, num_local = environ.get("LOCAL_RANK", "0"), environ.get("LOCAL_WORLD_SIZE", "1")
        return Member(f"{host}-{attempt}", int(local), int(num_local), os.getpid())


def complete(members: Sequence[Member]) -> list[list[Member]]:
    """Return the hosts whose ranks have all come, each with its ranks in order.

    Of a launcher that has started its ranks again, only the last start counts.
    """
    starts: dict[str, int] = {}
    for each in members:
        launcher, _, start = each.host.rpartition("-")
        starts[launcher] = max(starts.get(launcher, 0), int(start))
    hosts: dict[str, dict[int, Member]] = {}
    for each in sorted(members):
        launcher, _, start = each.host.rpartition("-")
        if int(start) == starts[launcher]:
            hosts.setdefault(each.host, {})[each.local] = each
    return [
        [ranks[local] for local in sorted(ranks)]
        for _, ranks in sorted(hosts.items())
        if len(ranks) == next(iter(ranks.values())).num_local
    ]


def ordered(
    hosts: Sequence[Sequence[Member]], former: Sequence[str], most: int
) -> list[Sequence[Member]]:
    """Return up to ``most`` hosts in the order of ranks: those of the former world first."""
    places = {name: number for number, name in enumerate(former)}
    last = len(former)

    def place(host: Sequence[Member]) -> tuple[int, str]:
        return min(places.get(each.name, last) for each in host), host[0].host

    return sorted(hosts, key=place)[:most]


class Pulse:
    """Tells which processes live, by the times of their files. Clocks of hosts are not compared."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, float]] = {}

    def lives(self, file: Path) -> bool:
        """Whether the file was touched lately, or is seen for the first time."""
        try:
            with file.open("rb") as opened:  # NFS answers from a cache if it is not opened
                stamp, now = os.fstat(opened.fileno()).st_mtime_ns, time.monotonic()
        except OSError:
            return False
        last = self._seen.get(file)
        if last is None or last[0] != stamp:
            self._seen[file] = stamp, now
            return True
        return now - last[1] < _LOST_S


@dataclass(frozen=True)
class World:
    """The outcome of a round.

    Attributes:
        names: of its ranks, in order.
    """

    number: int
    names: Sequence[str]
    rank: int
    store: spi.Store
    address: str  # of the host of rank 0


class TooFewHostsError(RankMismatchError):
    """Too few hosts have come in time. To meet again would not help."""


class Meeting:
    """This process' part in the rounds.

    Args:
        folder: that all hosts share.
        least, most: numbers of hosts.
        member: this process.
    """

    def __init__(self, folder: Path, least: int, most: int, member: Member) -> None:
        self._folder, self._least, self._most, self.member = folder, least, most, member
        self.world: World | None = None
        self._own: Path | None = None
        self._pulse, self._looked, self._has_left = Pulse(), 0.0, False
        self._watched = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._beat, name="vescale-fsdp pulse", daemon=True)
        self._thread.start()

    @property
    def names(self) -> Sequence[str]:
        """The names of the ranks of this world."""
        return () if self.world is None else self.world.names

    def stop(self) -> None:
        """Leave: the others wait for this rank no longer."""
        self._has_left = True

    def _beat(self) -> None:
        while not self._has_left:
            own = self._own
            if own is not None:
                with contextlib.suppress(OSError):
                    os.utime(own)
            self._watch()
            time.sleep(_BEAT_S)

    def _watch(self) -> None:
        """Look at ranks of this world in turn, so that it is known at a loss which of them live."""
        world = self.world
        if world is None:
            return
        home, size = self._folder / f"{world.number:06d}", len(world.names)
        for _ in range(min(_WATCHED, size)):
            self._watched = (self._watched + 1) % size
            self._pulse.lives(home / world.names[self._watched])

    def leave(self) -> None:
        """The training is done: others do not wait for this rank any more."""
        own, self._own = self._own, None
        if own is not None:
            own.unlink(missing_ok=True)

    def attend(self) -> None:
        """Undo `leave`: another training begins in the same world."""
        if self._own is None and self.world is not None:
            own = self._folder / f"{self.world.number:06d}" / self.member.name
            with contextlib.suppress(FileNotFoundError):  # others have gone on
                own.touch()
                self._own = own

    def note(self, training: str, begun: int, ended: int) -> None:
        """Write how often a training has begun and ended. The first rank does it."""
        file = self._folder / _TRAININGS
        made = file.with_name(f"{file.name}.new.{os.getpid()}")
        made.write_text(json.dumps({**self._trainings(), training: [begun, ended]}))
        made.replace(file)

    def noted(self, training: str) -> tuple[int, int]:
        """How often a training has begun and ended."""
        begun, ended = self._trainings().get(training, (0, 0))
        return begun, ended

    def _trainings(self) -> dict[str, Sequence[int]]:
        try:
            found: dict[str, Sequence[int]] = json.loads((self._folder / _TRAININGS).read_text())
        except FileNotFoundError:
            return {}
        return found

    def is_under_way(self) -> bool:
        """Whether ranks of an earlier world live, so that this host will have to wait for them.

        The first rank of the host looks; the others get its answer. Takes 2.5 s if there was one.

        Raises:
            TooFewHostsError: that rank has not answered.
        """
        answer, end = self._folder / f"{self.member.host}.answer", time.monotonic() + _ANSWER_S
        if self.member.local == 0:
            pulse, until = Pulse(), time.monotonic() + _LOST_S + _POLL_S
            while (lives := self._have_met(pulse)) and time.monotonic() < until:
                time.sleep(_POLL_S)
            _write(answer, [lives])
        while (found := _read(answer)) is None:
            if time.monotonic() > end:
                raise TooFewHostsError(f"the first rank of this host has not written {answer}")
            time.sleep(_POLL_S)
        return bool(found[0])

    def _have_met(self, pulse: Pulse) -> bool:
        """Whether a rank of the last world lives: there, or in a round that waits for hosts."""
        rounds = self._rounds()
        for number in reversed(range(len(rounds))):
            names = _read(rounds[number] / "closed")
            if names is not None:
                found = [pulse.lives(each / name) for each in rounds[number:] for name in names]
                return any(found)  # each time all are looked at: it takes the times
        return False

    def _rounds(self) -> list[Path]:
        """The folders of all rounds, in order."""
        found = [each for each in self._folder.iterdir() if _ROUND.fullmatch(each.name)]
        return sorted(found, key=lambda each: int(each.name))

    def join(self, timeout_s: float = 600.0) -> World:
        """Come to a round, and return when its ranks are connected to one store.

        Raises:
            TooFewHostsError: there were not enough hosts in time.
        """
        end = time.monotonic() + timeout_s
        while True:
            round_ = self._come()
            names = self._wait_closed(round_, end)
            if names is None:
                continue
            try:
                store, address = self._connect(round_, names)
            except (dist.DistError, OSError) as error:
                _log.warning("round %s ends: not all of its ranks came (%s)", round_.name, error)
                if time.monotonic() > end:
                    raise TooFewHostsError(
                        f"{len(names)} ranks meet in {self._folder}, and cannot connect to each "
                        f"other; the last error: {error}. Is the network cut between hosts that "
                        "reach this folder?"
                    ) from error
                continue
            rank = names.index(self.member.name)
            self.world = World(int(round_.name), names, rank, store, address)
            return self.world

    def is_wanted(self) -> bool:
        """Whether a host waits in the next round, and may come. Looks at most once a second."""
        if self.world is None or time.monotonic() < self._looked + 1.0:
            return False
        if len({name.rsplit(".", 3)[0] for name in self.world.names}) >= self._most:
            return False
        self._looked = time.monotonic()
        return bool(complete(self._living(self._folder / f"{self.world.number + 1:06d}")))

    def _come(self) -> Path:
        """Make this rank's file in the first round that is not closed, after its own."""
        last = 0 if self._own is None else int(self._own.parent.name)
        while True:
            number = max([last + 1, *(int(each.name) for each in self._rounds())])
            while (self._folder / f"{number:06d}" / "closed").exists():
                number += 1
            round_ = self._folder / f"{number:06d}"
            with contextlib.suppress(FileNotFoundError):
                round_.mkdir(exist_ok=True)
                own = round_ / self.member.name
                own.touch()
                if self._rounds()[-1] == round_:  # nobody has gone on, and deleted it
                    self._own = own
                    return round_

    def _living(self, round_: Path) -> list[Member]:
        try:
            files = list(round_.iterdir())
        except FileNotFoundError:
            return []
        members = [(Member.of(file.name), file) for file in files]
        return [each for each, file in members if each is not None and self._pulse.lives(file)]

    def _wait_closed(self, round_: Path, end: float) -> Sequence[str] | None:
        """Return the ranks of the round. None: it was closed without this one."""
        home, former = self._before(round_)
        is_new = self.member.name not in former
        call_s = _FIRST_CALL_S if is_new else _LAST_CALL_S
        came = changed = time.monotonic()
        before: list[Member] = []
        while True:
            names = _read(round_ / "closed")
            if names is not None:
                return names if self.member.name in names else None
            if self._own is None or not self._own.exists():
                return None  # the others have gone on, and deleted the round
            now, living = time.monotonic(), self._living(round_)
            if living != before:
                before, changed = living, now
            hosts = ordered(complete(living), former, self._most)
            is_full = len(hosts) >= self._most
            are_missing = self._are_missing(living, home, former)  # each time: it takes the times
            # A new host has no state that may outdate that of ranks that are in a long step.
            is_over = now - changed > call_s and not (
                are_missing and (is_new or now - came < _AWAITED_S)
            )
            is_first = bool(hosts) and hosts[0][0] == self.member
            if is_first and len(hosts) >= self._least and (is_full or is_over):
                _write(round_ / "closed", [each.name for host in hosts for each in host])
                continue
            if now > end:
                here = ", ".join(f"rank {m.local} of {m.num_local} of {m.host}" for m in living)
                raise TooFewHostsError(
                    f"{len(hosts)} hosts have come to {self._folder} in time, expected at least "
                    f"{self._least} ({HOSTS}), with all of their ranks; here are {here or 'none'}. "
                    "Start the others, or allow fewer"
                )
            time.sleep(_POLL_S)

    def _before(self, round_: Path) -> tuple[Path, Sequence[str]]:
        """The last round that was closed, and its ranks.

        This rank is not among them if it is new, or if others have gone on without it.
        """
        for each in reversed(self._rounds()):
            names = _read(each / "closed") if int(each.name) < int(round_.name) else None
            if names is not None:
                return each, names
        return round_, ()

    def _are_missing(self, here: Sequence[Member], home: Path, former: Sequence[str]) -> bool:
        """Whether a rank of the former round lives, and has not come."""
        names = {each.name for each in here}
        absent = [home / name for name in former if name not in names]
        living = [file for file in absent if self._pulse.lives(file)]  # looks at all of them
        return bool(living)

    def _connect(self, round_: Path, names: Sequence[str]) -> tuple[spi.Store, str]:
        """Return the store of this round, and its host. All of its ranks have come then."""
        rank, timeout = names.index(self.member.name), datetime.timedelta(seconds=_CONNECT_S)
        if rank == 0:
            store = TCPStore(
                "localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout
            )
            host = own_address()
            _write(round_ / "store", [host, store.port])
            self._delete_before(int(round_.name) - 1)
        else:
            end = time.monotonic() + _CONNECT_S
            while (address := _read(round_ / "store")) is None:
                if time.monotonic() > end:
                    raise TimeoutError(f"rank 0 has not written {round_ / 'store'}")
                time.sleep(_POLL_S)
            host, port = address
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        store.set(f"here/{rank}", "")
        store.wait([f"here/{each}" for each in range(len(names))], timeout)
        return store, host

    def _delete_before(self, number: int) -> None:
        for each in self._rounds():
            if int(each.name) < number:
                shutil.rmtree(each, ignore_errors=True)


def own_address() -> str:
    """The address at which other hosts reach this one: of gloo's interface, or by its name."""
    return sockets.of_interface() or (
        socket.gethostname() if _resolves(socket.gethostname()) else "127.0.0.1"
    )


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return False
    return True


def _read(file: Path) -> list[str] | None:
    try:
        found: list[str] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return found


def _write(file: Path, value: Sequence[object]) -> None:
    """Write a file at once, unless another rank was faster."""
    made = file.with_name(f"{file.name}.new.{os.getpid()}")
    made.write_text(json.dumps(value))
    with contextlib.suppress(FileExistsError):
        os.link(made, file)  # atomic, and fails if there is one
    made.unlink()


def from_environment() -> Meeting | None:
    """The meeting that ``VESCALE_FSDP_MEETING`` names, of ``VESCALE_FSDP_HOSTS`` hosts.

    Raises:
        ValueError: the number of hosts is not one, or two with a colon.
    """
    folder, hosts = os.environ.get(MEETING), os.environ.get(HOSTS, "1:1000000")
    if not folder:
        return None
    least, _, most = hosts.partition(":")
    if not (least.isdigit() and (most or least).isdigit() and 0 < int(least) <= int(most or least)):
        raise ValueError(f"{HOSTS} is {hosts!r}, expected a number of hosts, or two as 1:4")
    return Meeting(Path(folder), int(least), int(most or least), Member.here())
