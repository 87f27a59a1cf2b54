"""`training`: the context around a loop that goes on after ranks have come or gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from vescale_fsdp.spi import Optimizers, Stateful, check_reduced, check_remesh
from vescale_fsdp_elastic import memory, repeating, worlds
from vescale_fsdp_elastic.beginning import Options, begin
from vescale_fsdp_elastic.losses import is_loss
from vescale_fsdp_elastic.meeting import MEETING
from vescale_fsdp_elastic.regroup import regroup
from vescale_fsdp_elastic.run import Run


@contextmanager
def training(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    stateful: Mapping[str, Stateful] | None = None,
    every: int = 10,
    replicas: int = 1,
    every_on_disk: int | None = 1000,
    keep_last: int = 2,
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
    after_regroup: Callable[[], None] | None = None,
    memory_directory: str | os.PathLike[str] | None = None,
    reduced_by_hand: bool = False,
) -> Iterator[Run]:
    """Restore the newest state, keep copies of it while training, and resume after a restart.

    ::

        with elastic.training("runs/a", model, optimizer, every=10) as run:
            for step in run.batches(data, global_batch=64, micro_batch=8, until=10_000):
                for inputs, targets in step:
                    step.backward(loss_of(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    Collective: enter it on every rank, after ``init_process_group``, with the model sharded and the
    optimizer made. When it is entered, model and optimizer get the newest state that is whole, from
    the memory of the hosts or from disk, whichever is newer; the log says which, and why. When it
    is left without an error, the state is on disk, and the memory is deleted.

    Ranks that read and write the same memory folder are one host. A memory checkpoint is complete
    with the hosts that are there if each of its files is on one of them. So it survives the loss of
    any ``replicas`` hosts, and of any number of processes.

    Args:
        directory: of the run on disk, on a file system that all ranks share. A new folder is a new
            run. Checkpoints of yours in it are left alone.
        model: sharded.
        optimizer: one, or a mapping of names to several.
        stateful: schedulers and others by name, as for `vescale_fsdp.checkpoint.save`. Modules in
            it may be sharded, such as a moving average of the model.
        every: steps between memory checkpoints. After a loss at most so many steps are repeated;
            twice as many if not all ranks have confirmed the last one.
        replicas: number of other hosts that get a copy of each rank's part. With fewer other hosts,
            each of them gets one.
        every_on_disk: steps between checkpoints on disk. None: only at the end, and after a signal.
        keep_last: checkpoints on disk that are kept, at least 2.
        signals: after one of these to any rank, all ranks finish the step, save in memory and on
            disk, and exit. Empty: signals are not handled.
        after_regroup: called when this process has met others in a new world, and has the state:
            for what depends on the rank or the number of ranks.
        memory_directory: by default ``VESCALE_FSDP_MEMORY_DIR``, or a folder of this user in
            ``/dev/shm``.
        reduced_by_hand: as for `vescale_fsdp.checkpoint.save`.

    Cost: in host memory (1 + replicas) times a rank's part (parameters, optimizer states and small
    ones), twice; while one is made, once more the part itself. After a restart from memory a host
    has the files that its ranks read (those that overlap their shards, and that of rank 0), until
    the second memory checkpoint from there. Each memory checkpoint sends ``replicas`` times a
    rank's part, and ten small messages a rank to and from rank 0, in the background. The training
    waits for a copy of the part in host memory.

    Raises:
        CheckpointMismatchError: the newest state belongs to another model or optimizer.
        CheckpointCorruptError: the memory has no whole state, and that on disk is damaged.
        CheckpointWriteError: a folder cannot be made; or a state is whole on other hosts, a host
            has no room for what it needs of it, and there is none on disk.
        NotImplementedError: ranks meet (``VESCALE_FSDP_MEETING``), and a model cannot move.
        RankMismatchError: ranks see different folders. In the loop: a later attempt of this run has
            begun elsewhere (see `attempts`), or another rank has died.
        ValueError: the model contains units, and has trainable parameters that nothing reduces.
    """
    if not reduced_by_hand:
        check_reduced(model, "elastic.training")
    options = Options(
        Path(directory), model, optimizer, dict(stateful or {}),
        every, replicas, every_on_disk, keep_last, signals,
        Path(memory_directory) if memory_directory else memory.default_root(),
        after_regroup or (lambda: None),
    )  # fmt: skip
    worlds.check_joined()
    _check_can_go_on(options.modules)
    repetition = repeating.current()
    is_again = repetition is not None and repetition.number > 0
    joins = worlds.begin(options.directory, is_again=is_again)
    try:
        if repetition is not None:
            run = repetition.run(options, joins=joins)
        else:
            run = Run(options, regroup(options, "joins") if joins else begin(options))
        try:
            if joins or is_again:
                options.after_regroup()
            yield run
        except BaseException as error:
            run._close(error)
            raise
        run._close(None)
        if repetition is not None:
            repetition.finish()
    except BaseException as error:
        if repetition is None or not is_loss(error):
            worlds.end()  # this process ends: others must neither wait for it nor believe it lives
        raise


def _check_can_go_on(modules: Sequence[nn.Module]) -> None:
    """Raise if ranks meet, and a module cannot move to other ranks: no host could join."""
    if worlds.current() is None:
        return
    try:
        for module in modules:
            check_remesh(module)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{error}: leave {MEETING} out, and start with torchrun's rendezvous"
        ) from error
