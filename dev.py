"""Set up and run everything: ``python3 dev.py demo``, ``python3 dev.py test``, and so on.

It installs the pinned tox into ``.dev/venv`` and lets tox make the environments (tox.toml).
It needs Python 3.11 to 3.13 with pip and git; standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
DEV = ROOT / ".dev"
REPORTS = DEV / "reports"
PYTHON = DEV / "venv" / "bin" / "python"
PROJECTS = sorted(ROOT.glob("packages/*/pyproject.toml"))
CLIENTS = ["clients", "clients-torchtune"]
TESTED = ["lint", "docs", "core", "lightning", "accelerate", "integration", "wheels"]
TESTED += ["deepspeed", "clients"]
# The longest first, so that the last ones to run side by side end together.
START_ORDER = [
    "core",
    "integration",
    "lint",
    "accelerate",
    "lightning",
    "clients",
    "deepspeed",
]
START_ORDER += ["docs", "wheels", "core-newest"]
NEWEST = "2.15.0"  # of torch; constraints.txt has the oldest that is supported
# What "test" runs on it, if pip can install it in this time: it takes 5.5 GB.
NEWEST_PART = [
    f"packages/core/tests/{each}"
    for each in (
        *("test_compat.py", "dbuffer/test_collectives.py", "ragged/test_dispatch.py"),
        *(
            "ragged/test_norms.py",
            "ragged/test_optimizers.py",
            "ragged/test_checkpoint_protocol.py",
        ),
        *("engine/test_parity.py", "engine/test_fsdp2_methods.py", "engine/test_fsdp2_policies.py"),
        *("engine/test_dtype_by_parameter.py", "engine/test_grad_dtype.py"),
        *("engine/test_converted.py", "engine/test_gradient_scale.py"),
        "engine/questions/test_several_outputs.py",
        *("checkpoint/test_torch_dcp.py", "checkpoint/test_torch_hf.py"),
    )
]
NEWEST_LIMIT_S = 300
AT_ONCE = 1  # suites side by side. With two cores, two suites reach the time limits of their tests
SLOW_TEST_S, SLOW_FILE_S = 10, 60  # "test" names what takes longer
# What "test --since" runs for a changed file: the first line that its path begins with. A changed
# file of tests runs alone, if nothing else wants all of its suite. "lint" always runs.
ADAPTED = ["integration", "wheels", "clients"]
TOUCHED = {
    "packages/core/tests/": ["core"],
    "packages/elastic/tests/": ["integration"],
    "packages/tune/tests/": ["integration"],
    "packages/lightning_plugin/tests/": ["lightning"],
    "packages/accelerate_plugin/tests/": ["accelerate"],
    "packages/core/": TESTED,
    "packages/elastic/": ["lightning", "accelerate", *ADAPTED],
    "packages/tune/": ["lightning", "accelerate", *ADAPTED],
    "packages/lightning_plugin/": ["lightning", *ADAPTED],
    "packages/accelerate_plugin/": ["accelerate", *ADAPTED],
    "integration_tests/clients/": ["clients"],
    "integration_tests/from_deepspeed/": ["deepspeed"],
    "integration_tests/wheels/": ["wheels"],
    "integration_tests/docs/": ["docs", "integration"],
    "integration_tests/": ["integration"],
    "benchmarks/": ["integration"],
    "examples/": ["integration"],
    "docs/": ["docs"],
    "README.md": ["docs"],
    "CHANGELOG.md": ["docs"],
    "CONTRIBUTING.md": ["docs"],
    "": TESTED,  # this file, tox.toml, constraints.txt, ...
}
NO_TESTS = 5  # pytest's exit code when it found none
USAGE = f"""usage: python3 dev.py COMMAND [arguments for what it runs]

  demo    train a small GPT on two processes, beside FSDP2
  bench   compare with FSDP2, DeepSpeed ZeRO-3 and DDP, and write benchmarks/RESULTS.md (40 minutes;
          --quick: 3 minutes)
  elastic train a small GPT on two hosts that die and come back, with a picture (3 minutes);
          --faults 200: random faults, and docs/elastic-faults.md (2 hours)
  faults  kill, damage and fill everything in full, and write docs/reliability.md (20 minutes)
  fuzz    random models on ranks against one process (2,000 cases: 40 minutes; --cases 200: 4)
  clients litgpt, torchtune, peft, trl and others on veScale-FSDP, unchanged (docs/clients.md)
  core-newest
          the core's tests on torch {NEWEST}, an environment of 5.5 GB
  mutations [NAME]
          faults put into the engine, each with the tests that have to find it (30 minutes)
  shape   lower the figures of integration_tests/shape that have become less
  nightly all of the core's tests on the oldest torch and on {NEWEST}; what "test" leaves out of the
          others (tests marked nightly), torchtune's recipes, mutations, fuzz and faults (4 hours)
  gpu     what is simulated elsewhere, on a GPU, and one page of what held (gpu-report.md)
  docs    the documentation site, strictly, into .dev/site, and the tests of what it says
  release [TAG] [--dry-run]
          build, check and test the wheels and sdists of the tag, into dist/; then publish them
  test [--since REV]
          all of: {", ".join(TESTED)};
          and a part of core-newest, if its environment can be made in {NEWEST_LIMIT_S} s.
          --since: only what the files changed since then touch (CONTRIBUTING.md)
  clean   remove the environments and caches
  {", ".join(TESTED)}
          one of them, for example: python3 dev.py core -k planner
