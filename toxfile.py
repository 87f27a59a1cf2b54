"""What tox.toml cannot say: environments ``over`` another one see the packages of that one.

torch takes 1 GB, ten seconds to install and six to compile when it is first imported. So it is
installed once, in the environment "torch", and a path file in the others leads there. Only what an
environment adds to it is in its own folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tox.config.sets import EnvConfigSet
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.python.api import Python


@impl
def tox_add_env_config(env_conf: EnvConfigSet, state: State) -> None:
    """Let tox.toml say ``over = "torch"``."""
    env_conf.add_config("over", of_type=str, default="", desc="see the packages of this one, too")


@impl
def tox_on_install(tox_env: Python, arguments: object, section: str, of_type: str) -> None:
    """Before pip looks for what is installed, make the other environment, and lead there."""
    over = tox_env.conf["over"]
    if not over:
        return
    make = [sys.executable, "-m", "tox", "run", "-q", "--notest", "-e", over]
    subprocess.run(make, cwd=tox_env.core["tox_root"], check=True)
    own = Path(tox_env.env_site_package_dir())
    other = Path(str(own).replace(str(tox_env.env_dir), str(tox_env.core["work_dir"] / over)))
    (own / f"_over_{over}.pth").write_text(f"{other}\n")
