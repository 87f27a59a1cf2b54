"""After a loss ``Trainer.train`` is called again in its process, and equals an undisturbed one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import vescale_fsdp_elastic as elastic
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate.elastic import loop as elastic_loop
from vescale_fsdp_elastic import worlds
from vescale_fsdp_elastic.losses import RanksHaveChanged

from .test_elastic import trainer

transformers = pytest.importorskip("transformers")


class Lose(transformers.TrainerCallback):
    """Raises once, in a step, or in the evaluation after it."""

    def __init__(self, place: str, step: int) -> None:
        self.place, self.step, self.begun = place, step, 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun += 1

    def point(self, place: str, state: Any) -> None:
        if (place, state.global_step, self.begun) == (self.place, self.step, 1):
            raise RanksHaveChanged("as if a rank was lost")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.point("step", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.point("end", state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.point("evaluation", state)


def train(root: Path, place: str, step: int) -> tuple[dict[str, Any], int]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VESCALE_FSDP_MEETING": str(root / "meeting"), "VESCALE_FSDP_HOSTS": "1:1",
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        patch.setattr(worlds, "_joined", worlds._Joined())
        dist.destroy_process_group()
        elastic.init_process_group("gloo")
        lose = Lose(place, step)
        found = trainer(root, None, {"dropout": 0.3, "callbacks": [lose]})
    return found, lose.begun


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "step"), [("step", 7), ("evaluation", 8), ("end", 5)])
def test_a_training_that_goes_on_is_an_undisturbed_one(
    tmp_path: Path, place: str, step: int
) -> None:
    ((quiet, _),) = run_ranks(train, 1, tmp_path / "quiet", "", 0)
    ((torn, begun),) = run_ranks(train, 1, tmp_path / "torn", place, step)
    assert begun == 2
    assert (quiet.pop("source"), torn.pop("source")) == ("start", "memory")
    assert quiet["flos"] > 0
    assert torn == quiet


class Logger(transformers.TrainerCallback):
    """As those of services: only the main process begins to log."""

    def __init__(self) -> None:
        self._initialized = True


def test_what_a_call_leaves_behind() -> None:
    """Its loaders are of the former ranks; the loggers of a new main process begin."""
    logger, ranks = Logger(), [1]
    handler = SimpleNamespace(callbacks=[logger])
    fake = SimpleNamespace(
        _eval_dataloaders={}, current_flos=5, callback_handler=handler, accelerator=None,
        is_world_process_zero=lambda: ranks[0] == 0,
    )  # fmt: skip
    elastic_loop._end(fake)
    assert (vars(fake).get("_eval_dataloaders"), fake.current_flos) == (None, 0)

    for after in (1, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic_loop, "take_world", lambda _, to=after: ranks.__setitem__(0, to))
            elastic_loop._take_world(fake)
        assert logger._initialized is (after == 1)
