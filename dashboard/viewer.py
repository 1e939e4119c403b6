"""Who looks, and with which theme: what a script knows of its browser."""

import streamlit as st

from dashboard.access.sessions import COOKIE, Session, sessions
from dashboard.client import AdminClient
from dashboard.colours import Theme


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


def sign_out() -> None:
    sessions().close(st.context.cookies.get(COOKIE, ""))


def theme() -> Theme:
    return "dark" if st.context.theme.type == "dark" else "light"
