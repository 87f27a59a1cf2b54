"""A plan's peak with activations, against what the allocator gives in real steps on two ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as recompute

from vescale_fsdp import MixedPrecisionPolicy, fully_shard, repeated_blocks
from vescale_fsdp.cli import main
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_tune.commands.activations import trace_of
from vescale_fsdp_tune.commands.modules import model_of_module
from vescale_fsdp_tune.commands.report import make_report
from vescale_fsdp_tune.commands.settings import Settings, parse_dtype
from vescale_fsdp_tune.costs.estimate import Figures
from vescale_fsdp_tune.costs.model import Event, Trace
from vescale_fsdp_tune.costs.settings import Activations

from ....core.tests.allocations import peak_of, through_the_allocator, traced
from .tiny import shapes_file

VOCAB, WIDTH, HEADS, LENGTH, BATCH = 512, 64, 4, 64, 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, WIDTH] -> the same
        parts = self.qkv(self.first(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Returns the loss, as models of transformers do."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> None:
        super().__init__()
        self.order = order  # in which the blocks run
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for index in self.order:
            x = self.blocks[index](x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def gpt_with_last_blocks_trained() -> GPT:
    """The root and four of six blocks are frozen."""
    model = GPT().requires_grad_(False)
    for block in model.blocks[4:]:
        block.requires_grad_(True)
    return model


class Encoder(nn.Module):
    """Torch's own layers, with dropout, and so attention with a matrix of all pairs on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True) for _ in range(4)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, 16] -> [batch, length, WIDTH]
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def tokens() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def features() -> Tensor:
    return torch.zeros(BATCH, LENGTH, 16)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    compute: str = "fp32"
    activations: Activations = "keep"

    @property
    def is_gpt(self) -> bool:
        return self.make is not Encoder


def plan(case: Case) -> Figures:
    settings = Settings(
        num_ranks=2,
        compute_dtype=parse_dtype(case.compute, "--compute-dtype"),
        backend="gloo",
        batch=(BATCH, LENGTH) if case.is_gpt else None,
        inputs=None if case.is_gpt else f"{__name__}:features",
        activations=case.activations,
    )
    with torch.device("meta"):
        model = model_of_module(case.make(), "model", None)
    return make_report(model, settings, [], lambda work: work).figures["veScale-FSDP"]


def measure(case: Case) -> int:
    """The peak of a third step, beside the shards and AdamW's states."""
    with through_the_allocator():
        return measure_here(case)


def measure_here(case: Case) -> int:
    model = case.make()
    policy = MixedPrecisionPolicy(DTYPES[case.compute], torch.float32)
    for module in repeated_blocks(model):
        if case.activations == "recompute":
            recompute(module)
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        if case.is_gpt:
            model(**tokens())["loss"].backward()
        else:
            model(features()).sum().backward()
        time.sleep(0.1)  # until gloo's threads have let go of what they send

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    peak, _ = peak_of(traced(step))
    return peak


CASES = {
    "GPT": Case(GPT),
    "GPT, recomputed": Case(GPT, activations="recompute"),
    "GPT in bf16, recomputed": Case(GPT, "bf16", "recompute"),
    "blocks that run twice, recomputed": Case(
        partial(GPT, (0, 1, 2, 3, 4, 5, 3, 4, 5)), activations="recompute"
    ),
    "last blocks trained": Case(gpt_with_last_blocks_trained),
    "encoder in bf16": Case(Encoder, "bf16"),
    "encoder, recomputed": Case(Encoder, activations="recompute"),
}


