"""Who looks, and with which theme: what a script knows of its browser."""

import streamlit as st

from dashboard.access.sessions import COOKIE, Session, sessions
from dashboard.admin.client import AdminClient, ClientError
from dashboard.admin.shapes.about import About
from dashboard.ui.colours import Theme

ABOUT_SECONDS = 60.0


class SignedOut(Exception):
    """The session has ended while its page was open."""


def session() -> Session | None:
    """None once it has ended: asked anew on every run, also of a fragment."""
    return sessions().find(st.context.cookies.get(COOKIE, ""))


def client() -> AdminClient:
    """Asks with the viewer's own key. Raise SignedOut without one."""
    found = session()
    if found is None:
        raise SignedOut
    return found.client


def about(found: Session) -> About:
    """What the gateway says now, at most a minute old; what it said at sign-in while it is away."""
    try:
        return found.client.get("/admin/v1/about", About, kept_seconds=ABOUT_SECONDS)
    except ClientError:
        return found.about


def sign_out() -> None:
    sessions().close(st.context.cookies.get(COOKIE, ""))


def theme() -> Theme:
    return "dark" if st.context.theme.type == "dark" else "light"
