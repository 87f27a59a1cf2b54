"""The same training with Muon: one line makes the optimizer, in plain PyTorch and in Lightning.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt_muon.py
    python examples/train_gpt_muon.py --lightning

Muon trains the matrices of hidden layers, AdamW all other parameters: embeddings, norms and the
head. Everything else, also the options, is in train_gpt.py and train_gpt_lightning.py.
"""

import sys

import train_gpt
from torch import nn
from torch.optim import AdamW

from vescale_fsdp.optim import Muon, OptimizerGroup, split_named_params


def muon_and_adamw(model: nn.Module, lr: float) -> OptimizerGroup:
    """Return two optimizers as one. The model may be sharded, with matrices split anywhere."""
    hidden, rest = split_named_params(model)
    return OptimizerGroup(
        # Steps have the length of AdamW's, so one learning rate fits both.
        muon=Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"),
        adamw=AdamW(rest, lr=lr, betas=(0.9, 0.95), foreach=True),
    )


def train_plain(arguments: list[str]) -> None:
    """Train as train_gpt.py does, with torchrun."""
    # Only this line differs from train_gpt.py, which has AdamW(model.parameters(), lr=0.0, ...).
    train_gpt.main(arguments, lambda model: muon_and_adamw(model, lr=0.0))


def train_lightning(arguments: list[str]) -> None:
    """Train as train_gpt_lightning.py does. Lightning starts the processes."""
    import train_gpt_lightning

    class Module(train_gpt_lightning.GPTModule):
        def make_optimizer(self) -> OptimizerGroup:
            # Only this line differs: there it is torch.optim.AdamW(self.parameters(), ...).
            return muon_and_adamw(self, lr=self.learning_rate)

    train_gpt_lightning.main(arguments, Module)


if __name__ == "__main__":
    given = sys.argv[1:]
    if "--lightning" in given:
        train_lightning([argument for argument in given if argument != "--lightning"])
    else:
        train_plain(given)
