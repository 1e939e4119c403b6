"""The Overview: is the cache working, and what is it saving?"""

import streamlit as st

from dashboard import formats, live, parts
from dashboard.answers.usage import Usage
from dashboard.client import AdminClient
from dashboard.selection import Selection


def read(client: AdminClient, chosen: Selection) -> Usage:
    return client.get("/admin/v1/usage", Usage, chosen.params())


def draw(usage: Usage, chosen: Selection) -> None:
    with st.grid(4, min_column_width=210, row_height=158):
        parts.card("token_hit_rate", formats.percent(usage.rates.token_hit_rate))


parts.title("Overview", "Is the cache working, and what is it saving?")
live.show("overview", read, draw)
