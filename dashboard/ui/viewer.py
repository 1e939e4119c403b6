"""The viewer of a page: the viewer's session, client and theme."""

from contextlib import suppress

import streamlit as st

from dashboard.access.sessions import COOKIE, Session, sessions
from dashboard.client import ClientError
from dashboard.ui.charts import Theme
from gateway.structs.fleet import About
from gateway.structs.usage import Refusal

ABOUT_SECONDS = 60.0
WATCH_SECONDS = 10


def find() -> Session | None:
    """The viewer's session, which every run looks up; None once it has ended."""
    return sessions().find(st.context.cookies.get(COOKIE, ""))


def session() -> Session:
    """The viewer's session, for a page. If the session has ended, the whole page is drawn anew and
    says so."""
    session = find()
    if session is None:
        st.rerun(scope="app")
    return session


def about(viewer_session: Session, kept_seconds: float = ABOUT_SECONDS) -> About:
    """What the gateway says of this key, by default at most a minute old. While the gateway does
    not answer, this is what it said at the sign-in."""
    try:
        return viewer_session.client.get("/admin/v1/about", About, kept_seconds=kept_seconds)
    except ClientError:
        return viewer_session.about


def watch() -> None:
    """Ask the gateway something every few seconds, so that a page is emptied soon after its key
    ends, even if the page does not refresh. The newest refusal costs the gateway no query."""

    def look() -> None:
        viewer_session = session()
        with suppress(ClientError):
            viewer_session.client.get("/admin/v1/refusals", list[Refusal], {"limit": 1})
        if find() is None:
            st.rerun(scope="app")

    st.fragment(look, run_every=WATCH_SECONDS, key="watch")()


def is_admin() -> bool:
    """Whether the viewer sees all workspaces."""
    return session().workspace is None


def may_change() -> bool:
    """Whether the viewer's key may make the changes that pages offer."""
    return session().about.may_change


def sign_out() -> None:
    sessions().close(st.context.cookies.get(COOKIE, ""))


def theme() -> Theme:
    return "dark" if st.context.theme.type == "dark" else "light"
