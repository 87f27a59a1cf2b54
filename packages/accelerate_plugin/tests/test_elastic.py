"""Elastic training: ranks come and go, and each step is that of a quiet run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker, on_main_process
from torch import nn
from torch.utils.data import Dataset

import vescale_fsdp_accelerate
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator
from vescale_fsdp_accelerate.options import Options, to_environment
from vescale_fsdp_elastic import leaving

from .helpers import accelerator

transformers = pytest.importorskip("transformers")

GLOBAL_BATCH, NUM_SAMPLES, WIDTH, UNTIL = 11, 64, 6, 12  # micro-batches of 1 to 3
Losses = dict[int, float]


class Stop(Exception):
    """What ends an attempt."""


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int = NUM_SAMPLES) -> None:
        self.x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sin().sum().reshape(1)}


class Net(nn.Module):
    """Returns a mean over the batch, as models do that know nothing of the Trainer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)),
            nn.Dropout(dropout),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.layers(x)
        return nn.functional.mse_loss(found, labels), found

    main_input_name = "x"

    def num_parameters(self, **_: Any) -> int:
        """For the floating-point operations that the Trainer counts."""
        return 1


class Counting(Net):
    """Returns a sum over the batch, divided by the items of the step, as language models do."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, labels: torch.Tensor, **counts: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, found = super().forward(x, labels)
        return loss * len(x) / counts.get("num_items_in_batch", len(x)), found


def make(dropout: float, cls: type[Net] = Net) -> Net:
    logging.getLogger("vescale_fsdp").setLevel(logging.ERROR)
    torch.manual_seed(0)
    return cls(dropout)


def memory(root: Path, ranks_per_host: int) -> str:
    return str(root / f"host{dist.get_rank() // ranks_per_host}")


Found = dict[str, Any]


def loop(root: Path, stop_at: int | None, options: dict[str, Any]) -> Found:
    """A loop of Accelerate with a prepared optimizer and a prepared schedule."""
    dropout, global_batch = options.get("dropout", 0.0), options.get("global_batch", GLOBAL_BATCH)
    losses: Losses = {}
    rates: Losses = {}
    with accelerator() as made:
        if options.get("scale"):  # as with mixed_precision="fp16", which is for GPUs
            made.scaler = torch.amp.GradScaler("cpu", init_scale=options["scale"])
        model = make(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
        model, optimizer, schedule = made.prepare(model, optimizer, schedule)
        elastic = made.elastic_training(
            root / "run",
            every=2,
            every_on_disk=None,
            signals=(),
            memory_directory=memory(root, options.get("ranks_per_host", 2)),
        )
        try:
            with elastic as run:
                for step in run.batches(
                    Numbers(), global_batch=global_batch, micro_batch=3, until=UNTIL
                ):
                    if step.number == stop_at:
                        run._keeper.finish()
                        raise Stop
                    for batch in step:
                        loss, _ = model(**batch)
                        step.backward(loss)
                    losses[step.number] = step.mean_loss()
                    rates[step.number] = optimizer.param_groups[0]["lr"]
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        except Stop:
            pass
    return {"losses": losses, "rates": rates, "source": run.source}


class StopAt(transformers.TrainerCallback):
    """Raises in a step. At the beginning it draws a number, as callbacks may."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.rand(1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.step is not None and state.global_step == self.step + 1:
            raise Stop


