"""Finds the newest state after a restart, in the memory of the hosts or on disk, and loads it.

1. Each host reports what it has. Rank 0 sorts the generations; those on disk count too.
2. All ranks check the bytes of the newest one, each a share of its host's files. If a file is whole
   nowhere, the next one is tried.
3. Hosts that have a file send it to those that need it, and so that there are enough copies. A
   host whose memory is too full for them takes them on its disk, for as long as the load takes.
4. The loader of checkpoints reads it on every rank; the number of ranks may be another one.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vescale_fsdp import checkpoint
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointWriteError,
    RankMismatchError,
)
from vescale_fsdp.spi import (
    MANIFEST,
    Manifest,
    Optimizers,
    Ranks,
    Stateful,
    load_from,
    read_manifest,
)
from vescale_fsdp_elastic import attempts, memory
from vescale_fsdp_elastic.choice import (
    Age,
    Candidate,
    Found,
    Hosts,
    Transfer,
    candidates,
    to_have,
    to_lacking,
)
from vescale_fsdp_elastic.copies import Copying
from vescale_fsdp_elastic.needed import files_of

_log = logging.getLogger(__name__)
KEY = "elastic"  # in the extra values of a checkpoint
_WHAT = "the search for the newest state"


@dataclass
class Restored:
    """Where an attempt begins.

    Attributes:
        attempt: its number.
        source: "memory", "disk" or "start".
        extra: of the checkpoint.
        age: of the generation in memory.
        reason: for the log.
    """

    attempt: int
    source: str
    extra: dict[str, Any] = field(default_factory=dict)
    age: Age | None = None
    reason: str = ""


def meet(ranks: Ranks, directory: Path, root: Path) -> tuple[Hosts, memory.Memory]:
    """Agree on the run's name and on the hosts. Collective.

    Raises:
        RankMismatchError: ranks see different folders on disk.
    """
    run = ranks.together(
        _WHAT,
        lambda: memory.run_name(directory) if ranks.is_first else None,
        lambda values: [values[0]] * len(values),
    )

    def who() -> str:
        found = memory.run_name(directory)
        if found != run:
            raise RankMismatchError(
                f"the folder {directory.absolute()} of rank {ranks.rank} is not that of rank 0 "
                f"(run {found}, expected {run}): it must be on a file system that all ranks share"
            )
        return memory.name_in(root / "host")

    names = ranks.together(_WHAT, who, lambda values: [values] * len(values))
    place, hosts = memory.Memory(root, directory, run), Hosts.named(names)
    # First one rank of each host, because it deletes what earlier runs have left.
    ranks.together(_WHAT, lambda: place.make() if hosts.is_leader(ranks.rank) else None)
    return hosts, place


class Restoring:
    """The search and the load on this rank.

    Args:
        ranks: all of them.
        hosts: of all ranks.
        place: the memory of this host.
        directory: the run's folder on disk.
        replicas: each file is then on so many more hosts than one.
    """

    def __init__(
        self,
        ranks: Ranks,
        hosts: Hosts,
        place: memory.Memory,
        directory: Path,
        replicas: int,
    ) -> None:
        self._ranks, self._hosts = ranks, hosts
        self._place, self._directory, self._replicas = place, directory, replicas
        self._notes: list[str] = []  # why generations were not chosen; on rank 0
        self._candidates: list[Candidate] = []  # newest first; on rank 0
        self._whole: list[Age] = []  # generations without a lost file, older ones too; on rank 0
        self._path = place.folder  # where the generation is that is loaded
        self._not_copied: list[Age] = []  # whole on other hosts; on all ranks
        self._disk = contextlib.ExitStack()  # deletes the folders on the local disk

    def carry_out(
        self, model: nn.Module, optimizer: Optimizers, stateful: Mapping[str, Stateful]
    ) -> Restored:
        """Load the newest state. Collective.

        Raises:
            CheckpointMismatchError: it belongs to another model or optimizer.
            CheckpointCorruptError, CheckpointIncompleteError: no generation in memory is whole,
                and the checkpoint on disk is damaged.
            CheckpointWriteError: a generation is whole, and a host has no room for what it needs of
                it, in memory or on its disk; and there is no checkpoint on disk.
        """
        with self._disk:
            return self._restored(model, optimizer, stateful)

    def _restored(
        self, model: nn.Module, optimizer: Optimizers, stateful: Mapping[str, Stateful]
    ) -> Restored:
        attempt, disk, ages = self._look()
        found = self._load(ages, model, optimizer, stateful)
        if found is not None:
            age, extra = found
            return self._begin(attempt, "memory", extra, age)
        if disk is not None:
            extra = checkpoint.load(disk, model, optimizer, stateful=stateful)
            return self._begin(attempt, "disk", extra)
        if self._not_copied:  # to begin at the beginning would lose it
            reason = self._ranks.together(_WHAT, self._reason, lambda each: [each[0]] * len(each))
            raise CheckpointWriteError(
                f"a state is whole in the memory of the hosts, and could not be loaded: {reason}. "
                f"Free memory there, or set {memory.VARIABLE} to a folder with more"
            )
        return self._begin(attempt, "start", {})

    def load_received(
        self, model: nn.Module, optimizer: Optimizers, stateful: Mapping[str, Stateful]
    ) -> dict[str, Any]:
        """Load the only generation in memory, which has just been received. Collective.

        Random number generators are left as they are. Returns the extra values.

        Raises:
            CheckpointIncompleteError: it is not whole.
            CheckpointMismatchError: it belongs to another model or optimizer.
        """

        def combine(reports: list[Any]) -> list[Any]:
            told = [_found(each) for each in reports if each is not None]
            self._candidates = candidates(told)
            return [[list(each.age) for each in self._candidates]] * len(reports)

        leads = self._hosts.is_leader(self._ranks.rank)
        ages = self._ranks.together(_WHAT, lambda: self._report() if leads else None, combine)
        with self._disk:
            found = self._load([Age(*age) for age in ages], model, optimizer, stateful)
            # After it all ranks have read, and folders on the local disk can go.
            reasons = self._ranks.together(_WHAT, self._reason, lambda each: [each[0]] * len(each))
        if found is None:
            raise CheckpointIncompleteError(f"a state that was received is not whole: {reasons}")
        return found[1]

    def _load(
        self,
        ages: list[Age],
        model: nn.Module,
        optimizer: Optimizers,
        stateful: Mapping[str, Stateful],
    ) -> tuple[Age, dict[str, Any]] | None:
        """Load the first of these that is whole. Returns its age and extra values."""
        for number, age in enumerate(ages):
            for whole in (False, True):
                if not self._bring(number, age, None if whole else (model, optimizer)):
                    break
                try:
                    extra = load_from(
                        self._path, model, optimizer, stateful=stateful, is_checked=True
                    )
                except CheckpointCorruptError as error:
                    self._notes.append(f"step {age.step} is damaged: {error}")
                    break
                except CheckpointIncompleteError:
                    if whole:
                        raise
                    continue  # a file was needed that `needed` does not know of: bring all files
                return age, extra
        return None

    def _report(self) -> list[Any]:
        """Return the generations on this host, as JSON for `_found`."""
        return [
            [*each.age, each.id, dict(each.files), list(each.here)] for each in self._place.found()
        ]

    def _reason(self) -> str:
        return "; ".join(self._notes) or "it is the newest"

    def _look(self) -> tuple[int, Path | None, list[Age]]:
        """Return the number of the new attempt, the last checkpoint on disk, and what to try."""
        rank, leads = self._ranks.rank, self._hosts.is_leader(self._ranks.rank)

        def report() -> Any:
            if not leads:
                return None
            disk = self._on_disk() if rank == 0 else None
            return [self._report(), disk]

        def combine(reports: list[Any]) -> list[Any]:
            told = [each for each in reports if each is not None]
            disk, on_disk = told[0][1]
            found = [_found(generations) for generations, _ in told]
            last = max([on_disk[0], *(each.age.attempt for one in found for each in one)])
            known = candidates(found)
            self._whole = [each.age for each in known if not each.lost]
            self._candidates = [each for each in known if disk is None or each.age >= Age(*on_disk)]
            if not any(found):
                self._notes.append("no host has a state in memory")
            elif not self._candidates:
                self._notes.append("those in memory are older")
            ages = [list(each.age) for each in self._candidates]
            attempt = attempts.claim(self._directory, last + 1)
            return [[attempt, disk, ages]] * len(reports)

        attempt, disk, ages = self._ranks.together(_WHAT, report, combine)
        return attempt, None if disk is None else Path(disk), [Age(*age) for age in ages]

    def _on_disk(self) -> Any:
        """Return the last checkpoint on disk, or None, and its age."""
        # Those of other names are the user's, and count only where a run begins with one of them.
        is_begun = any(self._directory.glob(attempts.NAMES))
        path = checkpoint.latest(self._directory, attempts.NAMES if is_begun else "*")
        if path is None:
            return [None, [0, 0]]
        extra = checkpoint.read_extra(path)
        return [str(path), _age_in(extra)]

    def _bring(self, number: int, age: Age, targets: tuple[nn.Module, Optimizers] | None) -> bool:
        """Bring a generation into the memory of each host. Collective.

        Args:
            number, age: of the candidate.
            targets: each host gets what it needs for these. None: all files.

        Returns whether that was possible: whether all files are whole on some host.
        """
        folder, rank = self._place.path(age), self._ranks.rank
        place, num_local = self._hosts.place(rank)
        self._path = folder

        def check() -> Any:
            """Return the manifest if this rank leads its host, and its share of the whole files."""
            mine = next((each for each in self._place.found() if each.age == age), None)
            if mine is None:
                return [None, None, []]
            manifest = read_manifest(folder)
            text = (folder / MANIFEST).read_text() if place == 0 else None
            share = sorted(mine.here)[place::num_local]
            return [mine.id, text, memory.whole(folder, manifest, share)]

        def combine(checked: list[Any]) -> list[Any]:
            return [self._of_hosts(checked, self._candidates[number])] * len(checked)

        answer = self._ranks.together(_WHAT, check, combine)
        if answer is None:
            return False
        text, holders = answer
        manifest = Manifest.parse(text.encode(), str(folder))
        candidate = Candidate(age, manifest.seal.id, manifest.files, holders, [])

        def need() -> list[str]:
            return sorted(manifest.files if targets is None else files_of(manifest, *targets, rank))

        def divide(needed: list[list[str]]) -> list[Any]:
            have = to_have(self._hosts, candidate, needed, self._replicas)
            return [have] * len(needed)

        wanted = self._ranks.together(_WHAT, need, divide)
        transfers = to_lacking(self._hosts, candidate, wanted)
        try:
            self._path = path = self._room_for(folder, text, transfers)
            copying = Copying(self._ranks, path, transfers)
            copying.carry_out(_WHAT, lambda files: self._confirm(path, manifest, files))
        except (CheckpointWriteError, CheckpointCorruptError) as error:
            self._notes.append(f"step {age.step} could not be copied: {error}")
            self._not_copied.append(age)
            return False
        return True

    def _room_for(self, folder: Path, manifest: str, transfers: list[Transfer]) -> Path:
        """Return a folder for a generation on this host, with what is here of it. Collective.

        It is ``folder``, or one on the local disk if the memory has no room for what comes.
        """
        hosts, rank = self._hosts, self._ranks.rank
        host = hosts.of_rank[rank]
        comes = sum(each.num_bytes for each in transfers if hosts.of_rank[each.receiver] == host)

        def make() -> str | None:
            if not hosts.is_leader(rank):
                return None
            path = folder
            if comes and not memory.has_room(self._place.folder, comes + len(manifest)):
                made = tempfile.TemporaryDirectory(prefix="vescale-fsdp-")
                path = Path(self._disk.enter_context(made))
                for file in folder.iterdir() if folder.exists() else ():
                    (path / file.name).symlink_to(file)
                _log.warning("the memory %s is full: copies are in %s", self._place.folder, path)
            path.mkdir(exist_ok=True)
            memory.write_manifest(path, manifest.encode())
            return str(path)

        def tell(made: list[Any]) -> list[Any]:
            return [made[hosts.ranks(each)[0]] for each in hosts.of_rank]

        return Path(self._ranks.together(_WHAT, make, tell))

    def _of_hosts(self, checked: list[Any], candidate: Candidate) -> Any:
        """Return the manifest and the holders of each file; None if the generation is not whole."""
        text, holders = None, {file: set[int]() for file in candidate.files}
        for rank, (id_, its_text, files) in enumerate(checked):
            if id_ == candidate.id:
                text = text or its_text
                for file in files:
                    holders[file].add(self._hosts.of_rank[rank])
        lost = sorted(file for file, hosts in holders.items() if not hosts)
        if lost or text is None:
            shown = ", ".join(lost[:4]) + (", ..." if len(lost) > 4 else "")
            self._notes.append(
                f"step {candidate.age.step} in memory lacks {len(lost)} of "
                f"{len(holders)} files ({shown}): no host that is here has them whole"
            )
            return None
        return text, {file: sorted(hosts) for file, hosts in holders.items()}

    @staticmethod
    def _confirm(folder: Path, manifest: Manifest, files: list[str]) -> None:
        if len(memory.whole(folder, manifest, files)) < len(files):
            raise CheckpointCorruptError(f"a copy in {folder} was damaged on its way")

    def _begin(
        self,
        attempt: int,
        source: str,
        extra: dict[str, Any],
        age: Age | None = None,
    ) -> Restored:
        """Delete what is not needed any more on every host. Collective."""
        own = Age(*_age_in(extra))
        further = [each for each in self._whole if each < own and each.step > own.step]
        for each in sorted(further, key=lambda each: each.step)[-1:]:
            self._notes.append(
                f"step {each.step} of attempt {each.attempt} is in memory and is dropped: a later "
                "attempt has begun without the hosts that have it (--nnodes of torchrun says with "
                "how few hosts it may begin)"
            )
        restored = Restored(attempt, source, extra, age, self._reason())

        def clear() -> None:
            if self._hosts.is_leader(self._ranks.rank):
                self._place.keep(self._not_copied if restored.age is None else [restored.age])

        self._ranks.together(_WHAT, clear)
        if self._ranks.is_first:
            step = restored.extra.get("step", 0)
            where = {
                "memory": f"step {step}, from memory",
                "disk": f"step {step}, from disk",
                "start": "the beginning",
            }[restored.source]
            is_usual = not (self._candidates if restored.source == "start" else self._notes)
            _log.log(
                logging.INFO if is_usual else logging.WARNING,
                "attempt %d begins on %d ranks of %d hosts with %s (%s)",
                restored.attempt, self._ranks.size, len(self._hosts), where, restored.reason,
            )  # fmt: skip
        return restored


def _age_in(extra: Mapping[str, Any]) -> list[int]:
    """Return the age of a checkpoint with these extra values, as JSON."""
    return [extra.get(KEY, {}).get("attempt", 0), extra.get("step", 0)]


def _found(report: list[Any]) -> list[Found]:
    return [Found(Age(a, s), id_, files, here) for a, s, id_, files, here in report]
