import pytest

from vescale_fsdp import Granularity
from vescale_fsdp.cli.text import InputError
from vescale_fsdp_tune.commands.settings import BlockRules, Settings, parse_bandwidth, parse_dtype
from vescale_fsdp_tune.costs.model import Tensor

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


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400Gbit", 50e9),
        ("1Gbit", 125e6),
        ("1Gb", 125e6),
        ("50GB", 50e9),
        ("50 GB/s", 50e9),
        ("2.5Tbit/s", 312.5e9),
        ("100Mbps", 12.5e6),
        ("8bits", 1.0),
        ("8 kbytes", 8e3),
        ("400gbit", 50e9),
        ("400GBIT/S", 50e9),
        ("50gB", 50e9),
        ("50gbytes", 50e9),
    ],
)
def test_bandwidth(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "400", "Gbit", "-1Gbit", "0GB", "1GiB", "1e9B", "fast"])
def test_bandwidth_needs_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(InputError, match="--bandwidth is"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["50gb", "50 gb/s", "50gbps"])
def test_bits_or_bytes_is_not_guessed(text: str) -> None:
    with pytest.raises(InputError, match="may be bits or bytes; write 50Gbit or 50GB"):
        parse_bandwidth(text)


def test_dtypes_by_short_name_and_torchs() -> None:
    assert (
        parse_dtype("bf16", "") == parse_dtype("bfloat16", "") == parse_dtype("torch.bfloat16", "")
    )
    assert [parse_dtype(name, "").itemsize for name in ("fp64", "fp32", "fp16")] == [8, 4, 2]
    with pytest.raises(InputError, match="--param-dtype is 'int4', expected one of fp64"):
        parse_dtype("int4", "--param-dtype")


def test_replicas_divide_the_ranks() -> None:
    assert Settings(num_ranks=64, num_replicas=4).num_shards == 16
    with pytest.raises(InputError, match="--ranks 64 cannot be divided into --replicas 3"):
        Settings(num_ranks=64, num_replicas=3)
