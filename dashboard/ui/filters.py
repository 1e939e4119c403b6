"""What the reader has chosen: range, workspace, engine and model; all of it stands in the URL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import streamlit as st

from gateway.structs.fleet import About

DAY_SECONDS = 86_400
# How long each range is, and what it is called in a sentence.
RANGES = {
    "1h": (3600, "the last hour"),
    "6h": (6 * 3600, "the last 6 hours"),
    "24h": (DAY_SECONDS, "the last 24 hours"),
    "7d": (7 * DAY_SECONDS, "the last 7 days"),
    "30d": (30 * DAY_SECONDS, "the last 30 days"),
}
LONGEST_RANGE = "30d"
CUSTOM = "custom"
DEFAULT_RANGE = "24h"
ALL = ""
_MAX_NAME = 128
# It stays the same while the reader looks around.
_DEFAULT = "default_range"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the filters select. None filters nothing."""

    range: str = DEFAULT_RANGE
    # These two count only with the range `custom`.
    since: datetime | None = None
    until: datetime | None = None
    workspace: str | None = None
    engine: str | None = None
    model: str | None = None

    @property
    def refresh_seconds(self) -> int:
        """How often to ask again. A long range changes slowly, so it is asked for less often."""
        seconds, _ = RANGES.get(self.range, RANGES[LONGEST_RANGE])
        if seconds <= DAY_SECONDS:
            return 5
        return 30 if self.range == "7d" else 60

    @property
    def words(self) -> str:
        """The range as part of a sentence."""
        return RANGES[self.range][1] if self.range in RANGES else "the chosen time"

    def span(self, now: datetime) -> tuple[datetime, datetime]:
        """From (inclusive) and to (exclusive). The end is rounded up to the refresh, so that all
        viewers ask the same question. A day or more begins with a whole hour."""
        if self.range == CUSTOM and self.since is not None and self.until is not None:
            return self.since, max(self.until, self.since + timedelta(minutes=1))
        step = self.refresh_seconds
        until = datetime.fromtimestamp((int(now.timestamp()) // step + 1) * step, UTC)
        seconds, _ = RANGES.get(self.range, RANGES[DEFAULT_RANGE])
        since = until - timedelta(seconds=seconds)
        if seconds >= DAY_SECONDS:
            # The ledger has sums of whole hours, so a range of these is read from fewer rows.
            since = since.replace(minute=0, second=0)
        return since, until

    def params(self, *without: str) -> dict[str, Any]:
        """The query of the admin API, less these filters."""
        since, until = self.span(datetime.now(UTC))
        choices = {
            "since_ms": int(since.timestamp() * 1000),
            "until_ms": int(until.timestamp() * 1000),
            "workspace": self.workspace,
            "engine": self.engine,
            "model": self.model,
        }
        return {name: value for name, value in choices.items() if name not in without}


def first_range(about: About) -> str:
    """The shortest range that has all requests. It is a day where no request came, or where some
    are older than a day."""
    if about.first_ms is None:
        return DEFAULT_RANGE
    age = (about.now_ms - about.first_ms) / 1000
    short = ((name, seconds) for name, (seconds, _) in RANGES.items() if seconds < DAY_SECONDS)
    return next((name for name, seconds in short if age < seconds), DEFAULT_RANGE)


def draw(about: About, applies: frozenset[str]) -> None:
    """`applies` are the filters that the page knows. The others are shown disabled. Streamlit shows
    options as plain text, so a hostile name is harmless."""
    first = st.session_state.setdefault(_DEFAULT, first_range(about))
    _begin("range", first, first)
    with folded("filters", summary):
        st.segmented_control(
            "Range",
            [*RANGES, CUSTOM],
            default=None,
            key="range",
            required=True,
            disabled="range" not in applies,
            bind="query-params",
        )
        if st.session_state.get("range") == CUSTOM:
            now = datetime.now(UTC).replace(tzinfo=None, second=0, microsecond=0)
            for key, label, value in (
                ("from", "From (UTC)", now - timedelta(days=1)),
                ("to", "To (UTC)", now),
            ):
                _begin(key, value, value.isoformat(timespec="minutes"))
                st.datetime_input(
                    label,
                    None,
                    key=key,
                    width=190,
                    bind="query-params",
                    format="YYYY-MM-DD",
                )
        if about.workspace is None:
            _draw_choice("workspace", about.workspaces, applies)
        _draw_choice("engine", about.engines, applies)
        _draw_choice("model", about.models, applies)


@contextmanager
def folded(key: str, label: Callable[[], str]) -> Iterator[None]:
    """A row of filters. A phone folds it behind a switch, and other screens show no switch
    (`style.css`). `label` is asked when the filters are drawn, and says what they are set to; it is
    read as Markdown."""
    with st.container(key=f"foldable_{key}"):
        switch = st.container()
        with st.container(horizontal=True, vertical_alignment="bottom", key=key):
            yield
        switch.toggle(label(), key=f"{key}_shown")


def summary() -> str:
    """The range, and how many filters besides it are set. Names are text from outside and are no
    part of it."""
    selection = chosen()
    num_set = sum(
        name is not None for name in (selection.workspace, selection.engine, selection.model)
    )
    return f"Filters: {selection.words}" + (f", {num_set} more" if num_set else "")


def _begin(key: str, value: str | datetime, written: str) -> None:
    """Set what nobody has chosen yet, also in the URL, so that a shared link has its range. A
    widget's default would not stand in the URL."""
    if key not in st.session_state and key not in st.query_params:
        st.session_state[key] = value
        st.query_params[key] = written


def _draw_choice(name: str, names: list[str], applies: frozenset[str]) -> None:
    # A name in the URL is offered even if it had no traffic lately.
    linked = st.query_params.get(name, ALL)
    options = [ALL, *names]
    if linked not in options and len(linked) <= _MAX_NAME:
        options.append(linked)
    st.selectbox(
        name.capitalize(),
        options,
        format_func=lambda option: option or "All",
        key=name,
        width=150,
        disabled=name not in applies,
        bind="query-params",
    )


def unknown(about: About, applies: frozenset[str]) -> dict[str, str]:
    """The filters of a page that are set to a name which the gateway does not know, with that name.
    Nothing has such a name, and no request of the last 31 days had it."""
    selection = chosen()
    values = {
        "workspace": (selection.workspace, about.workspaces),
        "engine": (selection.engine, about.engines),
        "model": (selection.model, about.models),
    }
    return {
        name: value
        for name, (value, names) in values.items()
        if name in applies and value is not None and value not in names
    }


def request_for(about: About) -> str | None:
    """The model that a request must ask for to be among what is chosen. None where no new request
    can be: if the chosen time is over, if nothing has the chosen name, or if an engine is chosen,
    since the gateway chooses the engine."""
    selection = chosen()
    is_over = (
        selection.range == CUSTOM
        and selection.until is not None
        and selection.until <= datetime.now(UTC)
    )
    if is_over or selection.engine is not None or unknown(about, frozenset({"workspace", "model"})):
        return None
    if selection.model is not None:
        listed = {entry.id for entry in about.listed}
        return selection.model if selection.model in listed else None
    return next(iter(about.served), "holdfast-demo")


def chosen() -> Selection:
    """What the filters are set to now."""
    state = st.session_state
    return Selection(
        range=state.get("range") or state.get(_DEFAULT) or DEFAULT_RANGE,
        since=_utc(state.get("from")),
        until=_utc(state.get("to")),
        workspace=state.get("workspace") or None,
        engine=state.get("engine") or None,
        model=state.get("model") or None,
    )


def _utc(value: datetime | None) -> datetime | None:
    return None if value is None else value.replace(tzinfo=UTC)
