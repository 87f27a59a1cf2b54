"""Build the wheels and install them into the environment that runs this script, the core first.

Each wheel is built from the sdist, so a file that the sdist lacks is noticed. What the wheels
depend on comes with them from the registry, once; later runs replace only our own packages.

Usage: python install.py SCRATCH_DIR core, then python install.py SCRATCH_DIR others
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECTS = sorted(Path(__file__).resolve().parents[2].glob("packages/*/pyproject.toml"))
CORE = "vescale_fsdp-"  # how the name of its wheel begins


def run(*args: object) -> None:
    """Run a module of this interpreter; stop at the first one that fails."""
    subprocess.run([sys.executable, "-m", *map(str, args)], check=True)


def build(dist: Path) -> None:
    """Build all, and remove what an earlier run has installed."""
    shutil.rmtree(dist, ignore_errors=True)
    for project in PROJECTS:
        run("build", "--no-isolation", "--outdir", dist, project.parent)
    run("twine", "check", "--strict", *sorted(dist.iterdir()))
    names = [tomllib.loads(path.read_text())["project"]["name"] for path in PROJECTS]
    run("pip", "uninstall", "-qq", "--yes", *names)


def main() -> None:
    """Install by file name: a package of the same name elsewhere cannot get in."""
    dist, is_core = Path(sys.argv[1]) / "dist", sys.argv[2] == "core"
    if is_core:
        build(dist)
    wheels = list(dist.glob("*.whl"))
    assert len(wheels) == len(PROJECTS), f"expected {len(PROJECTS)} wheels in {dist}, got {wheels}"
    core = [path for path in wheels if path.name.startswith(CORE)]
    others = [
        f"{path}[lightning]" if "lightning" in path.name else path
        for path in wheels
        if path not in core
    ]
    run("pip", "install", "-qq", "--no-compile", *(core if is_core else others))
    run("pip", "check")


if __name__ == "__main__":
    main()
