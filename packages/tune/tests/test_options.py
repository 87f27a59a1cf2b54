"""The option ``budget`` of the adapters, which the companion checks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from vescale_fsdp.options import BUDGET, arguments, check, option
from vescale_fsdp_tune import Budget

OF_1 = Budget.of("1GiB")
TEXT = "{name}: {value!r} does not work{reason}; accepted: {accepted}"


@dataclass(kw_only=True)
class Options:
    budget: Any = option(BUDGET, None, "10GiB")


@pytest.mark.parametrize("value", ["80%", "choice.yaml", 1 << 30, OF_1, None])
def test_a_value_is_passed_on(value: object) -> None:
    options = Options(budget=value)
    check(options, TEXT)
    assert arguments(options, "budget") == {"budget": value}


@pytest.mark.parametrize("value", ["much", ""])
def test_another_value_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"^budget: '{value}' does not work; accepted: 10GiB$"):
        check(Options(budget=value), TEXT)


def test_words_are_checked_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing torch now raises
        "from dataclasses import make_dataclass\n"
        "from vescale_fsdp.options import *\n"
        "fields = [('budget', str, option(BUDGET, None, ''))]\n"
        "check(make_dataclass('Options', fields)(budget='80%'), '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
