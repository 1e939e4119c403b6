"""The script that Streamlit runs for every page: it draws the navigation, the filters and the page.

`python -m dashboard` serves it. `server.py` puts the gate and the sign-in page before it.
"""

from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.access.sessions import Session
from dashboard.ui import filters, viewer
from dashboard.views.catalogue import SECTIONS, entries

UI = Path(__file__).parent / "ui"
NAME = "Holdfast"


def pages() -> dict[str, list[Any]]:
    """Streamlit's pages, by section."""
    return {
        section: [
            st.Page(
                f"views/{entry.name}.py",
                title=entry.title,
                url_path=entry.name,
                default=entry is entries()[0],
            )
            for entry in found
        ]
        for section, found in SECTIONS.items()
    }


def draw_viewer(session: Session) -> None:
    with st.sidebar:
        st.caption("Signed in as")
        st.text("admin: all workspaces" if session.workspace is None else session.workspace)
        if st.button("Sign out", key="sign_out", width="stretch"):
            viewer.sign_out()
            st.rerun()


def draw() -> None:
    st.set_page_config(
        page_title=NAME,
        page_icon=str(UI / "mark.png"),
        layout="wide",
        initial_sidebar_state=220,
    )
    st.html(UI / "style.css")
    st.logo(str(UI / "mark.svg"), size="medium")
    session = viewer.session()
    if session is None:
        st.navigation([st.Page(_signed_out, title="Signed out")], position="hidden").run()
        return
    page = st.navigation(pages(), position="sidebar")
    st.set_page_config(page_title=f"{page.title} · {NAME}")
    draw_viewer(session)
    about = viewer.about(session)
    if about.sample:
        st.warning(
            "**Sample data.** Everything shown here was made up by the seed command;"
            " nothing of it was measured.",
            icon=":material/science:",
        )
    named = {entry.title: entry for entry in entries()}
    filters.draw(about, named[page.title].filters)
    page.run()


def _signed_out() -> None:
    st.title("Signed out", anchor=False)
    st.text("Reload this page to sign in again.")


draw()