"""


def main() -> int:
    """Run one command; the result is the exit code."""
    command, arguments = (sys.argv[1:2] or ["help"])[0], sys.argv[2:]
    if command == "clean":
        return clean()
    if command == "test" and not arguments:
        return test({name: [] for name in TESTED} | {"core-newest": NEWEST_PART})
    if command == "test" and arguments[0] == "--since" and len(arguments) == 2:
        return test(touched(changed_files(arguments[1])))
    if command == "clients":
        codes = {run_environment(name, arguments) for name in CLIENTS}
        return max(codes - {0, NO_TESTS}, default=min(codes))
    if command == "core-newest":
        return core_newest(arguments)
    if command == "nightly":
        return nightly()
    if command == "gpu":
        return gpu(arguments)
    if command == "release":
        return release(arguments)
    if command in [*TESTED, "demo", "bench", "elastic", "faults", "fuzz", "mutations", "shape"]:
        return run_environment(command, arguments)
    print(USAGE)
    return 0 if command in ("help", "-h", "--help") else 2


def gpu(arguments: list[str]) -> int:
    """Run what needs a GPU; without one say what that is."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.gpu_report import has_gpu, plan

    if has_gpu():
        return run_environment("gpu", arguments)
    print(f"There is no GPU on this machine. On one that has a GPU, this would run:\n{plan()}")
    return 0


def core_newest(arguments: list[str]) -> int:
    """Run the core's tests on the newest torch."""
    install_tox()
    can_make_newest(None)
    return run_environment("core-newest", arguments)


def can_make_newest(limit_s: float | None) -> bool:
    """Whether the environment of the newest torch can be made. All other pins hold."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    others = [pin for pin in pins if not pin.startswith(("torch==", "triton=="))]
    newest = DEV / "constraints-newest.txt"
    newest.write_text("\n".join([f"torch=={NEWEST}", *others, ""]))
    return can_make("core-newest", limit_s)


def can_make(name: str, limit_s: float | None = None) -> bool:
    """Whether one of tox's environments is there, or can be made in so many seconds."""
    make = [PYTHON, "-m", "tox", "run", "-q", "--notest", "-e", name]
    with subprocess.Popen(
        make,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # if it fails, the run that follows says why
        stderr=subprocess.DEVNULL,
        start_new_session=limit_s is not None,
    ) as process:
        try:
            return process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # pip, too
            return False


