import pytest

from dashboard.ui import formats


@pytest.mark.parametrize(
    ("share", "text"), [(None, "–"), (0.0, "0.0%"), (0.98765, "98.8%"), (1.0, "100.0%")]
)
def test_a_share_of_nothing_is_a_dash_and_not_zero(share: float | None, text: str) -> None:
    assert formats.percent(share) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (12_345, "12.3K"),
        (999_960, "1.00M"),
        (5 * 10**9, "5.00G"),
    ],
)
def test_counts_fit_a_card(count: int, text: str) -> None:
    assert formats.compact(count) == text


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (None, "–"),
        (0, "$0"),
        (999, "<$0.000001"),
        (-999, "−<$0.000001"),
        (2_500_000, "$0.002500"),
        (-12_345_678, "−$0.0123"),
        (1_234_567_890_123, "$1,234.57"),
    ],
)
def test_money_shows_its_sign_and_is_never_rounded_to_nothing(nanos: int | None, text: str) -> None:
    assert formats.dollars(nanos) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.9, "5s"), (75, "1m 15s"), (3725, "1h 2m"), (90_000, "1d 1h")]
)
def test_an_uptime_has_two_units(seconds: float, text: str) -> None:
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (11, 10, "+10 % vs period before"),
        (5, 10, "−50 % vs period before"),
        (-5, 10, "−150 % vs period before"),
        (5, -10, "+150 % vs period before"),
        (1200, 10, "120 times the period before"),
        (10, 10, "0 % vs period before"),
        (10**9, 0, "period before: $0"),
        (10**9, None, "period before: –"),
        (None, 10**9, "period before: $1.00"),
    ],
)
def test_a_change_is_of_what_was(now: int | None, before: int | None, text: str) -> None:
    assert formats.change(now, before, is_comparable=True) == text


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [(0.5, 0.4, "+10.0 points vs period before"), (0.4, 0.4, "0 points vs period before")],
)
def test_a_share_changes_by_points(now: float, before: float, text: str) -> None:
    assert formats.points(now, before, is_comparable=True) == text


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (None, 0.4, "period before: 40.0%"),
        (0.5, None, "period before: –"),
        (None, None, "period before: –"),
    ],
)
def test_a_share_of_nothing_is_not_compared(
    now: float | None, before: float | None, text: str
) -> None:
    assert formats.points(now, before, is_comparable=True) == text


def test_what_cannot_be_compared_is_told_as_it_was() -> None:
    assert formats.points(0.73, 0.0, is_comparable=False) == "period before: 0.0%"
    assert formats.change(201 * 10**9, 1_208_000, is_comparable=False) == "period before: $0.001208"
