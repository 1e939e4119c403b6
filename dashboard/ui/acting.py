"""An admin sends as a workspace: with a key of that workspace which ends by itself.

The key is made by the admin API, is listed there under the name `playground`, works for an hour,
and never leaves this process.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import streamlit as st

from dashboard.access.sessions import Session
from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.workspaces import MadeKey, Workspace
from dashboard.settings import settings

KEY_SECONDS = 3600
_KEPT = "acting_as"


@dataclass(frozen=True, slots=True)
class Acting:
    workspace: str
    client: AdminClient
    ends: float


def sender(session: Session) -> AdminClient | None:
    """The client that sends: the viewer's own, or one of the workspace that an admin picks.

    None until an admin has picked one. Raise ClientError where no key could be made.
    """
    if session.workspace is not None:
        return session.client if session.about.may_send else None
    found = session.client.get("/admin/v1/workspaces", list[Workspace])
    names = [each.id for each in found if each.archived_at is None]
    chosen = st.selectbox(
        "Act as the workspace",
        names,
        index=None,
        key="act_as",
        placeholder="Pick a workspace",
        help="Turns count as that workspace's own. A key of it is made for an hour, under the name"
        " playground.",
    )
    return None if chosen is None else _client_of(session, chosen)


def _client_of(session: Session, workspace: str) -> AdminClient:
    kept: Acting | None = st.session_state.get(_KEPT)
    if kept is not None and kept.workspace == workspace and kept.ends > time.monotonic():
        return kept.client
    if kept is not None:
        kept.client.close()
    ends_at = datetime.now(UTC) + timedelta(seconds=KEY_SECONDS)
    body = {"workspace": workspace, "name": "playground", "expires_at": ends_at.isoformat()}
    made = session.client.change("POST", "/admin/v1/keys", MadeKey, body)
    client = AdminClient(settings().gateway_url, made.key)
    ends = time.monotonic() + KEY_SECONDS - 60
    st.session_state[_KEPT] = Acting(workspace, client, ends)
    return client
