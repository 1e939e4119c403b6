"""The viewer of a page: their session, their client and their theme."""

import streamlit as st

from dashboard.access.sessions import COOKIE, Session, sessions
from dashboard.admin.client import AdminClient, ClientError
from dashboard.admin.shapes.about import About
from dashboard.ui.colours import Theme

ABOUT_SECONDS = 60.0


class SignedOut(Exception):
    """The session has ended while its page was open."""


def session() -> Session | None:
    """The viewer's session, looked up on every run; None once it has ended."""
    return sessions().find(st.context.cookies.get(COOKIE, ""))


def client() -> AdminClient:
    """The client with the viewer's own key. Raise SignedOut without a session."""
    found = session()
    if found is None:
        raise SignedOut
    return found.client


def about(found: Session) -> About:
    """What the gateway says of this key, at most a minute old.

    While the gateway does not answer it is what it said at sign-in.
    """
    try:
        return found.client.get("/admin/v1/about", About, kept_seconds=ABOUT_SECONDS)
    except ClientError:
        return found.about


def sign_out() -> None:
    sessions().close(st.context.cookies.get(COOKIE, ""))


def theme() -> Theme:
    return "dark" if st.context.theme.type == "dark" else "light"
