"""Entry of the dashboard: `streamlit run dashboard/app.py`. Lists the pages; each draws itself."""

import streamlit as st

st.set_page_config(page_title="Holdfast", page_icon="⚓", layout="wide")
st.navigation(
    [st.Page("pages/overview.py", title="Overview", url_path="overview", default=True)],
    position="top",
).run()
