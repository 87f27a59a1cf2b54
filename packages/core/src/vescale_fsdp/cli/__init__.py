"""The command line ``vescale-fsdp``.

`app` collects the commands, also those of plug-ins.

* `plan`: `sources` and `modules` make the model, and `settings` parses the options.
  `vescale_fsdp.costs` calls the planner and counts bytes. `report` holds all of this, suggests
  options with less padding, and converts it to JSON; `tables` and `picture` show it.
* `tune`: `tuning` makes the problem of its options, `tune_report` shows the result.
* `checkpoint`: its tables are in `checkpoint_contents`.
* `doctor` shows the results of `checkup`, and tests two ranks.
* `text` formats amounts, tables and errors.

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
