"""A DataLoader for loops that take one micro-batch after the other and count epochs.

The samples are those of `Run.batches`: a function of the number of the step. An epoch has as many
whole steps as fit into the data, so that its number of steps does not depend on the number of
ranks. Example: 100 samples, 12 a step, at most 3 in a micro-batch::

    4 ranks   8 steps an epoch, 1 micro-batch each:    8 batches of the loader on each rank
    3 ranks   8 steps an epoch, 2 micro-batches each: 16 batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from vescale_fsdp_elastic.batches import WorkerInit, generator_of, is_indexed
from vescale_fsdp_elastic.order import Order, num_micro_batches, parts

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


class MicroBatches:
    """A batch sampler: the indices of a rank's micro-batches, step after step.

    Args:
        order: of the samples.
        global_batch: samples of a step, of all ranks together.
        micro_batch: the most samples that a rank takes at once.
        rank, num_ranks: of the data-parallel ranks.
        next_step: returns the number of the step with which an iteration begins.

    Attributes:
        num_steps: of an epoch, the same for any number of ranks.
        num_each: micro-batches of a rank in a step, the same on all ranks.
    """

    def __init__(
        self,
        order: Order,
        global_batch: int,
        micro_batch: int,
        rank: int,
        num_ranks: int,
        next_step: Callable[[], int],
    ) -> None:
        self.order, self.global_batch = order, global_batch
        self.num_steps = max(order.num_samples // global_batch, 1)
        self.num_each = num_micro_batches(global_batch, num_ranks, micro_batch)
        self._arguments = (global_batch, rank, num_ranks, micro_batch)
        self._next_step = next_step

    def __len__(self) -> int:
        return self.num_steps * self.num_each

    def __iter__(self) -> Iterator[list[int]]:
        first = self._next_step()
        for step in range(first, first + self.num_steps):
            for part in parts(step * self.global_batch, *self._arguments):
                yield list(self.order.indices(part.start, part.stop))

    def weights(self) -> list[float]:
        """Return the factor of each micro-batch's mean loss in a step.

        The gradients of these losses, averaged over a rank's micro-batches and over the ranks, are
        those of the mean over the global batch. All are 1 if all micro-batches have the same size.
        """
        global_batch, _, num_ranks, _ = self._arguments
        return [
            part.num_samples * num_ranks * self.num_each / global_batch
            for part in parts(0, *self._arguments)
        ]


class StepLoader(DataLoader[Any]):
    """Loads what `MicroBatches` chooses. Make it with `like`.

    It has no state: where it begins is decided by the number of steps made.
    """

    micro_batches: MicroBatches

    @classmethod
    def like(
        cls,
        loader: Any,
        global_batch: int,
        rank: int,
        num_ranks: int,
        next_step: Callable[[], int],
        *,
        micro_batch: int | None = None,
        default_seed: int = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        accepted: tuple[type, ...] = (),
    ) -> StepLoader:
        """Return a loader with the data and the options of another one.

        Args:
            loader: its sampler says whether samples are shuffled.
            micro_batch: the most samples that a rank takes at once. None: its ``batch_size``.
            default_seed: of the shuffles, if the sampler has none.
            worker_init_fn: if the loader has none.
            accepted: classes of loaders that are as good as a ``DataLoader``.

        Raises:
            TypeError: it is not a plain ``DataLoader``, has no data with ``__len__`` and
                ``__getitem__``, or a sampler or batch sampler of the user.
        """
        seed = _seed_of(loader, default_seed, (DataLoader, cls, *accepted))
        order = Order(len(loader.dataset), seed)
        batches = MicroBatches(
            order, global_batch, micro_batch or loader.batch_size, rank, num_ranks, next_step
        )
        options = {name: getattr(loader, name) for name in _KEPT}
        if loader.num_workers:
            options["worker_init_fn"] = WorkerInit(loader.worker_init_fn or worker_init_fn)
        # A generator of its own, because each new iterator of a loader draws a number.
        options["generator"] = generator_of(seed or 0, rank)
        made = cls(loader.dataset, batch_sampler=batches, **options)
        made.micro_batches = batches
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state. Loops that look for it then know that this loader resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def _seed_of(loader: Any, default: int, accepted: tuple[type, ...]) -> int | None:
    """Return the seed of the shuffles, None without shuffles. Raises for what cannot be divided."""
    kind, data = type(loader), getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # of one that divides it among ranks
    sampler = getattr(batches, "sampler", None)
    found = None
    if kind not in accepted:
        found = f"a {kind.__module__}.{kind.__qualname__}"
    elif not is_indexed(data):
        found = f"a loader of a {type(data).__name__}"
    elif type(batches) is not BatchSampler and not isinstance(batches, MicroBatches):
        found = f"a loader with the batch sampler {type(batches).__name__}"
    elif isinstance(batches, MicroBatches):
        return batches.order.seed
    elif isinstance(sampler, DistributedSampler):
        return sampler.seed if sampler.shuffle else None
    elif isinstance(sampler, RandomSampler) and not sampler.replacement:
        return default
    elif isinstance(sampler, SequentialSampler):
        return None
    else:
        found = f"a loader with a {type(sampler).__name__}"
    raise TypeError(
        f"elastic training divides the samples of each step among the ranks that are there, and "
        f"got {found}; pass a torch.utils.data.DataLoader with batch_size and shuffle, of data "
        "with __len__ and __getitem__"
    )
