"""What the clients' tests share: engines under ``transformers.Trainer``, tiny models, texts."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true"}

if importlib.util.find_spec("torchvision"):
    # PyPI's torchvision is built for CUDA, and its operators do not load beside torch for CPUs.
    # None of them is used here, but its import wants these two to be known.
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", signature)

Steps = list[tuple[float, ...]]  # a tuple for each step: the loss, the gradients' norm


def check(found: Steps, expected: Steps, *, rel: float, abs: float = 0.0) -> None:
    """Check that two runs logged the same, step by step, and that the runs trained at all."""
    assert len(found) == len(expected) > 1
    assert expected[0] != expected[-1]
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=rel, abs=abs), f"step {step}"


@contextmanager
def in_double() -> Iterator[None]:
    """Make tensors in fp64. The processes of ranks run other tests afterwards."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def random_tokens(rows: int, length: int, vocab_size: int = 64) -> torch.Tensor:
    """Token ids from 3 on: those before are special in ``make_tokenizer``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocab_size, (rows, length), generator=generator)


def make_tokenizer() -> Any:
    """Make a tokenizer of 64 words: three special ones, and ``w3`` to ``w63``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_llama(**changes: Any) -> Any:
    """Make a ``transformers`` Llama of 10,000 parameters, the same each time."""
    import transformers

    transformers.set_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **changes))


ARGUMENTS = {
    "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2,
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no",
    "report_to": [], "disable_tqdm": True, "seed": 0,
}  # fmt: skip


@contextmanager
def trainer_engine(name: str) -> Iterator[None]:
    """Let ``transformers.Trainer`` run on "vescale", "ddp" or "fsdp2", as ``accelerate launch``."""
    from vescale_fsdp_accelerate import VeScaleAccelerator
    from vescale_fsdp_accelerate._autoload import replace_trainers

    replace_trainers()  # theirs are imported when they are first named
    import transformers.trainer
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState

    from vescale_fsdp_accelerate.options import Options, to_environment

    before, stock = dict(os.environ), transformers.trainer.Accelerator
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"ACCELERATE_USE_CPU": "true"}
    logging.disable(logging.WARNING)
    try:
        PartialState()
        if name == "vescale":
            os.environ |= to_environment(Options(), {})
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
        engines = {"vescale": VeScaleAccelerator, "ddp": stock, "fsdp2": make_stock_fsdp2(stock)}
        transformers.trainer.Accelerator = engines[name]
        yield
    finally:
        transformers.trainer.Accelerator = stock
        logging.disable(logging.NOTSET)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def make_stock_fsdp2(base: Any) -> Any:
    """Accelerate trains each process alone with FSDP on CPUs, unless its state is told so."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    class StockFSDP2(base):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            options.pop("fsdp_plugin", None)
            super().__init__(**options)
            for state in (self.state, PartialState()):
                state.distributed_type = DistributedType.FSDP
            self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                state_dict_type="FULL_STATE_DICT",
            )

    return StockFSDP2


def train(trainer: Any) -> Steps:
    """Train with a ``transformers.Trainer``; the loss and the gradients' norm of each step."""
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [(log["loss"], float(log["grad_norm"])) for log in logs]


def read_csv(path: Path, columns: Sequence[str]) -> Steps:
    """Read columns of what a ``CSVLogger`` wrote; rows that lack one of them are left out."""
    import csv

    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if all(row.get(name) for name in columns)]
    return [tuple(float(row[name]) for name in columns) for row in rows]
