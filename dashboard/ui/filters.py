"""What the reader has chosen: range, workspace, engine and model. The URL has all of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import streamlit as st

from gateway.structs.fleet import About

DAY_SECONDS = 86_400
# The length of each range in seconds, and its name in a sentence.
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
# The session's field for the range that holds until the reader chooses one. It stays the same while
# the reader looks around.
_DEFAULT = "default_range"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the filters select. A filter that is None selects everything."""

    range: str = DEFAULT_RANGE
    # These two count only with the range `custom`.
    since: datetime | None = None
    until: datetime | None = None
    workspace: str | None = None
    engine: str | None = None
    model: str | None = None

    @property
    def refresh_seconds(self) -> int:
        """After how many seconds a page asks again. Pages ask less often for a long range, because
        it changes slowly."""
        seconds, _ = RANGES.get(self.range, RANGES[LONGEST_RANGE])
        if seconds <= DAY_SECONDS:
            return 5
        return 30 if self.range == "7d" else 60

    @property
    def words(self) -> str:
        """The range as part of a sentence."""
        return RANGES[self.range][1] if self.range in RANGES else "the chosen time"

    def span(self, now: datetime) -> tuple[datetime, datetime]:
        """The range's first moment, and the moment before which it ends.

        The end is rounded up to a multiple of `refresh_seconds`, so that all viewers ask the same
        question. A range of a day or more begins with a whole hour.
        """
        if self.range == CUSTOM and self.since is not None and self.until is not None:
            return self.since, max(self.until, self.since + timedelta(minutes=1))
        step = self.refresh_seconds
        until = datetime.fromtimestamp((int(now.timestamp()) // step + 1) * step, UTC)
        seconds, _ = RANGES.get(self.range, RANGES[DEFAULT_RANGE])
        since = until - timedelta(seconds=seconds)
        if seconds >= DAY_SECONDS:
            # The ledger has sums of whole hours, so it reads such a range from fewer rows.
            since = since.replace(minute=0, second=0)
        return since, until

    def params(self, *without: str) -> dict[str, Any]:
        """The filters as a query of the admin API, `without` some of them."""
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
    """The shortest range that has all requests, but not more than a day. It is a day if no request
    has come."""
    if about.first_ms is None:
        return DEFAULT_RANGE
    age = (about.now_ms - about.first_ms) / 1000
    lengths = {name: seconds for name, (seconds, _) in RANGES.items() if seconds < DAY_SECONDS}
    return next((name for name, seconds in lengths.items() if age < seconds), DEFAULT_RANGE)


def draw(about: About, page_filters: frozenset[str]) -> None:
    """Draw the filters. Those that the page does not have (`page_filters`) are disabled.

    Streamlit shows options as plain text, so a hostile name is harmless.
    """
    first = st.session_state.setdefault(_DEFAULT, first_range(about))
    _begin("range", first, first)
    with folded("filters", summary):
        st.segmented_control(
            "Range",
            [*RANGES, CUSTOM],
            default=None,
            key="range",
            required=True,
            disabled="range" not in page_filters,
            bind="query-params",
        )
        if st.session_state.get("range") == CUSTOM:
            now = datetime.now(UTC).replace(tzinfo=None, second=0, microsecond=0)
            _draw_moment("from", "From (UTC)", now - timedelta(days=1))
            _draw_moment("to", "To (UTC)", now)
        if about.workspace is None:
            _draw_choice("workspace", about.workspaces, page_filters)
        _draw_choice("engine", about.engines, page_filters)
        _draw_choice("model", about.models, page_filters)


def _draw_moment(key: str, label: str, first: datetime) -> None:
    """One end of a chosen range. It is `first` until the reader chooses another moment."""
    _begin(key, first, first.isoformat(timespec="minutes"))
    st.datetime_input(label, None, key=key, width=190, bind="query-params", format="YYYY-MM-DD")


@contextmanager
def folded(key: str, label: Callable[[], str]) -> Iterator[None]:
    """A row of filters. A phone folds it behind a switch. Other screens show no switch
    (`style.css`).

    `label` is called after the filters are drawn. It returns the label of the switch, which says
    what the filters are set to. Streamlit reads the label as Markdown.
    """
    with st.container(key=f"foldable_{key}"):
        switch = st.container()
        with st.container(horizontal=True, vertical_alignment="bottom", key=key):
            yield
        switch.toggle(label(), key=f"{key}_shown")


def summary() -> str:
    """The range, and how many other filters are set. It has no names, because names are text from
    outside."""
    selection = chosen()
    num_set = sum(
        name is not None for name in (selection.workspace, selection.engine, selection.model)
    )
    return f"Filters: {selection.words}" + (f", {num_set} more" if num_set else "")


def _begin(key: str, value: str | datetime, text: str) -> None:
    """Set a filter that nobody has set yet, in the session and, as `text`, in the URL. So a shared
    link has the range. A widget's default would not be in the URL."""
    if key not in st.session_state and key not in st.query_params:
        st.session_state[key] = value
        st.query_params[key] = text


def _draw_choice(name: str, names: list[str], page_filters: frozenset[str]) -> None:
    # A name in the URL is offered even if it had no traffic lately.
    linked_name = st.query_params.get(name, ALL)
    options = [ALL, *names]
    if linked_name not in options and len(linked_name) <= _MAX_NAME:
        options.append(linked_name)
    st.selectbox(
        name.capitalize(),
        options,
        format_func=lambda option: option or "All",
        key=name,
        width=150,
        disabled=name not in page_filters,
        bind="query-params",
    )


def unknown(about: About, page_filters: frozenset[str]) -> dict[str, str]:
    """The names that the gateway does not know, by the filter of the page that is set to the name.
    Nothing has such a name now, and no request of the last 31 days had it."""
    selection = chosen()
    values = {
        "workspace": (selection.workspace, about.workspaces),
        "engine": (selection.engine, about.engines),
        "model": (selection.model, about.models),
    }
    return {
        name: value
        for name, (value, names) in values.items()
        if name in page_filters and value is not None and value not in names
    }


def request_for(about: About) -> str | None:
    """The model that a new request must name, so that the filters select that request.

    None if the filters can select no new request. That is so if the chosen time is over, if nothing
    has the chosen name, or if an engine is chosen, because the gateway chooses a request's engine.
    """
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
