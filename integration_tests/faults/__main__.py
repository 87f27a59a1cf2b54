"""Run all faults in full, and write docs/reliability.md from what came of them.

With words as arguments only the scenarios whose names have one of them, and nothing is written.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from . import report
from .catalog import SCENARIOS
from .harness import run


def main(words: list[str]) -> int:
    """The exit code: 1 if ours misses the bar where that is not known, or meets it where it is."""
    start, results, num_wrong = time.monotonic(), [], 0
    for scenario in SCENARIOS:
        title = f"{scenario.group}: {scenario.name}"
        if words and not any(word in title for word in words):
            continue
        each = {}
        for engine in scenario.engines:
            folder = Path(tempfile.mkdtemp(prefix="faults-"))
            try:
                num_trials = scenario.num_trials(engine, is_full=True)
                result = each[engine] = run(scenario, engine, num_trials, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            counts = result.skipped or dict(result.outcomes)
            print(f"{title}, {engine}: {counts}, {result.seconds:.0f} s", flush=True)
        results.append((scenario, each))
        faults = each["ours"].faults(scenario.good)
        if bool(faults) != bool(scenario.missed):
            num_wrong += 1
            print(f"  unexpected: {faults or 'it meets the bar'}", flush=True)
    minutes = (time.monotonic() - start) / 60
    if not words:
        report.write(results, minutes)
    print(f"{len(results)} scenarios, {num_wrong} not as expected, {minutes:.1f} minutes")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
