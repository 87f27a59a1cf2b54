"""Which generation a restarted job continues from, and who sends which file to whom. No messages.

A generation is one memory checkpoint: a manifest, and a file of each rank that has made it. A host
has some of these files. A generation is complete if every file is whole on some host::

    host A   2-00120: rank 0, rank 1                        2-00110: rank 0, rank 1, rank 2, rank 3
    host B   (lost)
    host C   2-00120: rank 2, rank 3, rank 0, rank 1        1-00990: all

    choice   attempt 2, step 120; A gets the files of ranks 2 and 3 from C

Generations are ordered by the attempt that has made them, then by step. Each start of a job is an
attempt, with a higher number than all that any of its hosts has seen. So a host that was away and
comes back with a later step of an earlier attempt does not win.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Age(NamedTuple):
    """The order of generations and of checkpoints on disk."""

    attempt: int
    step: int


@dataclass(frozen=True)
class Found:
    """A generation as one host has it.

    Attributes:
        id: of the checkpoint. Two attempts that do not know of each other may have the same age.
        files: all files of the generation, with their sizes in bytes.
        here: the files that this host has.
    """

    age: Age
    id: str
    files: Mapping[str, int]
    here: Sequence[str]


@dataclass(frozen=True)
class Candidate:
    """A generation, with the hosts that have each of its files and its manifest."""

    age: Age
    id: str
    files: Mapping[str, int]
    holders: Mapping[str, Sequence[int]]
    hosts: Sequence[int]

    @property
    def lost(self) -> list[str]:
        """The files that no host has."""
        return sorted(file for file in self.files if not self.holders.get(file))


def candidates(found: Sequence[Sequence[Found]]) -> list[Candidate]:
    """Return the generations of all hosts, newest first, complete or not.

    Args:
        found: for each host what it has.
    """
    known: dict[tuple[Age, str], list[tuple[int, Found]]] = {}
    for host, each in enumerate(found):
        for generation in each:
            known.setdefault((generation.age, generation.id), []).append((host, generation))
    made = []
    for (age, id_), there in known.items():
        files = there[0][1].files
        holders = {file: [host for host, each in there if file in each.here] for file in files}
        made.append(Candidate(age, id_, files, holders, [host for host, _ in there]))
    return sorted(made, key=lambda each: (each.age, not each.lost, each.id), reverse=True)


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host. Hosts are numbered in the order of their first ranks.

    Args:
        of_rank: the number of the host of each rank.
    """

    of_rank: Sequence[int]

    @staticmethod
    def named(names: Iterable[str]) -> Hosts:
        """The hosts of ranks that have these names; equal names are one host."""
        numbers: dict[str, int] = {}
        return Hosts([numbers.setdefault(name, len(numbers)) for name in names])

    def __len__(self) -> int:
        return 1 + max(self.of_rank)

    def ranks(self, host: int) -> list[int]:
        """The ranks of a host, ascending."""
        return [rank for rank, each in enumerate(self.of_rank) if each == host]

    def place(self, rank: int) -> tuple[int, int]:
        """The position of a rank among those of its host, and their number."""
        ranks = self.ranks(self.of_rank[rank])
        return ranks.index(rank), len(ranks)

    def is_leader(self, rank: int) -> bool:
        """Whether it is the first rank of its host."""
        return self.place(rank)[0] == 0


class Transfer(NamedTuple):
    """A file that one rank sends to another."""

    file: str
    num_bytes: int
    sender: int
    receiver: int


def to_neighbours(hosts: Hosts, sizes: Sequence[tuple[str, int]], replicas: int) -> list[Transfer]:
    """Return who sends its file to which ranks of the next hosts.

    Rank i of a host sends to rank i of each next host, modulo the number of ranks there. With
    fewer than ``replicas`` other hosts, each of them gets a copy.

    Args:
        sizes: the file of each rank, and its size in bytes. Empty ones are not sent.
    """
    made = []
    for rank, (file, num_bytes) in enumerate(sizes):
        host, place = hosts.of_rank[rank], hosts.place(rank)[0]
        for distance in range(1, min(replicas, len(hosts) - 1) + 1):
            there = hosts.ranks((host + distance) % len(hosts))
            if num_bytes:
                made.append(Transfer(file, num_bytes, rank, there[place % len(there)]))
    return made


def to_have(
    hosts: Hosts, candidate: Candidate, needed: Sequence[Iterable[str]], replicas: int
) -> list[list[str]]:
    """Return the files that each host should have.

    These are the files that its ranks need, and so many others that each file is on
    ``replicas + 1`` hosts, or on all of them: a second loss may come before the next generation.

    Args:
        needed: for each rank the files that it reads.
    """
    have = [{file for rank in hosts.ranks(h) for file in needed[rank]} for h in range(len(hosts))]
    for number, file in enumerate(sorted(candidate.files)):
        there = {h for h, files in enumerate(have) if file in files} | {*candidate.holders[file]}
        for distance in range(len(hosts)):
            host = (number + distance) % len(hosts)
            if len(there) > replicas:
                break
            there.add(host)
            have[host].add(file)
    return [sorted(files) for files in have]


def to_lacking(
    hosts: Hosts, candidate: Candidate, wanted: Sequence[Iterable[str]]
) -> list[Transfer]:
    """Return who sends the files that hosts want and lack. The senders with the least to do.

    Args:
        wanted: for each host the files that it should have.
    """
    sent = dict.fromkeys(range(len(hosts.of_rank)), 0)
    received = dict(sent)
    made = []
    for host, files in enumerate(wanted):
        for file in sorted(files):
            holders = candidate.holders[file]
            if host in holders:
                continue
            num_bytes = candidate.files[file]
            senders = [rank for each in holders for rank in hosts.ranks(each)]
            sender = min(senders, key=lambda rank: (sent[rank], rank))
            receiver = min(hosts.ranks(host), key=lambda rank: (received[rank], rank))
            sent[sender] += num_bytes
            received[receiver] += num_bytes
            made.append(Transfer(file, num_bytes, sender, receiver))
    return made
