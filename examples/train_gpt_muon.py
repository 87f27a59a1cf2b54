"""The same training with Muon: one line makes the optimizer, in plain PyTorch and in Lightning.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt_muon.py
    python examples/train_gpt_muon.py --lightning

Muon takes the matrices of hidden layers, AdamW what is left: embeddings, norms and the head. All
else is in train_gpt.py and train_gpt_lightning.py beside this file, and the options are theirs.
"""

import sys

import train_gpt
from torch import nn
from torch.optim import AdamW

from vescale_fsdp.optim import Muon, OptimizerGroup, split_named_params


def muon_and_adamw(model: nn.Module, lr: float) -> OptimizerGroup:
    """Two optimizers as one, for a model that may be sharded: matrices may be cut anywhere."""
    hidden, rest = split_named_params(model)
    return OptimizerGroup(
        # Steps as long as AdamW's, so that the learning rate is right for both.
        muon=Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"),
        adamw=AdamW(rest, lr=lr, betas=(0.9, 0.95), foreach=True),
    )


def train_plain(arguments: list[str]) -> None:
    """As train_gpt.py, under torchrun."""
    # The one line. There it is: AdamW(model.parameters(), lr=0.0, ...).
    train_gpt.main(arguments, lambda model: muon_and_adamw(model, lr=0.0))


def train_lightning(arguments: list[str]) -> None:
    """As train_gpt_lightning.py, which starts the processes itself."""
    import train_gpt_lightning

    class Module(train_gpt_lightning.GPTModule):
        def make_optimizer(self) -> OptimizerGroup:
            # The one line. There it is: torch.optim.AdamW(self.parameters(), ...).
            return muon_and_adamw(self, lr=self.learning_rate)

    train_gpt_lightning.main(arguments, Module)


if __name__ == "__main__":
    given = sys.argv[1:]
    if "--lightning" in given:
        train_lightning([argument for argument in given if argument != "--lightning"])
    else:
        train_plain(given)
