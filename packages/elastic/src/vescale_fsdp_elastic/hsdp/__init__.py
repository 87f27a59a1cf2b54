"""Replicas of a sharded model that fail alone: the others make their step without them.

The files, from the bottom up:

* `quorum`: who takes part, and the rule by which that changes; no messages
* `board`: the shared folder; `meeting`: how all find the same quorum through it
* `exchange`: a step's sum of gradients, repeated until all that live have it
* `inside`: agreements of the ranks of a replica; `lanes`: messages between replicas
* `gradients`: the gradient shards as one buffer; `catching_up`: the state for one that joins
* `pulse`: the thread that shows that a rank lives
* `links`: all of these, for the exchange; `run`: the context around the loop
"""

from vescale_fsdp_elastic.hsdp.run import ReplicaRun, replicas

__all__ = ["ReplicaRun", "replicas"]