@cache
def measured(name: str) -> int:
    """The peak of a case on the first of two ranks."""
    return run_ranks(measure, 2, CASES[name])[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_a_real_step(name: str) -> None:
    planned = plan(CASES[name]).peak
    # Beside: the state of the random numbers, which each recomputation has saved (5,056 bytes), and
    # means of LayerNorm, which CPUs have in bf16.
    assert planned.num_bytes == pytest.approx(measured(name), rel=0.02)
    # Neither the activations nor the engine's buffers alone would be near.
    assert planned.parts["activations"] < 0.98 * planned.num_bytes


def test_the_peak_is_exact_where_nothing_is_recomputed() -> None:
    assert plan(CASES["GPT"]).peak.num_bytes == measured("GPT")


ROWS = 256
A = ROWS * WIDTH * 4  # bytes of one activation of the chain


class Layer(nn.Module):
    """Saves its input and the input of relu's successor: two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def chain() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(5)))


def rows() -> Tensor:
    return torch.zeros(ROWS, WIDTH)


def trace(activations: Activations) -> Trace:
    settings = Settings(
        num_ranks=2,
        compute_dtype=parse_dtype("fp32", ""),
        inputs=f"{__name__}:rows",
        activations=activations,
    )
    with torch.device("meta"):
        model = model_of_module(chain(), "chain", None)
    return trace_of(model, settings, activations)


def ends(trace: Trace) -> list[int]:
    """Activations at the end of each layer's forward, in units of A."""
    moments = [each for each in trace.moments if each.event is Event.END_OF_FORWARD and each.unit]
    return [round(each.live_bytes / A) for each in moments]


def test_what_is_kept_by_hand() -> None:
    # The step's input and two more of each layer; recomputed: its output, the next one's input.
    assert ends(trace("keep")) == [3, 5, 7, 9, 11]
    assert ends(trace("recompute")) == [2, 3, 4, 5, 6]


def test_offload_leaves_two_layers_on_the_device() -> None:
    found = trace("offload")
    # At the end of a forward: the step's input, this layer's two and its output. The first has the
    # step's input as one of its two; at the end of the second the first one's are free.
    assert ends(found) == [3, 4, 4, 4, 4]
    assert found.host_bytes == 5 * 2 * A
    # At the end of the backward of the third: the step's input, two of the second, which have come
    # back, and the gradient of what is between them.
    (backward,) = [m for m in found.moments if m.event is Event.END_OF_BACKWARD and m.unit == 3]
    assert round(backward.live_bytes / A) == 4
    both = trace("recompute+offload")
    assert both.host_bytes == 5 * A
    assert both.highest_bytes < found.highest_bytes < trace("keep").highest_bytes


def test_nothing_of_a_step_is_left() -> None:
    for activations in ("keep", "recompute", "offload", "recompute+offload"):
        last = trace(activations).moments[-1]
        assert (last.event, last.live_bytes) == (Event.END, A + 4)  # the input and the loss


def test_gradients_come_in_the_order_of_autograd() -> None:
    with torch.device("meta"):
        model = model_of_module(GPT(), "gpt", None)
    settings = Settings(num_ranks=2, batch=(BATCH, LENGTH))
    moments = trace_of(model, settings, "keep").moments
    events = [(each.event, each.unit) for each in moments if each.event is not Event.GRADIENT]
    forwards = [
        pair for i in range(1, 7) for pair in ((Event.FORWARD, i), (Event.END_OF_FORWARD, i))
    ]
    backwards = [
        pair for i in range(6, 0, -1) for pair in ((Event.BACKWARD, i), (Event.END_OF_BACKWARD, i))
    ]
    root = (Event.FORWARD, 0), (Event.END_OF_FORWARD, 0), (Event.BACKWARD, 0), (Event.END, 0)
    assert events == [root[0], *forwards, root[1], root[2], *backwards, root[3]]
    gradients = [each for each in moments if each.event is Event.GRADIENT]
    assert gradients[-1].num_elements == VOCAB * WIDTH  # the embedding
    assert sum(each.num_elements for each in gradients) == model.num_parameters


Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> str:
    """The output of a plan that must succeed without a word on stderr."""
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_the_command_counts_activations(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = [f"{__name__}:GPT", "--ranks", "2", "--batch", f"{BATCH}x{LENGTH}"]
    out = run(capsys, *options)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\n  activations " in out
    assert "With --activations recompute the peak would be" in out
    assert "With --activations offload the peak would be" in out
    kept: dict[str, Any] = json.loads(run(capsys, *options, "--json", "-"))
    assert kept["settings"]["batch"] == [BATCH, LENGTH]
    assert kept["settings"]["activations"] == "keep"
    ours = kept["per_rank"]["vescale_fsdp"]
    assert ours["peak_when"] == "the backward of root"
    assert sum(ours["peak_parts_bytes"].values()) == ours["peak_bytes"]
    options += ["--activations", "offload"]
    offloaded: dict[str, Any] = json.loads(run(capsys, *options, "--json", "-"))
    assert offloaded["activations"]["host_bytes"] > 0
    alternatives = {each["options"][1]: each for each in kept["activations"]["alternatives"]}
    assert alternatives["offload"]["per_rank"] == offloaded["per_rank"]["vescale_fsdp"]
    assert "in host memory" in " ".join(run(capsys, *options).split())


def test_without_inputs_activations_are_not_counted(capsys: Capture) -> None:
    options = [f"{__name__}:GPT", "--ranks", "2"]
    assert "activations are not included" in run(capsys, *options)
    report: dict[str, Any] = json.loads(run(capsys, *options, "--json", "-"))
    assert report["activations"] is report["settings"]["activations"] is None
    assert "activations" not in report["per_rank"]["vescale_fsdp"]["peak_parts_bytes"]


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def pair() -> Any:
    return (torch.zeros(2, 2),), {}


def number() -> Any:
    return 3


BAD = {
    "depends on values": (
        ["Uneven", "--inputs", f"{__name__}:pair"],
        "cannot run on the meta device",
    ),
    "no tokens": (["Uneven", "--batch", "1x2"], "takes x: use --inputs module:function"),
    "no inputs": (["GPT", "--inputs", f"{__name__}:number"], "returned a int, expected"),
    "no function": (["GPT", "--inputs", "here"], "expected module:function"),
    "no shape": (["GPT", "--batch", "8"], "expected sequences of one rank x tokens of each"),
    "two inputs": (["GPT", "--batch", "1x2", "--inputs", "a:b"], "expected one of them"),
    "nothing to keep": (["GPT", "--activations", "offload"], "needs --batch or --inputs"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_run(name: str, capsys: Capture) -> None:
    (function, *options), message = BAD[name]
    assert main(["plan", f"{__name__}:{function}", "--ranks", "2", *options]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err


def test_a_shapes_file_has_no_step(tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", shapes_file(tmp_path), "--ranks", "2", "--batch", "1x2"]) == 2
    assert "need the code of the model" in capsys.readouterr().err
