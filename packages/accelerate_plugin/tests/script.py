"""A script that knows nothing of veScale-FSDP."""

import json
import sys

import torch
from accelerate import Accelerator  # before torch: the hook then runs in the middle of it

accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(1, 4)).sum())
optimizer.step()
plugin = accelerator.state.fsdp_plugin
report = {
    "accelerator": type(accelerator).__name__,
    "engine": next(c.__module__ for c in type(model).__mro__ if c.__name__ == "FSDPModule"),
    "parameter": type(next(model.parameters())).__name__,
    "processes": accelerator.num_processes,
    "device": accelerator.device.type,
    "granularity": plugin.granularity,
    "arguments": sys.argv[1:],
}
sys.stdout.write(f"REPORT {json.dumps(report)}\n")
sys.stdout.flush()
accelerator.end_training()
