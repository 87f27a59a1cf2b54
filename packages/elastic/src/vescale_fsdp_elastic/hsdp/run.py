"""`replicas`: the context around the loop of one replica."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from vescale_fsdp.spi import Optimizers, Stateful, seed_for
from vescale_fsdp_elastic import memory
from vescale_fsdp_elastic.batches import Batches, Step
from vescale_fsdp_elastic.hsdp.board import Board
from vescale_fsdp_elastic.hsdp.catching_up import State
from vescale_fsdp_elastic.hsdp.exchange import Exchange
from vescale_fsdp_elastic.hsdp.gradients import Gradients
from vescale_fsdp_elastic.hsdp.inside import Inside
from vescale_fsdp_elastic.hsdp.links import Links
from vescale_fsdp_elastic.hsdp.meeting import Life, Meeting
from vescale_fsdp_elastic.hsdp.pulse import Pulse
from vescale_fsdp_elastic.hsdp.quorum import Age, Member
from vescale_fsdp_elastic.run import Run
from vescale_fsdp_elastic.training import training

_log = logging.getLogger(__name__)
_KEY = "quorum"  # in what a run saves


@contextmanager
def replicas(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    replica: int,
    num_replicas: int,
    stateful: Mapping[str, Stateful] | None = None,
    timeout_s: float = 10.0,
    stall_s: float = 600.0,
    wait_s: float = 60.0,
    memory_directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Iterator[ReplicaRun]:
    """Train one of several replicas of a sharded model, each of which may die alone.

    ::

        with elastic.replicas("runs/a", model, optimizer, replica=1, num_replicas=2) as run:
            for step in run.batches(data, global_batch=64, micro_batch=8, until=10_000):
                for inputs, targets in step:
                    step.backward(loss_of(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    Collective in the replica. Each replica is a job of its own, with its own ``torchrun`` and
    default group. The model is sharded over the ranks of the replica. At the end of a step's last
    micro-batch, rank i of each replica sums its gradient shards with rank i of the others.

    When a replica is lost, the others repeat the sum without it, and go on. Each replica keeps its
    share of the samples: those of a lost one are left out, and the gradient is the mean over the
    samples of those that are there. When it is started again, it gets parameters, optimizer states
    and all that is saved from another replica's memory between two steps. Replicas that take part
    have the same bits in all of these. Buffers of a model that forwards change, such as those of
    BatchNorm, are each replica's own, and so are random numbers.

    It contains `training` for the ranks of this replica, with ``directory / "replica-1"``: that
    state counts if all replicas were lost. Then the one of the newest quorum and step wins.

    Args:
        directory: of the run, on a file system that all replicas share.
        model: sharded, in the same way in each replica, on the same number of ranks.
        optimizer, stateful, memory_directory: as for `training`.
        replica: the number of this one, from 0.
        num_replicas: how many there are if none is lost.
        timeout_s: a replica counts as lost if one of its ranks shows no life for so long. If a
            process dies and another rank of its replica lives, this is noticed at once.
        stall_s: a replica whose ranks live, but which others have to wait for for so long, counts
            as lost too.
        wait_s: at the start, how long to wait for all replicas before those that are here begin;
            ten times as long if none of them was in the last quorum.
        options: of `training`. Its ``replicas`` (copies on other hosts of this replica) is 0 here.

    Cost: two buffers of a rank's gradient shards in host memory. Each step sends and receives about
    2 (n - 1) / n times the gradient shard on each rank, with n replicas; one small message in the
    replica. A replica that joins costs the others a step's pause in which it gets and loads the
    state; the donor has a rank's part once more in host memory.

    Raises:
        RankMismatchError: the model is sharded in another way than that of the others. In the loop:
            a rank of this replica has died, the others have gone on without this replica, they
            train other parameters or with another global batch, or it was started twice.
        ConnectionError: other replicas see the same folder, and cannot be connected to.
        ValueError: a number is out of range.
    """
    if not 0 <= replica < num_replicas:
        raise ValueError(f"replica is {replica}, expected 0 to {num_replicas - 1} (num_replicas-1)")
    if timeout_s <= 0 or stall_s < timeout_s:
        raise ValueError(
            f"timeout_s is {timeout_s} and stall_s {stall_s}; expected 0 < timeout_s <= stall_s"
        )
    own = Path(directory) / f"replica-{replica}"
    others = dict(stateful or {})
    options.setdefault("replicas", 0)  # the other replicas have copies
    with training(
        own, model, optimizer, stateful=others, memory_directory=memory_directory, **options
    ) as run:
        root = Path(memory_directory) if memory_directory else memory.default_root()
        folder = Path(directory) / "replicas"
        received = folder / f"received-{replica}"
        state = State(model, optimizer, others, run.memory_folder / "sent", received, root)
        made = ReplicaRun(
            run,
            Board(folder),
            state,
            replica,
            num_replicas,
            timeouts=(timeout_s, stall_s, wait_s),
        )
        try:
            made._join()
            yield made
        finally:
            made._leave()


class ReplicaRun:
    """A training of one replica under way: what `replicas` returns.

    Attributes:
        member: the number of the replica, and of its start.
    """

    def __init__(
        self,
        run: Run,
        board: Board,
        state: State,
        replica: int,
        num_replicas: int,
        timeouts: tuple[float, float, float],
    ) -> None:
        self._run, self._board, self._num_replicas = run, board, num_replicas
        self._inside = inside = Inside()
        gradients = Gradients(state.model)
        self.member = self._register(replica, gradients)
        timeout_s, stall_s, wait_s = timeouts
        first = inside.ranks.is_first
        life = Life(board, time, timeout_s, None if first else inside.rank)
        meeting = Meeting(
            board, time, life, stall_s=stall_s, num_replicas=num_replicas, wait_s=wait_s,
            is_stopped=lambda: run.has_signal,
        )  # fmt: skip
        beat_s = min(1.0, timeout_s / 5)
        self._pulse = Pulse(board, life, self.member, inside.rank, beat_s, looks=first)
        self._links = Links(
            board, self.member, inside, life, meeting, self._pulse, gradients, state,
            self._extra, self._take, num_replicas=num_replicas, timeout_s=timeout_s,
            stall_s=stall_s,
        )  # fmt: skip
        self._source = ""
        run.before_leaving = self._say_gone  # the others do not wait until the state is saved
        age = Age(int(run.marks.get(_KEY, 0)), run.step)
        self._exchange = Exchange(self._links, self.member, age)

    @property
    def step(self) -> int:
        """The number of steps made."""
        return self._run.step

    @property
    def source(self) -> str:
        """Where the state is from: "replica", or as for `training`."""
        return self._source or self._run.source

    @property
    def extra(self) -> dict[str, Any]:
        """Values of yours that are saved, and sent to replicas that join."""
        return self._run.extra

    @property
    def present(self) -> tuple[int, ...]:
        """The numbers of the replicas that took part in the last step, or begin the first."""
        quorum = self._exchange.quorum
        return tuple(each.replica for each in quorum.members) if quorum else ()

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
        """Yield the steps that are left, each with this rank's micro-batches. As `Run.batches`.

        Args:
            global_batch: samples of a step in which all replicas take part.
        """
        place = self.member.replica * self._inside.size + self._inside.rank
        num_ranks = self._num_replicas * self._inside.size
        batches = Batches(data, global_batch, micro_batch, seed, place, num_ranks, options)
        run, make = self._run, functools.partial(ReplicaStep, self._reduce, global_batch)
        run.check_batches(data, global_batch, micro_batch, seed)
        number, loop = self._first(until)
        for step in batches.steps(number, run.samples_before(global_batch), until, make):
            run.begin_step(global_batch, step)
            yield step
            run.check_loop(loop)
            step.check_taken()
            self._made(until, global_batch)
        self._finish(until)

    def steps(self, until: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left, for data of your own.

        Call `reduce_gradients` after the last backward of each.
        """
        first, loop = self._first(until)
        for number in range(first, until):
            self._run.begin_step(0)
            yield number
            self._run.check_loop(loop)
            self._made(until, 0)
        self._finish(until)

    def reduce_gradients(self) -> None:
        """Average the gradients over the replicas that are there. For `steps`.

        Collective. Call it after the last backward, before gradients are clipped.
        """
        self._reduce(1, 0.0, self._num_replicas * self._inside.size)

    def _reduce(self, samples: int, loss: float, nominal: int) -> float:
        """Make the exchange of this step. Returns the mean loss over all samples."""
        if self._exchange.step != self._run.step:
            raise RuntimeError(
                f"the gradients of step {self._run.step} have been averaged over the replicas "
                "already: do it once a step"
            )
        if self._has_stepped():
            raise RuntimeError(
                f"an optimizer has made a step before the gradients of step {self._run.step} were "
                "averaged over the replicas, so these would differ: call optimizer.step() after "
                "the loop over the micro-batches (`for batch in step`); with run.steps, after "
                "run.reduce_gradients()"
            )
        links = self._links
        links.samples, links.loss, links.nominal = samples, loss, nominal
        before = self._exchange.quorum
        self._exchange.reduce()
        self._run.marks[_KEY] = self._exchange.age.quorum
        if self._exchange.quorum is not before:
            self._log()
        return links.mean_loss

    def _has_stepped(self) -> bool:
        left = self._run._left
        return left is not None and left.counts != self._run._counter.counts

    def _made(self, until: int, num_samples: int) -> None:
        if self._exchange.step != self._run.step + 1:
            raise RuntimeError(
                f"step {self._run.step} was made without the gradients of the other replicas: "
                "iterate over all of its micro-batches, or call run.reduce_gradients() before "
                "optimizer.step()"
            )
        if self._exchange.step == until:
            self._exchange.finish()
        self._run.made(num_samples, is_last=self._run.step + 1 >= until)
        # One that joins has no gradients, and would take its share of those that wait.
        if self._links.is_wished and self._run.step < until and not self._run.has_open_gradients:
            self._exchange.admit()
            self._log()

    def _first(self, until: int) -> tuple[int, object]:
        """The first step that is left, and a token for the loop."""
        loop = self._run.begin_loop(functools.partial(self._made, until))
        if self._run.step < until <= self._finished():
            _log.warning(
                "the other replicas have ended with step %d while replica %d was away; its own "
                "weights are those of step %d", self._finished(), self.member.replica, self.step,
            )  # fmt: skip
            return until, loop
        return self._run.step, loop

    def _finished(self) -> int:
        finished: int = self._inside.ranks.from_first("the end", lambda: self._board.finished)
        return finished

    def _finish(self, until: int) -> None:
        if self._run.step >= until and self._inside.ranks.is_first:
            self._board.finished = max(self._run.step, self._board.finished)

    def _register(self, replica: int, gradients: Gradients) -> Member:
        """Get a number for this start of the replica. Collective."""

        def register(digests: list[Any]) -> list[Any]:
            about = {
                "ranks": len(digests), "shards": digests, "num_replicas": self._num_replicas
            }  # fmt: skip
            return [list(self._board.register(replica, about))] * len(digests)

        what = "the registration of a replica"
        return Member(*self._inside.ranks.together(what, lambda: gradients.digest, register))

    def _join(self) -> None:
        self._exchange.join()
        self._log()

    def _log(self) -> None:
        quorum = self._exchange.quorum
        if quorum is not None and self._inside.ranks.is_first:
            _log.info(
                "replica %d: from step %d on, %d of %d replicas take part (%s)",
                self.member.replica, self._exchange.step, len(quorum.members), self._num_replicas,
                ", ".join(str(each.replica) for each in quorum.members),
            )  # fmt: skip

    def _extra(self) -> dict[str, Any]:
        return self._run._state()

    def _take(self, extra: dict[str, Any]) -> None:
        """Continue from the state of another replica, which has been loaded."""
        own, own_quorum = self._run.step, self._run.marks.get(_KEY, 0)
        self._run.take(extra)
        if own > self._run.step and self._inside.ranks.is_first:
            _log.warning(
                "replica %d had a state of step %d (made in quorum %d), and now has that of step "
                "%d of another replica, which has begun without it (quorum %d)",
                self.member.replica, own, own_quorum, self._run.step,
                self._run.marks.get(_KEY, 0),
            )  # fmt: skip
        self._source = "replica"
        # Numbers that it has drawn before must not come again.
        place = f"{self.member.replica} {self._inside.rank} {self._run.step}"
        self._run.random_at_first_step = seed_for(f"replica {place}")

    def _leave(self) -> None:
        self._pulse.stop()
        self._say_gone()
        self._links.close()

    def _say_gone(self) -> None:
        try:
            self._board.leave(self.member)
        except OSError as error:  # it must not hide the error that ends the loop
            _log.warning("the folder of the replicas cannot be used: %s", error)


class ReplicaStep(Step):
    """A step whose gradients are averaged over the replicas after its last micro-batch."""

    def __init__(
        self, reduce: Callable[[int, float, int], float], global_batch: int, *args: Any
    ) -> None:
        super().__init__(*args)
        self._reduce, self._global_batch = reduce, global_batch
        self._mean: float | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if self._mean is None:
            loss = 0.0 if self._loss is None else float(self._loss)
            self._mean = self._reduce(self.num_samples, loss, self._global_batch)

    def _check_current(self) -> None:
        super()._check_current()
        if self._mean is not None:
            raise RuntimeError(
                f"step {self.number}: backward() after the loop over its micro-batches, at whose "
                "end the gradients were averaged over the replicas. Call it inside of the loop, "
                "`for batch in step`"
            )

    def mean_loss(self) -> float:
        """The mean loss over the samples of all replicas that took part. No communication."""
        self._check_losses()
        if self._mean is None:
            raise RuntimeError("mean_loss() is known after the loop over the micro-batches")
        return self._mean


__all__ = ["ReplicaRun", "ReplicaStep", "replicas"]
