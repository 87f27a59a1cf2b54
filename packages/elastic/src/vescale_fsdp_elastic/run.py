"""`Run`: a training under way, with the steps that are left and the saves between them."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import Dataset

from vescale_fsdp import checkpoint
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.spi import capture, collect, finish_saves, leave_saves, restorer, waits
from vescale_fsdp_elastic import attempts, worlds
from vescale_fsdp_elastic.batches import Batches, Step, is_indexed
from vescale_fsdp_elastic.beginning import Attempt, Options
from vescale_fsdp_elastic.choice import Age
from vescale_fsdp_elastic.counting import StepCounter
from vescale_fsdp_elastic.keeping import LAST_WORDS_S, Kept
from vescale_fsdp_elastic.leaving import Leaving
from vescale_fsdp_elastic.losses import RanksHaveChanged, is_loss
from vescale_fsdp_elastic.regroup import regroup
from vescale_fsdp_elastic.restoring import KEY
from vescale_fsdp_elastic.unsaved import ModesBySteps, gradients_wait, put

_log = logging.getLogger(__name__)
_MOST_LOSSES = 5
_MOST_OPEN = 100  # steps over which gradients are accumulated, without a checkpoint
_OWN_SIGNAL_S = 5.0  # torchrun sends SIGTERM to all ranks within this time


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _hosts_wait() -> bool:
    """Whether hosts wait to join."""
    meeting = worlds.current()
    return meeting is not None and meeting.is_wanted()


class _Left(NamedTuple):
    """A step that a loop has begun, and not counted yet."""

    num_samples: int
    counts: Sequence[int]  # of the optimizers' steps, before it
    step: Step | None = None


class Run:
    """A training under way: what `training` returns.

    Attributes:
        step: number of steps made, with those of earlier attempts.
        attempt: 1 in the first, higher after each restart.
        source: where the state is from: "memory", "disk" or "start".
        extra: values of the first rank that are saved and restored with the state.
        before_save: called on all ranks before each save; it may change ``extra``.
        random_at_first_step: sets the random generators when a loop begins its first step.
    """

    random_at_first_step: Callable[[], None] | None = None

    def __init__(
        self,
        options: Options,
        attempt: Attempt,
        *,
        before: Run | None = None,
        is_repeated: bool = False,
    ) -> None:
        """Begin with the state of an attempt.

        Args:
            before: that of the former call in this process, if the training `is_repeated`.
            is_repeated: the caller begins again in this process when ranks have been lost or come
                (`repeating`).
        """
        self._options, self._is_repeated = options, is_repeated
        self._counter = StepCounter(options.optimizer)
        self._leaving = Leaving(options.directory, attempt.left)
        self._loop: object = None  # the one that has the next step
        self._goes_on = False
        self._is_due = self._is_due_on_disk = False
        self._num_open = 0  # steps in a row after which gradients wait
        self._modes: ModesBySteps | None = None if before is None else before._modes
        self.extra: dict[str, Any] = {}
        self.marks: dict[str, Any] = {}  # values of other parts of this package
        self.before_save: Callable[[], None] | None = None
        self.before_leaving: Callable[[], None] | None = None  # when all save and end
        self._take(attempt)

    def _take(self, attempt: Attempt) -> None:
        """Continue from the state of an attempt."""
        restored, self._own = attempt.restored, attempt
        self._keeper, self._place, self._leads = attempt.keeper, attempt.place, attempt.leads
        self.attempt, self.source = restored.attempt, restored.source
        self._num_samples: int | None = None
        self._left: _Left | None = None
        self.take(restored.extra)
        if self.source == "start":
            self._num_samples = 0
        self._step_on_disk = None if self.source == "memory" else self.step
        self._is_due = self._is_due_on_disk = False
        # What loops do before their first step may draw numbers: each ``iter(DataLoader)`` does.
        self.random_at_first_step = None if self.source == "start" else restorer(capture())
        if self._modes is None:
            self._modes = ModesBySteps(self._options.modules, self.step)
        else:  # this process goes on
            self._modes.restore(self.step)
        signals = self._options.signals
        self._stop = checkpoint.StopOnSignal(*signals) if signals else None

    def take(self, extra: Mapping[str, Any]) -> None:
        """Continue from the values that were saved with a state."""
        put(self.extra, {key: each for key, each in extra.items() if key not in ("step", KEY)})
        self.step = int(extra.get("step", 0))
        own = extra.get(KEY, {})
        self._num_samples = own.get("samples")
        self.marks.clear()
        self.marks.update(own.get("marks", {}))

    def move(self, step: int, num_samples: int) -> None:
        """Continue from another step than the state's: that of a checkpoint loaded by others."""
        own = {"samples": num_samples, "marks": dict(self.marks)}
        self.take({**self.extra, "step": step, KEY: own})

    @property
    def has_signal(self) -> bool:
        """Whether this process was told to end."""
        return self._stop is not None and self._stop.received

    @property
    def memory_folder(self) -> Path:
        """The folder of this run in the memory of this host."""
        return self._place.folder

    @property
    def last_kept(self) -> Kept | None:
        """What the last memory checkpoint has cost this rank. None: there was none."""
        return self._keeper.last

    def steps(self, until: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left, for data of your own.

        After the body of each, the state is saved if it is time. Choose the samples of a step by
        its number, so that a restarted job takes the same.
        """
        if self.is_left(until):
            return
        loop = self.begin_loop(self.made)
        while self.step < until:
            self.begin_step(0)
            yield self.step
            self.check_loop(loop)
            self.made(is_last=self.step + 1 >= until)

    def batches(
        self,
        data: Dataset[Any],
        *,
        global_batch: int,
        until: int,
        micro_batch: int | None = None,
        seed: int | None = 0,
        **options: Any,
    ) -> Iterator[Step]:
        """Yield the steps that are left, each with this rank's micro-batches.

        A step takes the same samples with any number of ranks. Ranks have the same number of
        micro-batches, and their sizes differ by one sample at most.

        Args:
            data: with ``__len__`` and ``__getitem__``.
            global_batch: samples of a step, of all ranks together.
            until: the number of steps of the whole training.
            micro_batch: the most samples that a rank takes at once. With fewer ranks there are more
                micro-batches. None: a rank takes all of its samples at once.
            seed: of the shuffle, a new one for each epoch. None: samples in the order of the data.
            options: of `torch.utils.data.DataLoader`: ``num_workers``, ``collate_fn`` and others.

        Raises:
            RankMismatchError: an argument or the number of samples differs between ranks.
            TypeError, ValueError: an argument is out of range, or data has no indices.
        """
        last_try: tuple[int, Sequence[str]] = (-1, ())
        can_go_on, is_done = worlds.current() is not None, self.is_left(until)
        while not is_done:
            rank, size = _rank_and_size()
            batches = Batches(data, global_batch, micro_batch, seed, rank, size, options)
            try:
                # Also on ranks that go on: those that have joined them begin their loop.
                self.check_batches(data, global_batch, micro_batch, seed)
                loop = self.begin_loop(self.made)
                steps = batches.steps(self.step, self.samples_before(global_batch), until)
                with closing(steps):
                    for step in steps:
                        step.goes_on = can_go_on
                        self.begin_step(global_batch, step)
                        yield step
                        self.check_loop(loop)
                        self._goes_on = can_go_on and step.was_entered
                        step.check_taken()
                        self.made(global_batch, is_last=self.step + 1 >= until)
            except Exception as error:
                meeting = worlds.current()
                if not (self._goes_on and is_loss(error)):
                    raise
                assert meeting is not None, "it can go on"
                this_try = (self.step, meeting.names)
                if this_try == last_try:  # nobody was lost, and the same step has failed again
                    raise
                if not isinstance(error, RanksHaveChanged):
                    last_try = this_try
                self._go_on(error)
            else:
                is_done = True

    def is_left(self, until: int) -> bool:
        """Whether a loop to ``until`` was left at this step before a restart: it has no steps then.

        Call it when a loop begins that others drive. If the context is left without an error before
        ``until``, this is remembered.
        """
        return self._leaving.begin(until, self.step)

    def check_batches(
        self, data: Dataset[Any], global_batch: int, micro_batch: int | None, seed: int | None
    ) -> None:
        """Raise RankMismatchError if ranks divide different samples. Collective."""
        num_samples = len(data) if is_indexed(data) else None  # type: ignore[arg-type]
        facts = {
            "len(data)": num_samples, "global_batch": global_batch, "micro_batch": micro_batch,
            "seed": seed,
        }  # fmt: skip
        self._keeper.check_same("the samples of steps", facts)

    def begin_loop(self, made: Callable[[int], None]) -> object:
        """Return a token for a loop that begins. Collective.

        Args:
            made: counts a step, from the number of its samples. It is called if a loop was left in
                a step that was made.
        """
        if (left := self._take_left()) is not None:
            made(left.num_samples)
        self._loop = object()
        return self._loop

    def begin_step(self, num_samples: int, step: Step | None = None) -> None:
        """Remember that a loop is in a step, until `made` counts it."""
        if self.random_at_first_step is not None:
            self.random_at_first_step()
            self.random_at_first_step = None
        self._left = _Left(num_samples, self._counter.counts, step)

    def check_loop(self, loop: object) -> None:
        """Raise if another loop has begun since ``loop``, a token, had its last step."""
        if self._loop is not loop:
            raise RuntimeError(
                f"two loops over the steps of one training: another has begun inside step "
                f"{self.step} of this one. Take the steps from one loop, and the samples of other "
                "data by the number of the step"
            )

    def _take_left(self) -> _Left | None:
        """The step that a loop was left in, by ``break`` or an error, if an optimizer has made it.

        If none has, the step comes again in the next loop.
        """
        left, self._left = self._left, None
        if left is None or left.counts == self._counter.counts:
            return None
        if left.step is not None:
            left.step.check_taken()
        return left

    def _add(self, num_samples: int) -> None:
        self._left = None
        self.step += 1
        if self._num_samples is not None:
            self._num_samples += num_samples

    def samples_before(self, global_batch: int) -> int:
        """The number of samples that earlier steps have taken."""
        if self._num_samples is None:  # a checkpoint that a loop without this context has saved
            self._num_samples = self.step * global_batch
        return self._num_samples

    def _go_on(self, error: Exception) -> None:
        """After a loss: go on with the ranks that are there, or end if this one was told to."""
        self._leave_world(error)
        why = str(error)
        for _ in range(_MOST_LOSSES):
            attempt = regroup(self._options, why)
            try:
                self._take(attempt)
                self._options.after_regroup()
                return
            except Exception as another:
                attempt.give_up()
                if not is_loss(another):
                    raise
                why = str(another)
        raise RankMismatchError(f"a rank was lost whenever the others had met: {why}")

    def _leave_world(self, error: BaseException) -> None:
        """After a loss: close all connections. Ends this process if it was told to."""
        waits.abort(str(error))
        self._own.give_up()
        code = 0
        if self._stop is not None:
            self._stop.close()
            code = self._stop.own_exit_code  # after that a signal ends the process by itself
        leave_saves(LAST_WORDS_S)
        if code:
            sys.exit(code)
        if not isinstance(error, RanksHaveChanged):
            _log.warning("a rank was lost: %s", error)

    def made(self, num_samples: int = 0, *, is_last: bool = False) -> None:
        """Count a step, and save if it is time. Collective.

        Nothing is saved while gradients wait for an optimizer's step in a later one of these.

        `steps` and `batches` call it. Call it yourself only if others drive the loop.

        Args:
            num_samples: that the step took, of all ranks.
            is_last: the training is done: save on disk.
        """
        is_open = self._is_open()
        self._add(num_samples)
        if is_last:  # also after a signal: there is nothing to come back for
            self.end()
            return
        options = self._options
        self._is_due |= self.step % options.every == 0
        if options.every_on_disk is not None:
            self._is_due_on_disk |= self.step % options.every_on_disk == 0
        if is_open:  # the gradients are in no checkpoint
            return
        if self._stop is not None and _rank_and_size()[0] == 0 and _hosts_wait():
            self._stop.ask()
        stops = self._stop is not None and self._stop.requested()
        if stops or self._is_due:
            self._keep()
        is_due_on_disk, self._is_due, self._is_due_on_disk = self._is_due_on_disk, False, False
        if stops:
            self._leave(is_due_on_disk)
        elif is_due_on_disk:
            self._save(async_=True)

    def _is_open(self) -> bool:
        """Whether gradients of the step that was made wait for an optimizer, in a later one.

        The same on all ranks. False after so many that the loop must train by other means.
        """
        left = self._left
        modules = self._options.modules
        is_open = left is not None and gradients_wait(modules, self._counter, left.counts)
        self._num_open = self._num_open + 1 if is_open else 0
        if self._num_open == _MOST_OPEN:
            _log.warning(
                "gradients have waited for an optimizer for %d steps, and are not saved now",
                _MOST_OPEN,
            )
        return self.has_open_gradients

    @property
    def has_open_gradients(self) -> bool:
        """Whether gradients wait for an optimizer after the last step: nothing is saved then."""
        return 0 < self._num_open < _MOST_OPEN

    def end(self) -> None:
        """Save on disk, as at the end of the context. Collective."""
        if (left := self._take_left()) is not None:
            self._add(left.num_samples)
        self._leaving.end(self.step, self.attempt)
        if self._step_on_disk != self.step:
            self._save(async_=False)

    def stop_on(self, *signals: signal.Signals) -> None:
        """Handle these signals from now on, in place of handlers that others have set meanwhile."""
        if self._stop is not None:
            self._stop.close()
        self._stop = checkpoint.StopOnSignal(*signals) if signals else None

    def _state(self) -> dict[str, Any]:
        if self.before_save is not None:
            self.before_save()
        if self._modes is not None:
            self._modes.note(self.step)
        own = {"samples": self._num_samples, "attempt": self.attempt, "marks": self.marks}
        return {**self.extra, "step": self.step, KEY: own}

    def _keep(self) -> None:
        """Begin a memory checkpoint. Waits for the one before."""
        options, began = self._options, time.monotonic()
        self._keeper.finish()
        contents = collect(
            options.model, options.optimizer, self._state(), options.stateful, with_rng=True
        )
        self._keeper.start(contents, self.step, began)

    def _save(self, *, async_: bool) -> None:
        options = self._options
        if self._leads:
            attempts.check(options.directory, self.attempt)
        checkpoint.save(
            options.directory / attempts.name_of(self.step, self.attempt),
            options.model,
            options.optimizer,
            extra=self._state(),
            stateful=options.stateful,
            keep_last=options.keep_last,
            keep_names=attempts.NAMES,
            async_=async_,
            reduced_by_hand=True,  # `training` has checked it
        )
        self._step_on_disk = self.step

    def _leave(self, is_due: bool) -> None:
        """After a signal, or for hosts that join: save in memory, and end the process.

        Saves on disk too after a signal, if that ``is_due``, or if the memory is full. Where ranks
        can go on in their process, only those end that have got the signal.
        """
        assert self._stop is not None, "it has received the signal"
        if self.before_leaving is not None:
            self.before_leaving()
        self._keeper.finish()
        is_in_memory = self._keeper.newest == Age(self.attempt, self.step)  # it may be full
        if self._stop.signal is not None or is_due or not is_in_memory:
            self._save(async_=False)
        if self._goes_on or self._is_repeated:
            raise RanksHaveChanged("ranks leave, or hosts join")
        # torchrun counts a process that ends by itself as failed, and the restart as one of
        # --max-restarts; one that ends after its signal is not counted. So wait for it.
        end = time.monotonic() + _OWN_SIGNAL_S
        while self._stop.signal and not self._stop.received and time.monotonic() < end:
            time.sleep(0.05)
        sys.exit(self._stop.exit_code or 1)

    def _close(self, error: BaseException | None) -> None:
        try:
            if self._is_repeated and is_loss(error):
                assert error is not None, "it is a loss"
                self._leave_world(error)
                return
            if error is not None:
                self._own.give_up(is_lost=False)
                if is_loss(error):
                    leave_saves(LAST_WORDS_S)
                return
            self._keeper.finish()
            self.end()
            finish_saves()()
            worlds.end(self._options.directory)
            if self._leads:
                self._place.delete()
        finally:
            self._counter.close()
            self._own.ring.close()
            if self._stop is not None:
                self._stop.close()