def nightly() -> int:
    """Run what takes too long for every change, also after a part has failed.

    Of the core it is everything, on the oldest torch and on the newest.
    """
    everything = ["-m", "nightly or not nightly"]
    codes = [run_environment("core", everything), core_newest(everything)]
    for name in ("lightning", "accelerate", "integration", "deepspeed"):
        codes.append(run_environment(name, ["-m", "nightly"]))
    others = ("clients-torchtune", "mutations", "fuzz", "faults")
    return max(*codes, *(run_environment(name, []) for name in others))


def release(arguments: list[str]) -> int:
    """Build, check and test what a tag would publish; publish it, if this is no dry run."""
    is_dry = "--dry-run" in arguments
    tags = [argument for argument in arguments if argument != "--dry-run"]
    projects = [tomllib.loads(path.read_text())["project"] for path in PROJECTS]
    versions = sorted({project["version"] for project in projects})
    faults = []
    if len(versions) != 1:
        faults.append(f"the distributions have versions {', '.join(versions)}; expected one")
    is_checked = bool(tags) or not is_dry  # else: what it would be with the version of now
    if is_checked and (len(tags) != 1 or "dev" in versions[0]):
        faults.append("a release needs one tag, and a version without .dev")
    if tags and tags != [f"v{versions[0]}"]:
        faults.append(f"the tag is {' '.join(tags)}; expected v{versions[0]}")
    if is_checked and f"## [{versions[0]}]" not in (ROOT / "CHANGELOG.md").read_text():
        faults.append(f"CHANGELOG.md has no section [{versions[0]}]")
    if faults:
        print("\n".join(faults))
        return 2
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    code = run_environment("wheels", [])
    if code:
        return code
    shutil.copytree(ROOT / ".tox" / "wheels" / "tmp" / "dist", ROOT / "dist")
    files = sorted(path.name for path in (ROOT / "dist").iterdir())
    print(f"{'would publish' if is_dry else 'publishing'} from dist/:", *files, sep="\n  ")
    if is_dry:
        return 0
    return run_environment("publish", [])


def test(suites: dict[str, list[str]]) -> int:
    """Run the suites with their arguments, also after one failed. The last line counts."""
    start = time.monotonic()
    install_tox()
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    # Environments are made one after another, the first suites' first, while suites run. "lint"
    # uses the one of "integration". What is last to be made is not needed by any other.
    order = [name for name in START_ORDER if name in suites]
    needed = dict.fromkeys([*order[:1], *(["integration"] if "lint" in suites else []), *order])
    maker, runner = ThreadPoolExecutor(1), ThreadPoolExecutor(AT_ONCE)
    made = {name: maker.submit(can_make, name) for name in needed if name != "core-newest"}
    if "core-newest" in suites:
        made["core-newest"] = maker.submit(can_make_newest, NEWEST_LIMIT_S)
    results = [runner.submit(run_suite, name, suites[name], made) for name in order]
    counts = [result.result() for result in results]
    passed, failed, skipped = (sum(each) for each in zip(*counts, strict=True))
    print(write_slowest(REPORTS / "slowest.txt"))
    print(f"all of it took {time.monotonic() - start:.0f} s")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


def run_suite(
    name: str, arguments: list[str], made: dict[str, Future[bool]]
) -> tuple[int, int, int]:
    """Run one suite, and show its output when it is over; how many passed, failed, were skipped."""
    if name == "lint":
        made["integration"].result()
    if not made[name].result() and name == "core-newest":
        print(f"--- {name}: torch {NEWEST} was not installed in {NEWEST_LIMIT_S} s", flush=True)
        return 0, 0, 0
    log = REPORTS / f"{name}.log"
    code = run_environment(name, arguments, log)
    tests, bad, left_out = read_report(REPORTS / f"{name}.xml")
    if code not in (0, NO_TESTS) and not bad:
        bad = 1  # lint, an installation or a crash: there is no count to read
    verdict = "failed" if bad else "no tests found" if code == NO_TESTS else "passed"
    print(f"{log.read_text(errors='replace')}--- {name}: {verdict}\n", end="", flush=True)
    return tests - bad - left_out, bad, left_out


