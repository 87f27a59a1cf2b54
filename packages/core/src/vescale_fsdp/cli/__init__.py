"""The command line ``vescale-fsdp``.

`app` collects the commands, also those of plug-ins.

* `checkpoint`: its tables are in `checkpoint_contents`.
* `doctor` shows the results of `checkup`, and tests two ranks.
* `text` formats amounts, tables and errors.

``plan`` and ``tune`` are commands of the companion ``vescale_fsdp_tune``.

An import of this package loads none of these modules. ``vescale-fsdp --help`` does not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: those of the process, if None.

    Returns:
        The exit code: 0, or 2 after bad input, which is named in one line on stderr.
    """
    from vescale_fsdp.cli.app import run

    return run(arguments)
