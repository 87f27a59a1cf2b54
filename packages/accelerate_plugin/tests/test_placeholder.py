"""The placeholder says that it is one."""

from __future__ import annotations

import pytest

import vescale_fsdp_accelerate


@pytest.mark.parametrize("name", ["VeScaleAccelerator", "VeScaleFSDPPlugin"])
def test_planned_name_raises_and_says_what_to_use(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name} is not there yet.*fully_shard"):
        getattr(vescale_fsdp_accelerate, name)


def test_from_import_of_planned_name_raises() -> None:
    with pytest.raises(NotImplementedError, match="placeholder"):
        from vescale_fsdp_accelerate import VeScaleAccelerator  # noqa: F401


def test_unknown_name_is_an_ordinary_attribute_error() -> None:
    assert not hasattr(vescale_fsdp_accelerate, "no_such_name")
