"""Training that goes on when ranks come and go: loaded only if a strategy gets ``elastic=``.

* `held`: what the strategy holds, and passes the Trainer's calls on to
* `fit`: the training of one ``Trainer.fit``; its `loader`, and Lightning's counters (`progress`)
"""

from vescale_fsdp_lightning.elastic.held import Elastic

__all__ = ["Elastic"]
