import pytest

from vescale_fsdp.cli.text import binary, count, plain, several


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1.00 K"),
        (9_994, "9.99 K"),
        (9_996, "10.0 K"),
        (999_499, "999 K"),
        (999_500, "1.00 M"),
        (671_026_419_200, "671 bn"),
    ],
)
def test_counts_have_three_digits(number: int, text: str) -> None:
    assert count(number) == text


def test_bytes_are_in_powers_of_1024() -> None:
    assert [binary(n) for n in (0, 1023, 1 << 10, 3 << 29)] == [
        "0 B",
        "1.00 KiB",
        "1.00 KiB",
        "1.50 GiB",
    ]


def test_one_is_singular() -> None:
    assert [several(n, "unit") for n in (0, 1, 2, 1000)] == [
        "0 units",
        "1 unit",
        "2 units",
        "1,000 units",
    ]


def test_control_characters_are_shown_and_not_sent() -> None:
    assert plain("a\x1b[31mb\nc\u202e\ud800") == "a\\x1b[31mb\\nc\\u202e\\ud800"
    assert plain("h.0 \u00e4\u2500") == "h.0 \u00e4\u2500"
