import pytest

from vescale_fsdp import Granularity
from vescale_fsdp.cli.blocks import BlockRules
from vescale_fsdp.cli.errors import InputError
from vescale_fsdp.cli.model import Tensor

MATRIX, VECTOR = Tensor("mlp.experts.3.up", (64, 32)), Tensor("mlp.experts.3.bias", (64,))


def blocks(*rules: str) -> tuple[int | None, int | None]:
    found = BlockRules(rules)
    return found.block(MATRIX), found.block(VECTOR)


def test_a_plain_rule_is_for_matrices() -> None:
    assert blocks() == (None, None)
    assert blocks("rows:4") == (128, None)


def test_a_pattern_is_for_names() -> None:
    assert blocks("*.experts.*=rows:4") == (128, 4)
    assert blocks("*.up=whole") == (64 * 32, None)
    assert blocks("up=whole") == (None, None)


def test_the_last_rule_that_fits_holds() -> None:
    assert blocks("rows:4", "*.up=elements:10") == (10, None)
    assert blocks("*.up=elements:10", "rows:4") == (128, None)


@pytest.mark.parametrize(
    ("spec", "granularity"),
    [
        ("elements:96", Granularity.elements(96)),
        ("rows:3", Granularity.rows(3)),
        ("tile:16x8", Granularity.tile(16, 8)),
        ("whole", Granularity.whole()),
    ],
)
def test_blocks_are_the_engines(spec: str, granularity: Granularity) -> None:
    for shape in ((64, 32), (3, 40, 6), (5,)):
        tensor = Tensor("w", shape)
        assert BlockRules([f"w={spec}"]).block(tensor) == granularity.block(shape)


def test_rules_that_fit_nothing_are_known() -> None:
    rules = BlockRules(["rows:4", "*.expert.*=whole"])
    rules.block(MATRIX)
    assert rules.unmatched() == ["*.expert.*=whole"]


@pytest.mark.parametrize(
    "rule", ["rows", "rows:", "rows:x", "row:3", "tile:32", "rows:0", "=whole"]
)
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(InputError, match="--granularity"):
        BlockRules([rule])
