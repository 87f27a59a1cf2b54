"""The command line ``vescale-fsdp``.

`app` has the commands, and those that plug-ins add; `plan` is the first. What to plan comes from
`sources` (`shapes`, `architectures`, `modules` -> `model`), how from `settings` and `blocks`;
`layouts` asks the planner, `estimate` and `timeline` count bytes, `suggest` looks for something
better, `result` is all of that; `report` (with `amounts`) and `export` show it, `picture` draws it.
`checkpoint` has commands of its own; `checkpoint_places` finds what they are about, and
`checkpoint_contents` shows it. Importing this package loads nothing of that, and ``vescale-fsdp
--help`` no torch.
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
