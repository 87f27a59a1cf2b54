"""What ``fabric.setup`` wraps, so that marked methods run as a forward of the sharded module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


class Forward(nn.Module):
    """Calls the sharded module.

    Fabric sends ``training_step`` and other methods that were marked by ``mark_forward_method``
    through the forward of what the strategy returns, if that is another module than the user's.
    Then parameters are unsharded and inputs are cast, as in a forward. Names of parameters and of
    modules are as without it.

    Args:
        module: the user's, sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: nn.Module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.module(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the sharded module."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)


def sharded_in(value: T) -> T:
    """Return the sharded module of a `Forward`, and anything else as it is."""
    return value.module if isinstance(value, Forward) else value  # type: ignore[return-value]
