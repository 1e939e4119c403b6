"""The script that Streamlit runs for every page. It draws the navigation, the filters and the page.

`python -m dashboard` serves it.
"""

from pathlib import Path

import streamlit as st

from dashboard.client import KEPT_SECONDS
from dashboard.ui import conditions, filters, viewer
from dashboard.views import SECTIONS, entries

UI = Path(__file__).parent / "ui"
NAME = "Holdfast"


def draw() -> None:
    st.set_page_config(
        page_title=NAME,
        page_icon=str(UI / "mark.png"),
        layout="wide",
        initial_sidebar_state=220,
    )
    st.html(UI / "style.css")
    st.logo(str(UI / "mark.svg"), size="medium")
    session = viewer.find()
    first = entries()[0].name
    if session is None:
        # Streamlit clears the browser's page when a refresh that was asked for before is answered
        # and the page has another address meanwhile. So every address stays what it was.
        signed_out = [
            st.Page(
                _signed_out,
                title="Signed out",
                url_path=entry.name,
                default=entry.name == first,
            )
            for entry in entries()
        ]
        st.navigation(signed_out, position="hidden").run()
        return
    pages = {
        section: [
            st.Page(
                f"views/{entry.name}.py",
                title=entry.title,
                url_path=entry.name,
                default=entry.name == first,
            )
            for entry in entries_of_section
            if session.workspace is None or not entry.is_shared
        ]
        for section, entries_of_section in SECTIONS.items()
    }
    page = st.navigation(pages, position="sidebar")
    st.set_page_config(page_title=f"{page.title} · {NAME}")
    with st.sidebar:
        st.caption("Signed in as")
        role = "admin" if session.about.may_change else "read-only admin"
        st.text(session.workspace or f"{role}: all workspaces")
        if st.button("Sign out", key="sign_out", width="stretch"):
            viewer.sign_out()
            st.rerun()
        viewer.watch()
    about = viewer.about(session)
    conditions.strip()
    if about.sample:
        st.warning(
            "**Sample data.** The turns were made up, and the engines are simulated: they hold and"
            " queue, and compute nothing. Nothing here was measured.",
            icon=":material/science:",
        )
    page_filters = next(entry.filters for entry in entries() if entry.title == page.title)
    filters.draw(about, page_filters)
    if filters.unknown(about, page_filters):
        # The name may have been made since the gateway was last asked for all names.
        about = viewer.about(session, kept_seconds=KEPT_SECONDS)
    for name, value in filters.unknown(about, page_filters).items():
        st.warning(f"The gateway knows no {name} of this name:", icon=":material/search_off:")
        st.text(value)
    page.run()


def _signed_out() -> None:
    st.title("Signed out", anchor=False)
    st.text("The session or its key has ended. Reload this page to sign in again.")


draw()
