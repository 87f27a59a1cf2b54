"""The command line ``vescale-fsdp``.

`app` has the commands, and those that plug-ins add. `plan`: what to plan comes from `sources`
(`modules` -> `model`), how from `settings`; `layouts` asks the planner, `estimate` and `timeline`
count bytes, `report` is all of that, its JSON, and what would pad less; `tables` and `picture` show
it. `checkpoint` has commands of its own, whose tables are in `checkpoint_contents`; `doctor` shows
what `checkup` finds, and has two ranks work together. `text` has amounts, tables and errors.
Importing this package loads nothing of that, and ``vescale-fsdp --help`` no torch.
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
