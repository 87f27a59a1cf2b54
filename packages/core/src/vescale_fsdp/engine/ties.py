"""Parameters that are tied across units and wait for a unit around all of their uses."""

from __future__ import annotations

from torch import nn

from vescale_fsdp.engine.slot import Site

_WAITING = "_vescale_fsdp_waiting"  # on such a parameter: the sites where it was met so far


def waiting_sites(param: nn.Parameter) -> list[Site] | None:
    """Where a parameter that waits was met so far; None for one that does not wait."""
    sites: list[Site] | None = param.__dict__.get(_WAITING)
    return sites


def wait_at(param: nn.Parameter, sites: list[Site]) -> None:
    """Let a parameter wait, known to be used at these sites."""
    setattr(param, _WAITING, sites)


def stop_waiting(param: nn.Parameter) -> None:
    """A unit around all of its uses has been found."""
    param.__dict__.pop(_WAITING, None)


def refuse_waiting(root: nn.Module) -> None:
    """Raise if a parameter below ``root`` is tied across units that no unit is around.

    Raises:
        ValueError: naming the parameter.
    """
    for fqn, param in root.named_parameters():
        if waiting_sites(param) is not None:
            raise ValueError(
                f"Parameter '{fqn}' is shared between units, and no unit contains all of them: "
                "call fully_shard on a module around all of its uses, or on these modules "
                "together: fully_shard([module_a, module_b])"
            )
