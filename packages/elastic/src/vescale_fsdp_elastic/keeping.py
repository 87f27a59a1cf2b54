"""Makes memory checkpoints in the background, one after the other.

::

    main thread   | step 10 | copy the shards | step 11 | step 12 | ...            | step 20 | wait
    background                                | plan | write | send to neighbours | confirm |

1. Each rank offers what it holds; rank 0 decides who writes what (as `checkpoint.save` does).
2. Each rank writes its file into its host's memory; rank 0 makes the manifest of all.
3. Each rank sends its file to ranks of the next hosts, while the network is idle (`copies`).
4. Receivers check the bytes, and each host gets the manifest. When all ranks have confirmed this,
   the generation before is not needed any more. It is deleted when the next one is begun.

So a host has at most two generations, and at any time one that all have confirmed.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vescale_fsdp.errors import CheckpointWriteError, RankMismatchError
from vescale_fsdp.spi import (
    Contents,
    LocalPlan,
    Manifest,
    Ranks,
    Seal,
    data_name,
    divide,
    parts,
    threads,
)
from vescale_fsdp_elastic import attempts, memory
from vescale_fsdp_elastic.choice import Age, Hosts, to_neighbours
from vescale_fsdp_elastic.copies import Copying

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
PATIENCE = 0.9  # of the time between two memory checkpoints: the copies wait for an idle network
SMALL = 1 << 14  # elements: unsharded tensors up to this size are all in the file of rank 0
LAST_WORDS_S = 2.0  # time for a generation under way when the training has raised


@dataclass(frozen=True)
class Kept:
    """What a memory checkpoint has cost this rank.

    Attributes:
        step: its step.
        num_bytes: of this rank's file.
        sent_bytes, received_bytes: the copies.
        blocked_s: time in which the training waited: for the one before, and for the copy of the
            shards in host memory.
        background_s: time from then until all ranks had confirmed it.
    """

    step: int
    num_bytes: int
    sent_bytes: int
    received_bytes: int
    blocked_s: float
    background_s: float


class Keeper:
    """Makes the memory checkpoints of one attempt on this rank.

    Args:
        directory: the run's folder on disk.
        place: the memory of this host.
        hosts: of all ranks.
        ranks: for messages; used by the background thread only.
        replicas: number of other hosts that get a copy of each file.
        attempt: the number of this attempt.
        newest: the generation that was restored, if it is in memory.
    """

    def __init__(
        self,
        directory: Path,
        place: memory.Memory,
        hosts: Hosts,
        ranks: Ranks,
        replicas: int,
        attempt: int,
        newest: Age | None,
    ) -> None:
        self._place, self._hosts, self._ranks = place, hosts, ranks
        self._directory = directory
        self._replicas, self._attempt = replicas, attempt
        self._leads = hosts.is_leader(ranks.rank)
        self._thread: threading.Thread | None = None
        self._copying: Copying | None = None
        self._error: Exception | None = None
        self._began, self._patience_s = time.monotonic(), 0.0
        self._is_over = False
        self.newest = newest  # confirmed by all ranks
        self.last: Kept | None = None

    def start(self, contents: Contents, step: int, began: float) -> None:
        """Copy the shards, then make a generation of them in the background. Collective.

        Args:
            began: ``time.monotonic()`` at the beginning of `finish` of the one before.
        """
        self._patience_s, self._began = PATIENCE * (began - self._began), began
        local = LocalPlan(contents, self._ranks.is_first)
        local.stage()
        blocked_s = time.monotonic() - began
        # A daemon: it may wait for a rank that hangs, and must not keep this process alive.
        self._thread = threading.Thread(
            target=self._run,
            args=(contents, local, step, blocked_s),
            name="vescale-fsdp elastic",
            daemon=True,
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the generation under way.

        Raises:
            Exception: another rank has died, a state cannot be saved, or a later attempt has begun
                elsewhere. A host whose memory is full is only logged: the generation before
                remains.
        """
        if self._thread is not None:
            threads.carry_out(self._thread.join)  # its thread may wait for a rank that hangs
        error, self._error = self._error, None
        if error is not None:
            raise error

    def check_same(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise on all ranks if ``facts`` differ between ranks. Collective.

        Waits for the generation under way, because its thread uses the same messages.

        Raises:
            RankMismatchError: says which value differs.
        """

        def combine(told: list[Any]) -> list[Any]:
            for rank, each in enumerate(told):
                for name, value in each.items():
                    if value != told[0][name]:
                        raise RankMismatchError(
                            f"{what}: {name} is {told[0][name]} on rank 0 and {value} on rank "
                            f"{rank}. Give all ranks the same: each takes its own part"
                        )
            return [None] * len(told)

        self.finish()
        self._ranks.together(what, lambda: dict(facts), combine)

    def give_up(self, *, is_lost: bool) -> None:
        """After an error: let the generation under way end, if it does so at once.

        Args:
            is_lost: another rank is gone, so that not all can confirm it.
        """
        if is_lost and self._copying is not None:
            self._copying.close()
        if self._thread is not None:
            self._thread.join(LAST_WORDS_S)
        self._is_over = True
        if self._copying is not None:
            self._copying.close()

    def _run(self, contents: Contents, local: LocalPlan, step: int, blocked_s: float) -> None:
        began = time.monotonic()
        try:
            num_bytes, sent, received = self._make(contents, local, Age(self._attempt, step))
        except CheckpointWriteError as error:
            if self._ranks.is_first:
                kept = "none" if self.newest is None else f"that of step {self.newest.step}"
                text = memory.no_memory(error, self._place.folder)
                _log.warning(
                    "no memory checkpoint of step %d (the last one is %s): %s", step, kept, text
                )
        except Exception as error:  # noqa: BLE001  `finish` raises it
            self._error = error
        else:
            background_s = time.monotonic() - began
            self.last = Kept(step, num_bytes, sent, received, blocked_s, background_s)
            _log.debug("memory checkpoint: %s", self.last)

    def _make(self, contents: Contents, local: LocalPlan, age: Age) -> tuple[int, int, int]:
        ranks, folder = self._ranks, self._place.path(age)
        what = f"the memory checkpoint of step {age.step}"

        def offer() -> Any:
            if ranks.is_first:
                attempts.check(self._directory, self._attempt)
            if self._leads and not self._is_over:  # else it belongs to a later attempt
                self._place.make_room(age, [] if self.newest is None else [self.newest])
            return local.offer()

        task = ranks.together(what, offer, lambda offers: divide(offers, SMALL))

        def write() -> Any:
            folder.mkdir(exist_ok=True)
            items = parts.items_of(contents, local, task)
            return _leisurely(lambda: parts.write_items(folder, ranks.rank, items, overwrites=True))

        def combine(written: list[Any]) -> list[Any]:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            seal = Seal(secrets.token_hex(16), age.attempt, age.step, now)
            text = parts.manifest_of(seal, written).render().decode()
            return [text] * len(written)

        text = ranks.together(what, write, combine).encode()
        manifest = Manifest.parse(text, str(folder))
        names = [data_name(rank) for rank in range(ranks.size)]
        sizes = [(name, manifest.files.get(name, 0)) for name in names]
        copying = Copying(ranks, folder, to_neighbours(self._hosts, sizes, self._replicas))

        def confirm(files: list[str]) -> None:
            if len(_leisurely(lambda: memory.whole(folder, manifest, files))) < len(files):
                raise CheckpointWriteError(f"a copy in {folder} was damaged on its way")
            if self._leads:
                memory.write_manifest(folder, text)

        self._copying = copying
        copying.carry_out(what, confirm, self._patience_s)
        self.newest = age
        return sizes[ranks.rank][1], *copying.num_bytes


def _leisurely(call: Callable[[], _T]) -> _T:
    """Call it in a thread of the lowest priority: while the training waits for the network."""

    def begin() -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

    with ThreadPoolExecutor(1, "vescale-fsdp elastic", begin) as executor:
        return executor.submit(call).result()