def trainer(root: Path, stop_at: int | None, options: dict[str, Any]) -> Found:
    """``transformers.Trainer`` with evaluations; the history of its logs is a part of its state."""
    import transformers.trainer

    from vescale_fsdp_accelerate import ElasticCallback

    with accelerator(accelerate.PartialState):
        if not options.get("is_stock"):
            os.environ |= to_environment(Options(), {})
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
            transformers.trainer.Accelerator = VeScaleAccelerator
        defaults = {
            "max_steps": UNTIL, "save_strategy": "no", "lr_scheduler_type": "cosine",
        }  # fmt: skip
        arguments = transformers.TrainingArguments(
            output_dir=str(root / "out"), per_device_train_batch_size=3, eval_strategy="steps",
            eval_steps=2, logging_steps=1, report_to=[], use_cpu=True, learning_rate=2e-2,
            disable_tqdm=True, seed=0, **{**defaults, **options.get("arguments", {})},
        )  # fmt: skip
        callback = ElasticCallback(
            root / "run",
            global_batch=options.get("global_batch", GLOBAL_BATCH),
            every=2,
            every_on_disk=None,
            memory_directory=memory(root, options.get("ranks_per_host", 2)),
        )
        made = transformers.Trainer(
            model=make(options.get("dropout", 0.0), options.get("model", Net)),
            args=arguments,
            train_dataset=Numbers(),
            eval_dataset=Numbers(12),
            data_collator=options.get("collate"),
            callbacks=[StopAt(stop_at), callback, *options.get("callbacks", [])],
        )
        at_the_end = None
        try:
            made.train()
            if arguments.load_best_model_at_end:
                at_the_end = made.evaluate()["eval_loss"]
        except Stop:
            callback.run._keeper.finish()
        finally:
            transformers.trainer.Accelerator = accelerate.Accelerator
    history = made.state.log_history
    return {
        "losses": {each["step"] - 1: each["loss"] for each in history if "loss" in each},
        "rates": {each["step"]: each["learning_rate"] for each in history if "loss" in each},
        "evaluated": {each["step"]: each["eval_loss"] for each in history if "eval_loss" in each},
        "evaluations": sum("eval_loss" in each for each in history),
        "evaluates on start": arguments.eval_on_start,
        "flos": made.state.total_flos,
        "source": callback.run.source,
        "accumulates": arguments.gradient_accumulation_steps,
        "best": (made.state.best_global_step, made.state.best_metric),
        "at the end": at_the_end,
    }


KINDS = {"loop": loop, "trainer": trainer}


def attempt(kind: str, root: Path, stop_at: int | None, options: dict[str, Any]) -> Found:
    return KINDS[kind](root, stop_at, options)


@pytest.mark.parametrize("kind", KINDS)
def test_from_4_to_3_to_2_to_4_ranks(tmp_path: Path, kind: str) -> None:
    quiet = run_ranks(attempt, 4, kind, tmp_path / "quiet", None, {})[0]
    assert quiet["losses"].keys() == set(range(UNTIL))
    torn: Found = {"losses": {}, "rates": {}}
    sources = []
    for ranks, stop_at in ((4, 5), (3, 7), (2, 11), (4, None)):
        found = run_ranks(attempt, ranks, kind, tmp_path / "torn", stop_at, {})[0]
        sources.append(found["source"])
        for name in torn:
            torn[name] |= found[name]
    assert sources == ["start", "memory", "memory", "memory"]
    for name in ("losses", "rates"):
        assert torn[name] == pytest.approx(quiet[name], abs=1e-6), name
    assert found.get("evaluated") == pytest.approx(quiet.get("evaluated"), abs=1e-6)
    assert found.get("accumulates", 1) == 1, "the user's value is back"


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_go_on_to_the_bit_with_random_numbers(tmp_path: Path, kind: str) -> None:
    options = {"dropout": 0.3, "ranks_per_host": 1, "global_batch": 12}
    quiet = run_ranks(attempt, 2, kind, tmp_path / "quiet", None, options)
    for stop_at in (7, None):
        torn = run_ranks(attempt, 2, kind, tmp_path / "torn", stop_at, options)
        for found, expected in zip(torn, quiet, strict=True):
            assert found["losses"]
            assert found["losses"] == {s: expected["losses"][s] for s in found["losses"]}
    assert torn[0]["source"] == "memory"


def test_a_mean_over_the_items_of_a_step_needs_no_weights(tmp_path: Path) -> None:
    options = {"model": Counting}
    one = run_ranks(attempt, 1, "trainer", tmp_path / "one", None, options)[0]
    three = run_ranks(attempt, 3, "trainer", tmp_path / "three", None, options)[0]
    assert three["losses"] == pytest.approx(one["losses"], abs=1e-6)
    plain = run_ranks(attempt, 1, "trainer", tmp_path / "plain", None, {})[0]
    assert one["losses"] == pytest.approx(plain["losses"], abs=1e-6)


