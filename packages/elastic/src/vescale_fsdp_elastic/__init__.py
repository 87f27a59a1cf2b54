"""Training that goes on when ranks come and go, from copies in the memory of other hosts.

::

    elastic.init_process_group("gloo")
    ...
    with elastic.training("runs/a", model, optimizer, every=10, replicas=1) as run:
        for step in run.batches(data, global_batch=64, micro_batch=8, until=10_000):
            for inputs, targets in step:
                step.backward(loss_of(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

torchrun restarts the processes; this package gives them the state. The files, from the bottom up:

* `order`: the samples of a step, for any number of ranks; `batches` loads them, and `loaders` for
  loops that others drive, with `settings`
* `choice`: which state is the newest that is whole, and who sends what; no messages
* `needed`: the files that a rank reads
* `attempts`: their numbers, and the end of one that others have replaced
* `liveness`: a ring of connections, by which a host that is gone without a word is noticed;
  `sockets`: connections beside those of communicators
* `memory`: the folder of a host; `copies`: files from rank to rank
* `keeping` makes memory checkpoints in the background; `restoring` finds and loads the newest
* `meeting`: ranks find each other in a folder; `worlds` makes the process group, in a limited time
  (`connecting`); `regroup` goes on in the same process, `repeating` in a loop of others
* `beginning` of an attempt; `leaving`: where a loop was left early, before a restart
* `run`: the steps that are left, and the saves between them; `training`: the context around them
* `hsdp`: several replicas of a sharded model, of which each may fail alone; `replicas`
"""

from vescale_fsdp_elastic.batches import Step
from vescale_fsdp_elastic.hsdp import ReplicaRun, replicas
from vescale_fsdp_elastic.keeping import Kept
from vescale_fsdp_elastic.loaders import MicroBatches, StepLoader
from vescale_fsdp_elastic.order import Order
from vescale_fsdp_elastic.repeating import repeat
from vescale_fsdp_elastic.run import Run
from vescale_fsdp_elastic.settings import ElasticOptions
from vescale_fsdp_elastic.training import training
from vescale_fsdp_elastic.worlds import init_process_group, is_apart

__all__ = [
    "ElasticOptions", "Kept", "MicroBatches", "Order", "ReplicaRun", "Run", "Step", "StepLoader",
    "init_process_group", "is_apart", "repeat", "replicas", "training",
]  # fmt: skip
