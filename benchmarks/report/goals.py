"""Targets that are checked with results outside of the grid."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import copies, gpu_single, rows, scale
from benchmarks.compare import record
from benchmarks.compare.spread import ratios
from benchmarks.compare.targets import Verdict
from benchmarks.cost_model import choices
from benchmarks.optimizers.results import ROOT, read
from benchmarks.tune import regret

__all__ = ["goals"]

OF_FSDP2_PEAK = 0.84
PEAK_RANKS = ("64", "1024")
STATE_BYTES = 2.04  # of AdamW8bit, a parameter
OVER_FSDP2_IN_INT8 = 2.5
OPTIMIZERS = ROOT / "benchmarks" / "optimizers" / "results"
QUANTIZED = record.FOLDER.parent / "quantized_speed"


def goals() -> list[Verdict]:
    """Return verdicts for ZeRO's table, budgets, large worlds, copies, optimizers and 8 bits."""
    return [
        *rows.verdicts(),
        *regret.verdicts(),
        *choices.verdicts(),
        *_peaks(),
        *_copies(),
        *_optimizers(),
        *_quantized(),
        *_gpu(),
    ]


def _peaks() -> Iterator[Verdict]:
    never = "peak of tensors at most FSDP2's"
    target = f"peak of tensors at most {OF_FSDP2_PEAK} of FSDP2's, by default or with in_flight=1"
    for path in sorted(scale.FOLDER.glob("*.json")):
        readings = read(path)["readings"]
        for ranks in PEAK_RANKS:
            pair = readings.get(f"fake {ranks}")
            if pair is None or pair["fsdp2"]["left_out"]:
                continue
            theirs = pair["fsdp2"]["peak_bytes"]
            ratio, lean = (pair[n]["peak_bytes"] / theirs for n in ("vescale", "vescale-lean"))
            where = f"{path.stem}, rank 0 of {ranks}"
            found = f"{ratio:.2f}, {lean:.2f} with in_flight=1"
            least = pair["floor"]["peak_bytes"] / theirs
            told = f"activations, shards, and the unit that runs are {least:.2f}"
            limit = told if least > OF_FSDP2_PEAK else ""
            yield Verdict(never, where, f"{ratio:.3f}", ratio <= 1)
            yield Verdict(target, where, found, min(ratio, lean) <= OF_FSDP2_PEAK, limit)


def _copies() -> Iterator[Verdict]:
    for key, found in read(copies.FILE).get("cells", {}).items():
        copied, model = (found[name]["bytes"]["gather out"] for name in ("vescale", "compute"))
        text = f"{(copied - model) / 1e6:.2f} MB"
        yield Verdict("nothing copied out of an all-gather", key, text, copied <= model)


def _optimizers() -> Iterator[Verdict]:
    for where, each in read(OPTIMIZERS / "muon_step.json").items():
        for what, found in each["targets"].items():
            target = f"Muon's step: {what} at most {found['target']:.2f} of FSDP2's"
            yield Verdict(target, where, f"{found['ratio']:.2f}", found["met"])
    for model, each in read(OPTIMIZERS / "states.json").items():
        if model != "circumstances":
            size = each["optimizers"]["AdamW8bit"]["per_parameter"]
            target = f"AdamW8bit: at most {STATE_BYTES} bytes of state a parameter"
            yield Verdict(target, model, f"{size:.3f}", size <= STATE_BYTES)


def _quantized() -> Iterator[Verdict]:
    for cell, found in record.load_all(QUANTIZED).items():
        speed = ratios(found.step_s("fsdp2"), found.step_s("vescale-int8"))
        if speed is not None:
            least = f"at least {OVER_FSDP2_IN_INT8} of the speed of FSDP2 in fp32"
            target = f"int8 all-gathers: {least}"
            text = f"{speed[1]:.2f} ({speed[0]:.2f} to {speed[2]:.2f})"
            yield Verdict(target, str(cell), text, speed[1] >= OVER_FSDP2_IN_INT8)


def _gpu() -> Iterator[Verdict]:
    for (model, world_size), pair in gpu_single.load(gpu_single.FILE).items():
        for each in gpu_single.verdicts(model, world_size, *pair):
            if each.holds is not None:
                target = each.target.split(", ")[-1]
                yield Verdict(target, f"{model}, 1 GPU of {world_size}", each.found, each.holds)