def test_a_step_scales_losses_as_the_accelerator_does(tmp_path: Path) -> None:
    plain = run_ranks(attempt, 2, "loop", tmp_path / "plain", None, {})[0]
    scaled = run_ranks(attempt, 2, "loop", tmp_path / "scaled", None, {"scale": 64.0})[0]
    assert scaled["losses"] == plain["losses"], "a power of 2 changes no bits"


def noisy(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Draw random numbers in this process, as collators do that mask tokens."""
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}


def test_random_numbers_of_a_collator_go_on_to_the_bit(tmp_path: Path) -> None:
    options = {"collate": noisy, "global_batch": 12, "dropout": 0.3}  # 5 steps an epoch
    quiet = run_ranks(attempt, 1, "trainer", tmp_path / "quiet", None, options)[0]["losses"]
    for stop_at, first in ((9, 0), (11, 8), (None, 10)):  # in an epoch, and where one begins
        torn = run_ranks(attempt, 1, "trainer", tmp_path / "torn", stop_at, options)[0]["losses"]
        assert torn == {step: quiet[step] for step in torn}
        assert first in torn


def test_the_last_state_is_that_of_the_last_step_and_the_user_has_the_best_model(
    tmp_path: Path,
) -> None:
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    best |= {"lr_scheduler_type": "constant"}

    def run(name: str, until: int) -> Found:
        options = {"arguments": {**best, "max_steps": until}}
        return run_ranks(attempt, 1, "trainer", tmp_path / name, None, options)[0]

    quiet = run("quiet", 6)
    first = run("torn", 4)
    assert first["best"] == (2, first["at the end"])
    second = run("torn", 6)
    assert second["source"] == "disk"
    assert second["losses"] == quiet["losses"]


class Tracker(GeneralTracker):  # type: ignore[misc]
    """Writes into a list."""

    name, requires_logging_directory = "list", False

    def __init__(self, told: list[Any]) -> None:
        super().__init__()
        self.told = told

    @property
    def tracker(self) -> list[Any]:
        return self.told

    @on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        self.told.append("started")

    @on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.told.append(values)


def trackers_after_a_loss(root: Path, error: Exception | None) -> list[Any]:
    """What a process logs that is the main one after a loss of rank 0, as ranks meet anew."""
    told: list[Any] = []
    with accelerator(log_with=Tracker(told)) as made:
        made.prepare(make(0.0))
        made.init_trackers("project", {"rate": 0.1})
        made.log({"loss": 3.0})
        with made.elastic_training(root / "run", signals=(), memory_directory=root / "m") as run:
            if dist.get_rank() == 1:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(dist, "get_rank", lambda: 0)
                    if error is not None:
                        patch.setattr(Tracker, "start", fails_with(error))
                    run._options.after_regroup()
                made.log({"loss": 2.0})
            else:
                run._options.after_regroup()  # the main one has its trackers
    return told


def fails_with(error: Exception) -> Callable[[Any], None]:
    def fails(self: Any) -> None:
        raise error

    return fails


def test_trackers_start_in_the_next_main_process(tmp_path: Path) -> None:
    first, second = run_ranks(trackers_after_a_loss, 2, tmp_path / "a", None)
    assert first == ["started", {"rate": 0.1}, {"loss": 3.0}]
    assert second == ["started", {"rate": 0.1}, {"loss": 2.0}]
    _, second = run_ranks(trackers_after_a_loss, 2, tmp_path / "b", OSError("no service"))
    assert second == [], "the training goes on without them"


def refused(root: Path) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 does not work"):
        trainer(root, None, {"arguments": {"gradient_accumulation_steps": 2}})
    with pytest.raises(ValueError, match="ignore_data_skip=True does not work"):
        trainer(root, None, {"arguments": {"ignore_data_skip": True}})
    with pytest.raises(RuntimeError, match="needs a Trainer whose model veScale-FSDP shards"):
        trainer(root, None, {"is_stock": True})
    with accelerator() as made, pytest.raises(ValueError, match="one prepared model, and 0 have"):
        made.elastic_training(root).__enter__()
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=4)
    for given in ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_plugin": plugin}):
        with accelerator(**given) as made:
            made.prepare(make(0.0))
            with pytest.raises(ValueError, match="gradient_accumulation_steps=4 does not work"):
                made.elastic_training(root).__enter__()


def test_what_cannot_follow_the_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run_ranks(refused, 1, tmp_path)


def test_another_global_batch_is_refused(tmp_path: Path) -> None:
    run_ranks(attempt, 1, "trainer", tmp_path, 5, {"global_batch": 12})
    with pytest.raises(Exception, match=r"global_batch=8 .* 4 steps with global_batch=12"):
        run_ranks(attempt, 1, "trainer", tmp_path, None, {"global_batch": 8})


def restarted(root: Path, restarts: int, options: dict[str, Any]) -> Found:
    """An attempt in a process that torchrun has restarted so many times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaving, "_BEGUN", set())
        patch.setenv("TORCHELASTIC_RUN_ID", "job")
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return trainer(root, None, options)


