"""Numbers as people read them. Pure; takes ints and floats, returns plain text."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from engine.protocol import Ttl

NANO = 1_000_000_000
NO_VALUE = "–"
LEAST_SHARE = 0.0005
"""A smaller share would be rounded to 0.0 %. A share that is nearer to 1 than this would be rounded
to 100.0 %."""
MANY_TIMES = 10
"""Growth by this factor or more is written as a multiple, because percents of four digits say
little."""


def moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def written_moment(at_ms: int) -> str:
    return f"{moment(at_ms):%Y-%m-%d %H:%M:%S}"


def since(at_ms: int) -> str:
    """Write the moment since which something lasts: the time of day in UTC, with the date if it is
    not today's."""
    at = moment(at_ms)
    is_today = at.date() == datetime.now(UTC).date()
    return f"{at:%H:%M} UTC" if is_today else f"{at:%Y-%m-%d %H:%M} UTC"


def percent(share: float | None) -> str:
    """Write a share in percent. None means that there was nothing to divide by. It is a dash, never
    0 %. Only a share that is exactly 0 or 1 looks like 0 % or 100 %."""
    if share is None:
        return NO_VALUE
    if 1 - LEAST_SHARE < share < 1:
        return ">99.9%"
    return "<0.1%" if 0 < share < LEAST_SHARE else f"{share:.1%}"


def whole(count: int | None) -> str:
    """Write a count in full."""
    return NO_VALUE if count is None else f"{count:,}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Write a count with its noun: 1 engine, 12 engines."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def sampled(requests: str, num_turns: int, *, is_whole: bool) -> str:
    """Say which requests the figures are of: all requests of the range, or a sample of them."""
    if is_whole:
        return f"Of all {requests}: the whole range."
    return (
        f"Of {requests}, in a sample of the {counted(num_turns, 'request')} of this range. Their"
        " ids decide it, so it changes only as requests come and go."
    )


def compact(count: int) -> str:
    """Write a count in at most four digits: 950, 12.3K, 4.56M."""
    size = float(count)
    for suffix in ("", "K", "M", "G"):
        if abs(size) < 999.5:
            digits = 0 if suffix == "" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
            return f"{size:.{digits}f}{suffix}"
        size /= 1000
    return f"{size:.3g}T"


def dollars(nanos: int | None) -> str:
    """Write nano-dollars as dollars. A small amount has more digits, so that it does not look like
    0."""
    if nanos is None:
        return NO_VALUE
    value = nanos / NANO
    sign = "−" if value < 0 else ""  # a true minus sign
    size = abs(value)
    if size == 0:
        return "$0"
    if size < 0.000_001:
        return f"{sign}<$0.000001"
    digits = 2 if size >= 1 else 4 if size >= 0.01 else 6
    return f"{sign}${size:,.{digits}f}"


def duration(seconds: float) -> str:
    """Write an uptime in its two largest units."""
    whole = int(seconds)
    for size, unit, part, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part}{smaller}"
    return f"{whole // 60}m {whole % 60:02}s" if whole >= 60 else f"{whole}s"


def seconds(value: float | None) -> str:
    """Write a short time: 85 ms, 1.24 s, 2m 05s."""
    if value is None:
        return NO_VALUE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 60 else duration(value)


def rounded(seconds: float) -> str:
    """Write a time in its largest unit: 15 s, 5 min, 4 h."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def in_words(count: int) -> str:
    """Write a large count as people say it: 950, 12 thousand, 1.8 million."""
    size = float(count)
    for word in ("", " thousand", " million", " billion"):
        if abs(size) < 999.5:
            return f"{size:,.0f}{word}" if word == "" or abs(size) >= 99.5 else f"{size:.2g}{word}"
        size /= 1000
    return f"{size:,.0f} trillion"


def points(now: float | None, before: float | None, *, is_comparable: bool) -> str:
    """Write how a share changed, in percentage points. If the periods are not comparable, only the
    former value is written."""
    if now is None or before is None or not is_comparable:
        return f"period before: {percent(before)}"
    return f"{signed(round((now - before) * 100, 1))} points vs period before"


def change(now: int | None, before: int | None, *, is_comparable: bool) -> str:
    """Write how an amount of money (nano-dollars) changed, in percent of its former value. If that
    is 0, or if the periods are not comparable, only the former value is written."""
    if now is None or not before or not is_comparable:
        return f"period before: {dollars(before)}"
    share = (now - before) / abs(before)
    if before > 0 and share >= MANY_TIMES - 1:
        return f"{now / before:,.0f} times the period before"
    return f"{signed(round(share * 100))} % vs period before"


def signed(value: float) -> str:
    """Write a number with its sign. The minus is a true minus sign. 0 has no sign."""
    if value == 0:
        return "0"
    return f"{'−' if value < 0 else '+'}{abs(value):,}"


def ttls_written(writes: Iterable[Mapping[Ttl, int]]) -> list[Ttl]:
    """The TTL classes of which any row has a token. Tables have columns for these classes only."""
    tokens_by_ttl: dict[Ttl, int] = {}
    for row in writes:
        for ttl, tokens in row.items():
            tokens_by_ttl[ttl] = tokens_by_ttl.get(ttl, 0) + tokens
    return [ttl for ttl, tokens in tokens_by_ttl.items() if tokens]
