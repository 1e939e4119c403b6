"""The filters above every page. What is chosen stands in the URL, and stays between pages."""

from datetime import UTC, datetime, timedelta

import streamlit as st

from dashboard.admin.shapes.about import About
from dashboard.ui.selection import ALL, CUSTOM, DEFAULT_RANGE, RANGES, Selection

_MAX_NAME = 128


def draw(about: About, applies: frozenset[str]) -> None:
    """`applies` are the filters that the page knows. The others are shown disabled.

    Streamlit shows options as plain text, so a hostile name is harmless.
    """
    with st.container(horizontal=True, vertical_alignment="bottom", key="filters"):
        st.segmented_control(
            "Range",
            [*RANGES, CUSTOM],
            default=DEFAULT_RANGE,
            key="range",
            required=True,
            disabled="range" not in applies,
            bind="query-params",
        )
        if st.session_state.get("range") == CUSTOM:
            _draw_span()
        if about.workspace is None:
            _draw_choice("workspace", about.workspaces, applies)
        _draw_choice("engine", about.engines, applies)
        _draw_choice("model", about.models, applies)


def _draw_span() -> None:
    now = datetime.now(UTC).replace(tzinfo=None, second=0, microsecond=0)
    for key, label, value in (
        ("from", "From (UTC)", now - timedelta(days=1)),
        ("to", "To (UTC)", now),
    ):
        st.session_state.setdefault(f"default_{key}", value)
        st.datetime_input(
            label,
            st.session_state[f"default_{key}"],
            key=key,
            width=190,
            bind="query-params",
            format="YYYY-MM-DD",
        )


def _draw_choice(name: str, known: list[str], applies: frozenset[str]) -> None:
    # A name in the URL is offered even if it had no traffic lately.
    linked = st.query_params.get(name, ALL)
    options = [ALL, *known]
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


def chosen() -> Selection:
    """What the filters are set to now."""
    state = st.session_state
    return Selection(
        range=state.get("range") or DEFAULT_RANGE,
        since=_utc(state.get("from")),
        until=_utc(state.get("to")),
        workspace=state.get("workspace") or None,
        engine=state.get("engine") or None,
        model=state.get("model") or None,
    )


def _utc(value: datetime | None) -> datetime | None:
    return None if value is None else value.replace(tzinfo=UTC)
