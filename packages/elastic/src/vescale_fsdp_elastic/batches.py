"""The samples of each step as micro-batches, and their weights in the mean of the global batch."""

from __future__ import annotations

import atexit
import functools
import os
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vescale_fsdp import spi
from vescale_fsdp_elastic.losses import is_loss
from vescale_fsdp_elastic.order import Order, Part, parts


class Step:
    """One optimizer step: an iterator over this rank's micro-batches.

    Attributes:
        number: how many steps have been made before this one, also in earlier attempts.
        weight: of the mean loss of the current micro-batch: the gradients of ``loss * weight``,
            summed over a rank's micro-batches and averaged over the ranks as the engine does, are
            those of the mean over the global batch. 1 if there is one micro-batch a rank, of the
            same size on all ranks.
        is_last: whether the current micro-batch is the last one of this rank.
        goes_on: whether ``with step:`` takes an error that says that ranks were lost, and the loop
            goes on in this process. Otherwise, ``with step:`` does nothing.
        was_entered: whether ``with step:`` was used.
    """

    def __init__(
        self, number: int, parts: list[Part], batches: Iterator[Any], scale: float
    ) -> None:
        self.number, self.weight, self.is_last = number, 0.0, False
        self._parts, self._batches, self._scale = parts, batches, scale
        self.goes_on = self.was_entered = False
        self._taken, self._is_over = 0, False
        self._loss: Tensor | None = None
        self._error: BaseException | None = None

    @property
    def num_samples(self) -> int:
        """The number of this rank's samples in the step."""
        return sum(part.num_samples for part in self._parts)

    def __len__(self) -> int:
        """The number of micro-batches, the same on all ranks."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        if self._taken == len(self._parts):
            raise RuntimeError(
                f"the micro-batches of step {self.number} have been taken: a step has them once. "
                "Do all passes over a micro-batch in one loop"
            )
        while self._taken < len(self._parts):
            part = self._parts[self._taken]
            self._taken += 1
            self.is_last = self._taken == len(self._parts)
            self.weight = part.num_samples * self._scale
            yield next(self._batches)
        self._is_over = True

    def end(self) -> None:
        """Release the loader, and so its workers. The loop may hold the last step for ever."""
        self._batches = iter(())

    def __enter__(self) -> Step:
        self.was_entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not (self.goes_on and is_loss(error)):
            return False
        assert error is not None, "it is a loss"
        # Frames of the step hold its graph, and with it memory.
        self._error = error.with_traceback(None)
        return True

    @property
    def is_lost(self) -> bool:
        """Whether ``with step:`` has taken an error: the step was not made, and comes again."""
        return self._error is not None

    def backward(self, loss: Tensor) -> None:
        """Call it in place of ``loss.backward()``.

        Args:
            loss: the mean over the samples of the current micro-batch, a scalar.

        Raises:
            RuntimeError: it is called after the loop over the micro-batches.
        """
        self._check_current()
        weighted = loss * self.weight
        weighted.backward()
        own = weighted.detach()
        self._loss = own if self._loss is None else self._loss + own

    def mean_loss(self) -> float:
        """The mean loss of the global batch, from the losses given to `backward`. Collective.

        Cost: an all-reduce of one number, and a wait for the device.

        Raises:
            RuntimeError: `backward` was not called in this step.
        """
        total = self._check_losses().double()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return float(total)
        group = dist.group.WORLD
        assert group is not None, "it is initialized"
        total = total.clone()
        spi.all_reduce(total, group).wait()
        return float(total) / dist.get_world_size()

    def _check_current(self) -> None:
        if self._is_over and len(self._parts) > 1:
            raise RuntimeError(
                f"step {self.number}: backward() after the loop over its {len(self._parts)} "
                "micro-batches, which have weights of their own. Call it inside of the loop, "
                "`for batch in step`"
            )

    def _check_losses(self) -> Tensor:
        if self._loss is None:
            raise RuntimeError(
                f"step {self.number} has no losses: call step.backward(loss), where it was "
                "loss.backward()"
            )
        return self._loss

    def check_taken(self) -> None:
        """Raise if the loop has left micro-batches, or what ``with step:`` has taken."""
        if self._error is not None:
            raise self._error
        if self._taken < len(self._parts):
            raise RuntimeError(
                f"step {self.number} has {len(self._parts)} micro-batches on this rank, and the "
                f"loop took {self._taken}: iterate over all of them, `for batch in step`, before "
                "the next step"
            )


class Batches:
    """Loads the micro-batches of a rank, step after step.

    Args:
        data: with ``__len__`` and ``__getitem__``.
        global_batch: samples of a step, of all ranks together.
        micro_batch: the most samples that a rank takes at once. None: all of its samples.
        seed: of the shuffles; None: no shuffle.
        rank, num_ranks: of the data-parallel ranks.
        options: of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        data: Dataset[Any],
        global_batch: int,
        micro_batch: int | None,
        seed: int | None,
        rank: int,
        num_ranks: int,
        options: dict[str, Any],
    ) -> None:
        taken = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys()
        if taken:
            raise ValueError(
                f"batches() decides {', '.join(sorted(taken))} itself, from global_batch, "
                "micro_batch and seed; leave it out"
            )
        if not is_indexed(data):
            raise TypeError(
                f"batches() needs data with __len__ and __getitem__, got {type(data).__name__}; "
                "with a stream of your own, iterate over run.steps(until) and choose its samples "
                "by the number of the step"
            )
        if global_batch < 1 or (micro_batch is not None and micro_batch < 1):
            raise ValueError(
                f"global_batch is {global_batch} and micro_batch {micro_batch}; both must be at "
                "least 1"
            )
        num_samples = len(data)  # type: ignore[arg-type]
        if not num_samples:
            raise ValueError("the data has no samples")
        self.global_batch = global_batch
        self._data, self._options = data, dict(options)
        self._order = Order(num_samples, seed)
        self._micro_batch = micro_batch or -(-global_batch // num_ranks)
        self._rank, self._num_ranks = rank, num_ranks

    def steps(
        self, number: int, num_samples: int, until: int, make: Callable[..., Step] = Step
    ) -> Generator[Step, None, None]:
        """Yield the steps from ``number`` to ``until``.

        Args:
            num_samples: that earlier steps have taken.
            make: returns a step, from the arguments of `Step`.
        """

        def parts_from(step: int) -> list[Part]:
            first = num_samples + (step - number) * self.global_batch
            return parts(first, self.global_batch, self._rank, self._num_ranks, self._micro_batch)

        chosen = (
            list(self._order.indices(part.start, part.stop))
            for step in range(number, until)
            for part in parts_from(step)
        )
        options = self._options
        if options.get("num_workers"):
            options = {**options, "worker_init_fn": WorkerInit(options.get("worker_init_fn"))}
        # A generator of its own, because each new iterator of a loader draws a number.
        options.setdefault("generator", generator_of(number, self._rank))
        batches = iter(DataLoader(self._data, batch_sampler=_Once(chosen), **options))
        scale = self._num_ranks / self.global_batch
        for step in range(number, until):
            made = make(step, parts_from(step), batches, scale)
            try:
                yield made
                made.check_taken()
            finally:
                made.end()


def is_indexed(data: Any) -> bool:
    """Whether samples can be taken by their index."""
    # An IterableDataset has the __getitem__ of its base class, which raises.
    is_stream = isinstance(data, IterableDataset)
    return not is_stream and hasattr(data, "__len__") and hasattr(data, "__getitem__")


def generator_of(number: int, rank: int) -> torch.Generator:
    """The generator of a loader, from which its workers get their seeds: others on each rank."""
    return torch.Generator().manual_seed((number << 24) + rank)


class _Once:
    """An iterator that a loader takes as a sampler."""

    def __init__(self, chosen: Iterator[list[int]]) -> None:
        self._chosen = chosen

    def __iter__(self) -> Iterator[list[int]]:
        return self._chosen


class WorkerInit:
    """Initializes a worker of a loader: only the end of its rank ends it by SIGTERM.

    torchrun sends SIGTERM to all processes of a rank, which finishes its step first, and needs the
    worker for it. At its end the rank itself ends workers that are left, and waits for them.

    The signal is handled, not blocked or ignored, because processes that the data starts would
    inherit that.
    """

    def __init__(self, given: Callable[[int], Any] | None) -> None:
        self._given, self._has_ended = given, _has_ended()

    def __call__(self, number: int) -> None:
        has_ended = self._has_ended

        def end(_signal: int, _frame: object) -> None:
            if has_ended.item():
                os._exit(0)  # else the loader reports a worker that has failed

        signal.signal(signal.SIGTERM, end)
        if self._given is not None:
            self._given(number)


@functools.cache
def _has_ended() -> Tensor:
    """Whether this process ends, in memory that it shares with its workers."""
    flag: Tensor = torch.zeros(1, dtype=torch.bool).share_memory_()
    atexit.register(flag.fill_, True)  # is called before multiprocessing ends the workers
    return flag
