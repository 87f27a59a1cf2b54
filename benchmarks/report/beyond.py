"""The sections of RESULTS.md beyond the grid: large worlds, the cost model, start-up, the paper's
tables, adapters, one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import (
    ablation,
    activations,
    adapters,
    copies,
    gpu_single,
    rows,
    scale,
    startup,
    streaming,
)
from benchmarks.adapters import __main__ as adapters_command
from benchmarks.cost_model import check, choices, large, paper
from benchmarks.optimizers.results import read
from benchmarks.tune import regret

__all__ = ["sections"]


class Part(NamedTuple):
    """A section: heading, text, the files that it shows, tables, and text below these."""

    title: str
    text: str
    found: Sequence[dict[str, Any]]
    tables: list[tuple[list[str], list[list[str]]]]
    image: str = ""
    after: str = ""


def sections(shown: Mapping[str, str]) -> Iterator[str]:
    """Lines of Markdown with the pictures that are ``shown``; nothing for what was not measured."""
    for part in _parts():
        if any(rows for _, rows in part.tables):
            yield f"## {part.title}"
            yield ""
            yield part.text
            yield ""
            for text in dict.fromkeys(map(_circumstances, part.found)):
                yield text
                yield ""
            if part.image in shown:
                yield f"![{part.title}]({shown[part.image]})"
                yield ""
            for head, rows in part.tables:
                if rows:
                    yield "| " + " | ".join(head) + " |"
                    yield "|" + "---|" * len(head)
                    yield from ("| " + " | ".join(row) + " |" for row in rows)
                    yield ""
            if part.after:
                yield part.after
                yield ""


def _parts() -> Iterator[Part]:
    yield Part(
        "Rows of ZeRO's table",
        "Speeds are divided by DDP's within a round, with quartiles. Memory in MB is the peak of "
        "tensors on a rank in a step, without activations: DDP's peak minus four copies of the "
        "model. Beside it is what the row holds by the table of ZeRO's stages (arXiv 1910.02054, "
        "Figure 1), which contains no unsharded units or messages. Ours reduces gradients as they "
        "appear, so zero1 holds less than that. DeepSpeed's stages keep a second copy of their "
        "part of the parameters.",
        [read(path) for path in sorted(rows.FOLDER.glob("*.json"))],
        [rows.speed_lines(), rows.memory_lines()],
    )
    first = next(iter(sorted(scale.FOLDER.glob("*.json"))), None)
    yield Part(
        "What a budget chooses",
        "`fully_shard(model, budget=...)` chooses for three budgets: tight is 2% above the least "
        "predicted peak of a grid of settings, ample 10% above the largest, middle between them. "
        "All settings of the grid and all choices then train in turns. The regret is the real step "
        "of a choice over that of the fastest setting whose real peak fits, within a round, with "
        "quartiles. Each budget measures the machine and the model by itself.",
        list(regret.load_all().values()),
        [regret.lines(), regret.peak_lines()],
    )
    yield Part(
        "Rank 0 of many",
        "The first table shows a step of one rank, for several numbers of ranks. In a `fake` group "
        "the other ranks do not exist. Copies and host time of the model alone are subtracted. "
        "FSDP2 is left out where its padded buffers need more than the limit of the run. Batches "
        "are full: at 64 ranks a peak consists mostly of activations and the loss, which all "
        "engines have. The second table divides the fake group's figures by those of the same "
        "number of real ranks.",
        [read(first)] if first else [],
        [scale.lines(), scale.checks()],
        "scale",
    )
    yield Part(
        "A model of step time, and its error",
        "The model predicts a step from the time of compute alone, the bytes of the plan, and the "
        "rate of the network. The share of that rate that collectives reach was measured on the "
        "first network of each model.",
        [read(check.FILE)],
        [check.lines()],
    )
    assumed = read(large.FILE)
    told = ", ".join(f"{what}: {each}" for what, each in assumed.get("assumptions", {}).items())
    yield Part(
        "Computed, not measured: 64 to 10,240 GPUs",
        "These are step times of the same model. `benchmarks/cost_model/large.py` lists its "
        f"assumptions. Here they are: {told}. FSDP2 shards dimension 0, its "
        "default, and pads experts if there are more shards than experts. With replicas there "
        "are fewer shards and no such padding, so the table has two numbers of shards.",
        [assumed],
        [large.lines()],
        "large",
    )
    yield Part(
        "Computed, not measured: choices for 64 to 10,240 GPUs",
        "The fastest settings that fit 90% of a GPU's memory, by the same search, with published "
        "hardware and HSDP of all sizes. `benchmarks/cost_model/choices.py` lists the assumptions. "
        "Time to choose is that of the processor, on one core.",
        [read(choices.FILE)],
        [choices.lines()],
    )
    found = read(paper.FILE)
    shares = ", ".join(f"{share} of {what}" for what, share in found.get("shares", {}).items())
    yield Part(
        "Computed, not measured: the paper's systems",
        "The paper compares five systems on 1,024 H800. For LLaMA-3-70B it reports about 5% over "
        "DeepSpeed, FSDP1 and FSDP2, and slightly more than Megatron-FSDP; for the mixtures of "
        "experts 11 to 66% over all four, without figures for each. Here are the same ratios from "
        "first principles: padding, collectives and copies of each system "
        "(`benchmarks/cost_model/paper.py` lists them) in one simulation, with the published rates "
        f"of the H800 times shares: {shares}. Tokens and the number of shards are "
        "assumptions. The difference is the computed ratio over the paper's, or over the nearer "
        "end of its range. The last table compares rates with the paper's Table 1, from which the "
        "shares of network and memory come.",
        [found],
        [paper.lines(), paper.causes_lines(), paper.table_1_lines()],
        after="What the simulation does not have explains most differences: where communication "
        "takes longer than compute, it hides all copies, so FSDP1 and FSDP2 come out equal to ours "
        "on mixtures of experts. The paper blames unaligned collectives (no in the table), gaps "
        "between streams and the allocator for their 11% and more. With all 1,024 GPUs as shards "
        "FSDP2 pads 128 fused experts to 1,024 rows. The paper says that it runs out of memory "
        "from 256 GPUs on. DeepSpeed's ratio depends on the latency of a ring, which is that of "
        "NCCL's own cost model, and on buckets of 5e7 elements.",
    )
    yield Part(
        "Start-up",
        "Processes train a GPT of 4 blocks. Clients of one TCPStore run our code of a round, with "
        "the payloads of a model of 61 layers. Before the first round they agree on a name for "
        "their keys. All share the cores of one machine.",
        startup.kept(),
        [startup.process_lines(), startup.client_lines()],
        after="The first step has 3 rounds. A model that runs in the order of its definition has "
        "at most 6 in total. In an earlier version a round with 1,024 clients took 0.6 s, and 61 "
        "layers needed more than 180 rounds. With 64 processes our first step takes longer, "
        "compared with the second, than FSDP2's. The time that is not agreement is spent on "
        "communicators and memory.",
    )
    yield Part(
        "Activations",
        "Peak memory of a step on 2 ranks, beside the sharded parameters and AdamW's states, with "
        '`activations="recompute"` and without. Planned by `vescale-fsdp plan` on meta tensors, '
        "measured by the profiler of torch's CPU allocator. FSDP2 recomputes with the same torch "
        "function; its figures differ by some MiB between runs.",
        [read(activations.FILE)],
        [activations.lines()],
    )
    yield Part(
        "Whole parameters",
        "All parameters once, on every one of 2 ranks on a network of 1 Gbit/s. The loop calls "
        "`full_tensor()` of each parameter. Calls are those of `torch.distributed` on a rank; a "
        "send and a receive count as one each. Median of 7, the ways alternate.",
        [read(streaming.FILE)],
        [streaming.lines()],
    )
    yield Part(
        "Copies (the paper's Table 1)",
        "Bytes and time of copies in a step, without the model's own. The paper measures "
        "GPT-OSS-120B under FSDP2 on 64 GPUs: 5.2 ms of copy-out and 43.7 ms of all-gathers, "
        "12.4 ms of copy-in and 94.2 ms of reductions. Copies are up to 14% of an iteration.",
        [read(copies.FILE)],
        [copies.lines()],
    )
    yield Part(
        "8-bit Adam without parts of the engine (the paper's Table 2)",
        "Speed in percent of the full engine's, within a round. The paper's figures are for its "
        "own models and clusters. `benchmarks/ablation.py` describes the variants.",
        [read(ablation.FILE)],
        [ablation.lines(), ablation.padding_lines()],
    )
    yield Part(
        "What adapters cost",
        adapters.__doc__.split("\n")[0] if adapters.__doc__ else "",
        [read(adapters_command.FILE)],
        [adapters_command.lines()],
    )

    yield Part(
        "One GPU",
        "World size 1 uses NCCL, and FSDP2 a path of its own there, with most of its copies: it "
        "says nothing about several GPUs. In larger worlds the other ranks do not exist, and "
        "nothing is sent: torch's fake group copies the own part once for each rank, which with "
        "64 is most of the copies of both engines. A step takes about as long as the host needs "
        "to queue it, so a faster host probably changes the ratios. Three rounds of 5 steps only "
        "([what the figures do not say](../docs/design/performance.md#cuda)).",
        [read(gpu_single.FILE)],
        [gpu_single.lines()],
    )


def _circumstances(found: dict[str, Any]) -> str:
    own = found.get("circumstances", {})
    machine = own.get("machine", {})
    versions = ", ".join(f"{name} {value}" for name, value in own.get("versions", {}).items())
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    cpu = f" of {machine['cpu']}" if "cpu" in machine else ""
    return (
        f"{gpu}{machine.get('cores')} cores{cpu}; {versions}; commit "
        f"{own.get('commit')}{', with changes' if own.get('is_modified') else ''}; "
        f"`{own.get('command')}`"
    )
