"""Trains with DeepSpeed under torchrun, saves, and goes on.

    torchrun ... save.py FOLDER STAGE [bf16]

Rank 0 writes ``losses.json``: those of the steps after the checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from model import batch, groups_of, loss_of, make_model

STEPS, MORE = 3, 3


def main() -> None:
    folder, stage, is_bf16 = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # it is 1.0 otherwise
        "bf16": {"enabled": is_bf16},
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            engine.save_checkpoint(str(folder), client_state={"epoch": 3, "name": "a run"})
        loss = loss_of(engine, batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses[STEPS:]))
    dist.barrier()


if __name__ == "__main__":
    main()
