"""Amounts of memory in words."""

from __future__ import annotations

from typing import Any

import pytest

from vescale_fsdp_tune.costs.amount import Amount, is_path


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(700, 700), ("7B", 7), ("10GiB", 10 << 30), ("10 gib", 10 << 30), ("1.5KB", 1500),
     ("2T", 2 * 10**12), ("80%", 800), ("100%", 1000), ("auto", 360)],
)  # fmt: skip
def test_bytes_of_a_device_with_1000_of_which_400_are_free(text: Any, num_bytes: int) -> None:
    assert Amount.parse(text).bytes_of(1000, 400) == num_bytes


@pytest.mark.parametrize("value", [0, -1, True, None, 1.5, "", "0%", "101%", "ten", "10 XB", "%"])
def test_what_is_no_amount(value: Any) -> None:
    with pytest.raises(ValueError, match="does not work; accepted: a size as"):
        Amount.parse(value)


@pytest.mark.parametrize("value", ["80", " 0.8 ", 80, "10000000000"])
def test_a_number_alone_is_refused_before_anything_is_measured(value: Any) -> None:
    """80 were bytes, for which nothing fits, as a search of half a minute found."""
    number = str(value).strip()
    with pytest.raises(ValueError, match=f'nor a unit: write "{number}%" or "{number}GiB"'):
        Amount.parse(value)


def test_paths() -> None:
    assert is_path("choice.yaml")
    assert is_path("a/b.YML")
    assert not is_path("10GiB")
    assert not is_path(7)