def changed_files(since: str) -> list[str]:
    """The files that differ from a revision, also those that git does not know yet."""
    calls = ["diff", "--name-only", "--no-renames", since], ["ls-files", "-o", "--exclude-standard"]
    return [
        file
        for call in calls
        for file in subprocess.run(
            ["git", *call], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    ]


def touched(files: list[str]) -> dict[str, list[str]]:
    """The suites for these changed files, each with its arguments: none means all of its tests."""
    suites: dict[str, list[str]] = {"lint": []}
    for file in files:
        begin = next(begin for begin in TOUCHED if file.startswith(begin))
        path = ROOT / file
        alone = "tests/" in begin and path.name.startswith("test_") and path.exists()
        for name in TOUCHED[begin]:
            mine = suites.setdefault(name, [file] if alone else [])
            if not alone:
                mine.clear()
            elif mine and file not in mine:
                mine.append(file)
    return suites


def write_slowest(path: Path) -> str:
    """Write which tests and files took longest, from the reports; what was too slow, in words."""
    tests, files = {}, {}
    for report in REPORTS.glob("*.xml"):
        for case in ElementTree.parse(report).iter("testcase"):
            seconds, file = float(case.get("time", 0)), f"{report.stem}: {case.get('classname')}"
            tests[f"{file}.{case.get('name')}"] = seconds
            files[file] = files.get(file, 0.0) + seconds
    said = []
    with path.open("w") as page:
        for what, limit_s, found in (("test", SLOW_TEST_S, tests), ("file", SLOW_FILE_S, files)):
            slowest = sorted(found.items(), key=lambda item: -item[1])[:50]
            page.writelines(f"{seconds:7.1f} s  {name}\n" for name, seconds in slowest)
            page.write("\n")
            said += [
                f"{seconds:7.1f} s  {name}  (a {what} may take {limit_s} s)"
                for name, seconds in slowest
                if seconds > limit_s
            ]
    return "\n".join([f"the 50 slowest tests and files: {path.relative_to(ROOT)}", *said])


def run_environment(name: str, arguments: list[str], log: Path | None = None) -> int:
    """Run one of tox's environments, its output to a file if there is one; its exit code."""
    install_tox()
    start = time.monotonic()
    call = [PYTHON, "-m", "tox", "run", "-e", name, "--", *arguments]
    with open(log, "w") if log else contextlib.nullcontext() as file:
        print(f"\n{f' {name} ':=^100}", flush=True, file=file)
        code = subprocess.run(
            call,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT if file else None,
        ).returncode
        took = f"{time.monotonic() - start:.0f} s"
        print(f"--- {name}: {took}, exit code {code}", flush=True, file=file)
    return code


def environment() -> dict[str, str]:
    """The variables of a process that runs tox."""
    search = f"{PYTHON.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": search, "VIRTUALENV_NO_PERIODIC_UPDATE": "1"}


def read_report(path: Path) -> tuple[int, int, int]:
    """How many tests ran, failed and were skipped, from pytest's JUnit report, if there is one."""
    if not path.exists():
        return 0, 0, 0
    suites = list(ElementTree.parse(path).iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    return tests, failures + errors, skipped


def install_tox() -> None:
    """Make ``.dev/venv`` with the pinned tox. Start over when a pin or a dependency has changed."""
    sources = [ROOT / "constraints.txt", *PROJECTS]
    wanted, stamp = "".join(path.read_text() for path in sources), DEV / "made_from.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print("installing tox into .dev/venv", flush=True)
    clean()
    subprocess.run([sys.executable, "-m", "venv", DEV / "venv"], check=True)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", "constraints.txt", "tox"], cwd=ROOT, check=True)
    stamp.write_text(wanted)


def clean() -> int:
    """Remove what this script, tox and the tools have made."""
    for name in (".dev", ".tox", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    return 0


def check_python() -> str | None:
    """What is wrong with this Python, if anything."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return f"dev.py needs Python 3.11 to 3.13, this is {version}; try: python3.11 dev.py"
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        return f"Python {version} has no venv module; on Debian: apt-get install python3-venv"
    return None


if __name__ == "__main__":
    sys.exit(check_python() or main())
