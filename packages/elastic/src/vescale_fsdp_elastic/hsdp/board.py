"""The folder through which replicas find each other. It needs no server, and no replica is special.

::

    runs/a/replicas/                    on a file system that all replicas share
      members/
        0-000001/                       the first start of replica 0
          about.json                    its number of ranks, and a digest of each rank's shards
          beat-00000                    a number that this rank changes every second
          gone                          it has ended, and has said so
        1-000001/  1-000002/            replica 1 was started again
      quorums/
        000005/                         what leads to quorum 5
          failed-123                    a rank could not complete the exchange of step 123
          report-0-000001.json          replica 0 says where it is
          decision.json                 made once, by a link: the first one wins
          lane-00000                    the addresses of the ranks 0, for gloo
          state-00000.json              the donor's rank 0 has its part ready, or could not make it
      finished.json                     the training has ended, with so many steps

A file appears whole or not at all. The folder is not read in a step in which nobody is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from vescale_fsdp.spi import write_errors
from vescale_fsdp_elastic.hsdp.quorum import Age, Member, Quorum, Report

_MEMBER = re.compile(r"([0-9]+)-([0-9]{6,})")
_REPORT = re.compile(r"report-([0-9]+)-([0-9]{6,})\.json")
_FAILED = re.compile(r"failed-([0-9]+)")
_KEPT = 3  # folders of quorums that are not deleted


class Board:
    """The folder, as one process sees it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with write_errors(folder):
            (folder / "members").mkdir(parents=True, exist_ok=True)
            (folder / "quorums").mkdir(exist_ok=True)

    # Members

    def register(self, replica: int, about: dict[str, Any]) -> Member:
        """Make a new member of this replica. Deletes the files of its earlier starts."""
        start = 1 + max((each.start for each in self._members(replica)), default=0)
        while True:
            member = Member(replica, start)
            path = self._of(member)
            with write_errors(path):
                try:
                    path.mkdir()
                except FileExistsError:
                    start += 1
                    continue
            _write(path / "about.json", about)
            for earlier in self._members(replica):
                if earlier.start < start:
                    shutil.rmtree(self._of(earlier), ignore_errors=True)
            return member

    def about(self, member: Member) -> dict[str, Any]:
        """What the member has registered with; empty if that is not there."""
        return _read(self._of(member) / "about.json") or {}

    def is_replaced(self, member: Member) -> bool:
        """Whether the replica was started again since."""
        return self._of(Member(member.replica, member.start + 1)).exists() or any(
            each.start > member.start for each in self._members(member.replica)
        )

    def _members(self, replica: int) -> list[Member]:
        names = (_MEMBER.fullmatch(path.name) for path in (self._folder / "members").iterdir())
        return [Member(replica, int(name[2])) for name in names if name and int(name[1]) == replica]

    def beat(self, member: Member, rank: int, number: int) -> None:
        """Say that a rank of this member is alive: the number is another one than before."""
        (self._of(member) / f"beat-{rank:05d}").write_text(str(number))

    def beats(self, member: Member, rank: int | None = None) -> dict[str, str]:
        """The last number of each rank, or of one rank."""
        pattern, found = "beat-*" if rank is None else f"beat-{rank:05d}", {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._of(member).glob(pattern):
                found[path.name] = path.read_text()
        return found

    def leave(self, member: Member) -> None:
        """Say that this member has ended."""
        with contextlib.suppress(FileNotFoundError):  # the replica was started again
            (self._of(member) / "gone").touch()

    def has_left(self, member: Member) -> bool:
        """Whether the member has said that it has ended."""
        return (self._of(member) / "gone").exists()

    # Quorums

    def report(self, number: int, report: Report) -> None:
        """Write a report for a new quorum. A later one of the same member replaces it."""
        folder = self.quorum_folder(number)
        with write_errors(folder):
            folder.mkdir(exist_ok=True)
            member = report.member
            name = f"report-{member.replica}-{member.start:06d}.json"
            _write(folder / name, [report.place, list(report.age), report.has_sum])

    def reports(self, number: int) -> list[Report]:
        """The reports for a new quorum."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.quorum_folder(number).iterdir():
                name = _REPORT.fullmatch(path.name)
                value = _read(path) if name else None
                if name and value is not None:
                    member = Member(int(name[1]), int(name[2]))
                    found.append(Report(member, value[0], Age(*value[1]), value[2]))
        return found

    def give_up(self, number: int, step: int) -> None:
        """Say that a rank's exchange of this step has failed, and that quorum ``number`` is needed.

        The ranks of its replica on other lanes learn of it here, before any of them can report.
        """
        folder = self.quorum_folder(number)
        with write_errors(folder):
            folder.mkdir(exist_ok=True)
            (folder / f"failed-{step}").touch()

    def failures(self, number: int) -> list[int]:
        """The steps for which `give_up` was called."""
        with contextlib.suppress(FileNotFoundError):
            names = (_FAILED.fullmatch(path.name) for path in self.quorum_folder(number).iterdir())
            return [int(name[1]) for name in names if name]
        return []

    def tell_state(self, number: int, rank: int, error: str = "") -> None:
        """Say that this rank of the donor is ready to send its state, or why it cannot."""
        folder = self.quorum_folder(number)
        with write_errors(folder):
            _write(folder / f"state-{rank:05d}.json", error)

    def told_of_state(self, number: int, rank: int) -> str | None:
        """What this rank of the donor has said: an error or nothing. None: it has not."""
        told: str | None = _read(self.quorum_folder(number) / f"state-{rank:05d}.json")
        return told

    def decide(self, quorum: Quorum) -> None:
        """Make this the decision, unless there is one already. Deletes the files of old quorums."""
        folder = self.quorum_folder(quorum.number)
        with write_errors(folder), contextlib.suppress(FileExistsError):
            folder.mkdir(exist_ok=True)
            _write(folder / "decision.json", quorum.to_json(), once=True)
        for path in (self._folder / "quorums").iterdir():
            if path.name.isdigit() and int(path.name) <= quorum.number - _KEPT:
                shutil.rmtree(path, ignore_errors=True)

    def decision(self, number: int) -> Quorum | None:
        """The quorum with this number, if it has been decided."""
        value = _read(self.quorum_folder(number) / "decision.json")
        return None if value is None else Quorum.from_json(value)

    def last(self) -> Quorum | None:
        """The last quorum."""
        paths = (self._folder / "quorums").iterdir()
        for number in sorted((int(p.name) for p in paths if p.name.isdigit()), reverse=True):
            found = self.decision(number)
            if found is not None:
                return found
        return None

    def quorum_folder(self, number: int) -> Path:
        """The folder with what leads to a quorum."""
        return self._folder / "quorums" / f"{number:06d}"

    # The end

    @property
    def finished(self) -> int:
        """The number of steps with which the training has ended; 0 if it has not."""
        return int(_read(self._folder / "finished.json") or 0)

    @finished.setter
    def finished(self, step: int) -> None:
        with write_errors(self._folder):
            _write(self._folder / "finished.json", step)

    def _of(self, member: Member) -> Path:
        return self._folder / "members" / f"{member.replica}-{member.start:06d}"


def _write(path: Path, value: Any, *, once: bool = False) -> None:
    """Write JSON. With ``once``, raise FileExistsError if the file is there."""
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    new.write_text(json.dumps(value))
    if not once:
        new.replace(path)
        return
    try:
        os.link(new, path)
    finally:
        new.unlink()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
