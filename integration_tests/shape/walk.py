"""What one rank runs of ours in the forward of a unit, and in a whole step.

Run as a program it prints, as JSON, the calls of our functions by file. Four linear units in a
root, AdamW; the steps before have recorded the order.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

# Python 3.12 has no calls for these any more.
_IN_PLACE = ("<listcomp>", "<dictcomp>", "<setcomp>")


def calls_by_file(work: Callable[[], object], package: Path) -> Counter[str]:
    """How often ``work`` calls Python functions that are defined in files of a package."""
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and code.co_name not in _IN_PLACE and path.is_relative_to(package):
            calls[path.relative_to(package).as_posix()] += 1

    former = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(former)
    return calls


def measured() -> dict[str, Counter[str]]:
    """The calls in the forward of an inner unit, and in a step of all five."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import vescale_fsdp

    package = Path(vescale_fsdp.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        for layer in model:
            vescale_fsdp.fully_shard(layer)
        vescale_fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        inputs = torch.ones(2, 8)

        def step() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        whole = calls_by_file(step, package)
        forward: Counter[str] = Counter()
        inner, kind = model[1], type(model[1])

        def call(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            outputs: list[torch.Tensor] = []
            called = super(kind, self).__call__
            forward.update(calls_by_file(lambda: outputs.append(called(x)), package))
            return outputs[0]

        # A module is called by its class; the hooks around forward run in that call.
        inner.__class__ = type(kind.__name__, (kind,), {"__call__": call})
        model(inputs).sum().backward()
        dist.destroy_process_group()
    return {"forward_of_a_unit": forward, "step_of_five_units": whole}


if __name__ == "__main__":
    print(json.dumps(measured()))