def test_a_trainer_that_has_stopped_early_does_not_train_on_after_a_restart(tmp_path: Path) -> None:
    # Losses fall, so that the second evaluation is worse than the first.
    arguments = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    arguments["lr_scheduler_type"] = "constant"
    patience = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    options = {"arguments": arguments, "callbacks": [patience]}
    (quiet,) = run_ranks(restarted, 1, tmp_path, 0, options)
    assert list(quiet["losses"]) == [0, 1, 2, 3]
    for restarts in (1, 2):
        (found,) = run_ranks(restarted, 1, tmp_path, restarts, options)
        assert (found["source"], found["losses"]) == ("disk", quiet["losses"])
    (found,) = run_ranks(restarted, 1, tmp_path, 0, options)
    assert max(found["losses"]) > 3, "a job that is submitted again trains on"


def test_evaluations_on_start_are_not_repeated_by_a_restart(tmp_path: Path) -> None:
    options = {"arguments": {"eval_on_start": True}}
    (quiet,) = run_ranks(attempt, 1, "trainer", tmp_path / "quiet", None, options)
    run_ranks(attempt, 1, "trainer", tmp_path / "torn", 7, options)
    (torn,) = run_ranks(attempt, 1, "trainer", tmp_path / "torn", None, options)
    for name in ("evaluated", "evaluations", "best"):
        assert torn[name] == quiet[name], name
    assert list(torn["evaluated"]) == [*range(0, UNTIL + 1, 2)]
    assert torn["evaluates on start"], "the user's value is back"


@pytest.mark.parametrize(
    ("asks", "ask"),
    [
        ("accelerator.elastic_training", partial(VeScaleAccelerator.elastic_training, None, "a")),
        ("ElasticCallback", lambda: vescale_fsdp_accelerate.ElasticCallback("a", global_batch=8)),
    ],
)
def test_without_the_package_it_says_what_to_install(
    asks: str, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vescale_fsdp_elastic", None)
    match = rf"{asks} needs .*: pip install 'vescale-fsdp-accelerate\[elastic\]'"
    with pytest.raises(ImportError, match=match):
        ask()


def test_it_is_not_loaded_unless_it_is_asked_for() -> None:
    code = (
        "import sys\nfrom vescale_fsdp_accelerate import accelerator, trainer\n"
        "print('vescale_fsdp_elastic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_another_callback_may_have_an_attribute_repeat(tmp_path: Path) -> None:
    class Repeats(transformers.TrainerCallback):
        repeat = 3

    from vescale_fsdp_accelerate import trainer

    ours = vescale_fsdp_accelerate.ElasticCallback(tmp_path, global_batch=2)
    assert [trainer._is_elastic(each) for each in (Repeats(), ours)] == [False, True]
