"""``python3 dev.py elastic``: the demo. With ``--faults 200``: random faults, and the page.

    --named         each fault once, and the page
    --only WORD     named faults with this word in their names; no page is written
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import namespaces

from .faults import FAULTS, Fault, happen
from .hosts import RANKS, new_hosts, own_mounts
from .trial import (
    EVERY,
    EVERY_ON_DISK,
    FOLDER,
    SETTLED_STEPS,
    STEP_S,
    TOLERANCE,
    Hang,
    Outcome,
    Trial,
    farthest_weight,
    losses_of,
    reference,
)


def run(
    faults: list[Fault], until: int, folder: Path, seed: int, *, with_network: bool, script: str = "train.py"
) -> tuple[list[Outcome], str]:
    """One training with these faults. Returns what came of each, and what is wrong at the end."""
    quiet = reference(folder, until, script)
    root = folder / f"trial-{seed}-{time.time_ns()}"
    (root / "events").mkdir(parents=True)
    arguments = [str(FOLDER / script), str(root), str(until), str(STEP_S)]
    outcomes = []
    own = {"EVERY": str(EVERY), "EVERY_ON_DISK": str(EVERY_ON_DISK), "VESCALE_FSDP_TIMEOUT_S": "10"}
    start = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)

    with new_hosts(root, arguments, with_network=with_network, **own) as hosts:
        trial = Trial(root, hosts, seed, tell=tell)
        hosts.add()
        hosts.add()
        wrong = ""
        try:
            trial.wait_for_ranks(2 * RANKS, 120, EVERY_ON_DISK + EVERY)
            for fault in faults:
                trial.sleep(trial.chance.uniform(0, EVERY * STEP_S))
                outcomes.append(happen(trial, fault))
                tell(f"{outcomes[-1]}")
                if outcomes[-1].fault.startswith("hang"):
                    break
            else:
                tell(f"{trial.watch.reached()} of {until} steps")
                trial.wait_for_end(300)
        except Hang as hang:
            wrong = f"hang: {hang}"
        trial.watch.read()
    if not wrong and not any(each.fault.startswith("hang") for each in outcomes):
        if {made.step for made in trial.watch.made} != set(range(until)):
            wrong = "steps are missing"
        else:
            apart = farthest_weight(root, quiet)
            tell(f"weights differ by {apart:.1e}")
            if apart > TOLERANCE:
                wrong = f"weights differ by {apart:.1e}"
    bad = trial.watch.wrong(losses_of(quiet), TOLERANCE)
    if bad:
        wrong += f"; wrong losses: {bad[:3]}"
    tell(f"kept in {root}" if wrong else "end")
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 dev.py elastic")
    parser.add_argument("--only")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with_network = namespaces.why_not() is None
    if with_network:
        own_mounts()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(exist_ok=True)
    for number, fault in enumerate(FAULTS):
        if args.only and args.only not in fault.name:
            continue
        print(run([fault], args.steps, folder, number, with_network=with_network))
    return 0


if __name__ == "__main__":
    sys.exit(main())
