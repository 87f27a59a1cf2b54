"""Build the three wheels and install them into the environment that runs this script.

Each wheel is built from the sdist, so a file that the sdist lacks is noticed. What the wheels
depend on comes with them from the registry, once; later runs replace only our own packages.

Usage: python install.py SCRATCH_DIR
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
NAMES = ["vescale-fsdp", "vescale-fsdp-lightning", "vescale-fsdp-accelerate"]


def run(*args: object) -> None:
    """Run a module of this interpreter; stop at the first one that fails."""
    subprocess.run([sys.executable, "-m", *map(str, args)], check=True)


def main() -> None:
    """Build, then install by file name: a package of the same name elsewhere cannot get in."""
    dist = Path(sys.argv[1]) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in ("core", "lightning_plugin", "accelerate_plugin"):
        run("build", "--no-isolation", "--outdir", dist, PACKAGES / folder)
    run("twine", "check", "--strict", *sorted(dist.iterdir()))
    run("pip", "uninstall", "-qq", "--yes", *NAMES)
    wheels = [
        f"{path}[lightning]" if "lightning" in path.name else path for path in dist.glob("*.whl")
    ]
    assert len(wheels) == 3, f"expected three wheels in {dist}, found {wheels}"
    run("pip", "install", "-qq", "--no-compile", *wheels)
    run("pip", "check")


if __name__ == "__main__":
    main()
