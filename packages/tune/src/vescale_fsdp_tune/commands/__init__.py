"""``vescale-fsdp plan`` and ``vescale-fsdp tune``, which an entry point adds to the command line.

* `plan`: `sources` and `modules` make the model, and `settings` parses the options.
  `vescale_fsdp_tune.costs` calls the planner and counts bytes. `report` holds all of this, suggests
  options with less padding, and converts it to JSON; `tables` and `picture` show it.
* `tune`: `tuning` makes the problem of its options, `tune_report` shows the result.

``vescale-fsdp --help`` does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def add_to(app: typer.Typer) -> None:
    """Add the commands to the app of ``vescale_fsdp.cli``."""
    from vescale_fsdp_tune.commands.plan import plan
    from vescale_fsdp_tune.commands.tune import tune

    app.command("plan")(plan)
    app.command("tune")(tune)
