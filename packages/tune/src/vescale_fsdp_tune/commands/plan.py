"""``vescale-fsdp plan``: its options, and the files that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vescale_fsdp.cli.text import InputError, console, plain
from vescale_fsdp_tune.commands.settings import (
    BlockRules,
    Settings,
    parse_bandwidth,
    parse_batch,
    parse_code,
    parse_dtype,
)
from vescale_fsdp_tune.commands.text import track
from vescale_fsdp_tune.costs.settings import Code, Codes, OptimizerName

if TYPE_CHECKING:
    from vescale_fsdp_tune.commands.report import Report

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A shapes file; a config.json of transformers, or its folder; an architecture of "
        "transformers, such as llama; or module:function that returns a torch.nn.Module.",
    ),
]
Ranks = Annotated[int, typer.Option(show_default=False, help="Number of ranks.")]
_Replicas = Annotated[
    int, typer.Option(help="HSDP: shard over ranks / replicas, and copy that many times.")
]
Granularity = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[PATTERN=]SPEC",
        show_default=False,
        help="Blocks that must not be split: elements:256, rows:128, tile:32x32 or whole. "
        "tile:RxC keeps full-width strips of R rows together. For all matrices, or for tensors "
        "whose name in their unit matches a shell pattern. Repeat for several; the last match "
        "holds.",
    ),
]
_Order = Annotated[
    Literal["auto", "definition"],
    typer.Option(help="Order of tensors in a buffer: the planner's choice, or as defined."),
]
ShardDtype = Annotated[
    str | None,
    typer.Option(
        "--param-dtype",
        metavar="DTYPE",
        show_default=False,
        help="Dtype of the shards: fp32, bf16, fp16, fp64. Default: fp32, or what the function "
        "builds.",
    ),
]
ComputeDtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="Dtype of unsharded parameters and local gradients.")
]
ReduceDtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="Dtype in which gradients are summed over ranks.")
]
_GatherCodec = Annotated[
    str | None,
    typer.Option(
        metavar="CODE[:BLOCK]",
        show_default=False,
        help="Send weights of hidden layers in 8 bits, as with QuantizedGather: int8, e4m3, "
        "int8:32x32, int8:256. Default block: 256.",
    ),
]
_ReduceCodec = Annotated[
    str | None,
    typer.Option(
        metavar="CODE[:BLOCK]",
        show_default=False,
        help="Send gradients in 8 bits, as with QuantizedReduce: int8, int8:64. Default block: "
        "256.",
    ),
]
Optimizer = Annotated[
    OptimizerName,
    typer.Option(help="Optimizer whose states are counted (sgd: with momentum)."),
]
_Reshard = Annotated[
    bool | None,
    typer.Option(
        "--reshard/--no-reshard",
        show_default=False,
        help="Reshard after forward. Default: all units but the root.",
    ),
]
_Backend = Annotated[
    Literal["nccl", "gloo"],
    typer.Option(help="Reductions: reduce-scatter (nccl) or all-to-all (gloo, on CPUs)."),
]
_Bandwidth = Annotated[
    str, typer.Option(help="Bandwidth of one rank, one way: 400Gbit (bits) or 50GB (bytes).")
]
_Batch = Annotated[
    str | None,
    typer.Option(
        metavar="SEQUENCESxTOKENS",
        show_default=False,
        help="Count activations too, for a batch of one rank: 8x1024. The model's step runs once, "
        "without values. For models whose forward takes input_ids.",
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        show_default=False,
        help="The same for other models: a function that returns the arguments of forward: a "
        "tensor, a tuple, a dict, or a tuple and a dict.",
    ),
]
_Activations = Annotated[
    Literal["keep", "recompute", "offload", "recompute+offload"],
    typer.Option(
        help="What happens to activations between forward and backward, in all units but the root, "
        "as with fully_shard(activations=...)."
    ),
]
_Elastic = Annotated[
    int | None,
    typer.Option(
        metavar="REPLICAS",
        show_default=False,
        help="Count the host memory of elastic.training with so many replicas.",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", show_default=False, help="Write all figures as JSON; - is stdout."
    ),
]
_Html = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Write a page with a picture of the buffers; - is stdout.",
    ),
]
_Svg = Annotated[
    str | None,
    typer.Option(metavar="FILE", show_default=False, help="Write only the picture; - is stdout."),
]

_GATHERED, _REDUCED = ("int8", "e4m3"), ("int8",)  # codes


def plan(
    model: Model,
    ranks: Ranks,
    replicas: _Replicas = 1,
    granularity: Granularity = None,
    order: _Order = "auto",
    shard_dtype: ShardDtype = None,
    compute_dtype: ComputeDtype = "bf16",
    reduce_dtype: ReduceDtype = "fp32",
    gather_codec: _GatherCodec = None,
    reduce_codec: _ReduceCodec = None,
    optimizer: Optimizer = "adamw",
    reshard: _Reshard = None,
    backend: _Backend = "nccl",
    bandwidth: _Bandwidth = "400Gbit",
    batch: _Batch = None,
    inputs: Inputs = None,
    activations: _Activations = "keep",
    elastic: _Elastic = None,
    json_file: Json = None,
    html: _Html = None,
    svg: _Svg = None,
) -> None:
    """Show how a model would be sharded, and the costs on each rank.

    No weights are made or read, nothing is downloaded, no process group is started.

    \b
    vescale-fsdp plan llama --ranks 64
    vescale-fsdp plan gpt_oss --ranks 1024 --granularity '*.experts.*=rows:128'
    vescale-fsdp plan llama --ranks 64 --batch 8x1024 --activations recompute
    """
    settings = Settings(
        num_ranks=ranks,
        num_replicas=replicas,
        compute_dtype=parse_dtype(compute_dtype, "--compute-dtype"),
        reduce_dtype=parse_dtype(reduce_dtype, "--reduce-dtype"),
        optimizer=optimizer,
        reshard=reshard,
        backend=backend,
        bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        order=order,
        codes=Codes(
            _code(gather_codec, "--gather-codec", _GATHERED),
            _code(reduce_codec, "--reduce-codec", _REDUCED),
        ),
        batch=None if batch is None else parse_batch(batch),
        inputs=inputs,
        activations=activations,
        elastic=elastic,
    )
    files = {"--json": json_file, "--html": html, "--svg": svg}
    _refuse_same(files)
    dtype = None if shard_dtype is None else parse_dtype(shard_dtype, "--param-dtype")
    # Imported here, so that --help and errors in options are fast.
    from vescale_fsdp_tune.commands.report import make_report
    from vescale_fsdp_tune.commands.sources import load
    from vescale_fsdp_tune.commands.tables import print_report

    rules = granularity or []
    BlockRules(rules)  # a mistake in a rule is found before the model is built
    report = make_report(load(model, dtype), settings, rules, lambda work: track(work, "planning"))
    _warn_of_unmatched(report)
    _write(report, files)
    if "-" not in files.values():
        print_report(report, console())


def _code(text: str | None, option: str, dtypes: tuple[str, ...]) -> Code | None:
    return None if text is None else parse_code(text, option, dtypes, 256)


def _refuse_same(files: Mapping[str, str | None]) -> None:
    """Raise InputError if two outputs have the same file."""
    taken: dict[Path, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        other = taken.setdefault(Path(file).absolute(), option)
        if other != option:
            raise InputError(f"{other} and {option} are both {file!r}, expected different files")


def _warn_of_unmatched(report: Report) -> None:
    names = [tensor.name for each in report.planned for tensor in each.group.tensors]
    for rule in report.unmatched_rules:
        like = f"; names here are like {plain(names[0])!r}" if names and "=" in rule else ""
        print(
            f"vescale-fsdp: warning: --granularity {plain(rule)} matches no tensor{like}",
            file=sys.stderr,
        )


def _write(report: Report, files: Mapping[str, str | None]) -> None:
    """Write the outputs to their files; ``-`` is stdout."""
    from vescale_fsdp_tune.commands import picture
    from vescale_fsdp_tune.commands.report import as_json

    makers: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "--json": lambda plan: json.dumps(plan, indent=1) + "\n",
        "--html": picture.html,
        "--svg": picture.svg,
    }
    for option, file in files.items():
        if file is not None:
            write(option, file, makers[option](as_json(report)))


def write(option: str, file: str, text: str) -> None:
    """Write an output to its file; ``-`` is stdout."""
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file} ({option}): {error.strerror}") from error
