"""``python3 dev.py elastic``: a training on two hosts that die and come back.

(nothing)       the demo, 3 minutes, and its picture
--faults 200    each fault once, then random ones, 200 in all (hours); writes the page
--at-once 3     so many trainings side by side
--in-process    survivors keep their processes (docs/elastic.md)
--only WORD     faults with this word in their names, once each, or ``--faults`` of them; no page
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks import namespaces

from . import demo, report
from .faults import FAULTS, Fault
from .hosts import IN_PROCESS, RESTARTED, TORCHFT, own_mounts
from .runner import Report, reference_script, run_all
from .trial import reference


def chosen(count: int, word: str, seed: int, *, with_network: bool) -> list[Fault]:
    """Each fault once, then random ones."""
    each = [one for one in FAULTS if word in one.name and (with_network or not one.needs_network)]
    weights = [one.weight for one in each]
    return (each + random.Random(seed).choices(each, weights, k=max(0, count - len(each))))[
        : count or None
    ]


def main() -> int:
    """The exit code: 1 if something was wrong, hung, or was not as expected."""
    parser = argparse.ArgumentParser(prog="python3 dev.py elastic")
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500, help="of a training with several faults")
    parser.add_argument("--at-once", type=int, default=1, help="trainings side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--without-network", action="store_true", help="as if not root")
    parser.add_argument("--page", action="store_true", help="only write it again")
    parser.add_argument("--stock", action="store_true", help="only stock torch")
    parser.add_argument("--torchft", action="store_true", help="only torchft, if it is installed")
    parser.add_argument("--in-process", action="store_true", help="survivors keep their processes")
    parser.add_argument("--folder", type=Path, help="of the trainings")
    parser.add_argument(
        "--picture", type=Path, default=Path(".dev/elastic.svg"), help="of the demo"
    )
    args = parser.parse_args()
    if args.torchft and not importlib.util.find_spec("torchft"):
        parser.error("--torchft needs torchft: pip install torchft==0.2.0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so hosts end
    if args.page:
        report.write_again()
        return 0
    reason = "not wanted" if args.without_network else namespaces.why_not()
    with_network = reason is None
    if with_network:
        own_mounts()
    else:
        print(f"hosts without namespaces, faults of the network are left out: {reason}")
    how = IN_PROCESS if args.in_process else TORCHFT if args.torchft else RESTARTED
    folder = args.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(exist_ok=True)
    if not args.faults and not args.only:
        return demo.run(folder, args.picture.resolve(), how=how, with_network=with_network)
    script = "stock.py" if args.stock else "peers.py" if args.torchft else "train.py"
    kind = report.STOCK if args.stock else how
    begin, at_once = time.monotonic(), args.at_once
    facts = report.facts_now(args.faults, args.seed, at_once, with_network=with_network)
    parts, lock = [Report() for _ in range(at_once)], threading.Lock()

    def run(place: int) -> None:
        """The share of one of the trainings side by side, with a seed of its own."""
        seed, count = args.seed + place, len(range(place, args.faults, at_once))
        faults = chosen(count, args.only, seed, with_network=with_network)
        if args.stock or args.torchft:
            faults = [each for each in faults if each.is_for_stock]

        def save(found: Report) -> None:  # also after a part, so that a stop loses little
            with lock:
                parts[place] = found
                if args.only:
                    return
                load = os.getloadavg()[2]
                said = f", beside other work (load {load:.1f})" if load > 4 * at_once else ""
                report.write(kind, report.Run({**facts, "load": said}, Report.of(parts)))

        run_all(
            faults, args.steps, folder, 1000 * seed, with_network=with_network,
            until_s=60 * args.minutes, how=how, script=script, after=save,
        )  # fmt: skip

    reference(folder, args.steps, reference_script(how, script))  # before several need it
    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in range(at_once)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found = Report.of(parts)
    for outcome in found.outcomes:
        print(f"{outcome.name}: {outcome.text()}")
    num_odd = sum(bool(each.fault) for each in found.outcomes)
    print(
        f"{len(found.outcomes)} faults, {num_odd} not as expected, {len(found.wrong)} trainings "
        f"wrong, {(time.monotonic() - begin) / 60:.1f} minutes"
    )
    return 1 if found.wrong or num_odd else 0


if __name__ == "__main__":
    sys.exit(main())
