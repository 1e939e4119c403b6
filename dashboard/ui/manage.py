"""What an admin changes of workspaces and keys. What can't be taken back is asked for twice.

A new key is shown once, in the run after it was made, and is kept nowhere.
"""

from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboard.admin.client import ClientError, Refused, segment
from dashboard.admin.shapes.workspaces import Changed, Key, MadeKey, Revoked, Workspace
from dashboard.ui import formats, viewer

_OUTCOME = "manage_outcome"
_SCOPES = ("inference", "read_only", "admin")
_GRACES = {"1 day": 86_400.0, "1 hour": 3600.0, "none: it ends now": 0.0}
_NO_LIMIT = "no limit"


def draw_outcome() -> None:
    """What became of the last change. A key is told this once."""
    found = st.session_state.pop(_OUTCOME, None)
    if found is None:
        return
    is_good, said, key = found
    with st.container(key="manage_outcome_box", border=True):
        st.text(said)
        if key:
            st.caption("The key is shown this once. Copy it now:")
            st.code(key, language=None)
    if not is_good:
        st.toast("Nothing was changed.")


def draw_actions(workspaces: list[Workspace], keys: list[Key]) -> None:
    """Forms stay as they are filled in while the page refreshes."""
    with st.expander("Make and change workspaces and keys", icon=":material/tune:"):
        make, limits, key, end = st.tabs(
            ["New workspace", "Limits", "New or rotated key", "Archive or revoke"]
        )
        ids = [workspace.id for workspace in workspaces]
        with make:
            _draw_new()
        with limits:
            _draw_limits({each.id: each for each in workspaces})
        with key:
            _draw_keys(ids, keys)
        with end:
            _draw_ends(workspaces, keys)


def _draw_new() -> None:
    with st.form("new_workspace", clear_on_submit=True, border=False):
        name = st.text_input("Id", max_chars=64, placeholder="support-desk", key="new_id")
        title = st.text_input("Name (optional)", max_chars=128, key="new_name")
        if st.form_submit_button("Create workspace") and name.strip():
            body = {"id": name.strip()} | ({"display_name": title.strip()} if title.strip() else {})
            _change(
                lambda: _post("/admin/v1/workspaces", Changed, body),
                f"The workspace {name.strip()} was made.",
            )


def _draw_limits(workspaces: dict[str, Workspace]) -> None:
    if not workspaces:
        return
    chosen = st.selectbox("Workspace", list(workspaces), key="limit_workspace")
    now = workspaces[chosen]
    with st.form(f"limits_{chosen}", border=False):
        dollars = None if now.monthly_spend_nano is None else now.monthly_spend_nano / formats.NANO
        typed = {
            "requests_per_minute": _whole("Requests per minute", now.requests_per_minute),
            "tokens_per_minute": _whole("Tokens per minute", now.tokens_per_minute),
            "max_concurrency": _whole("Requests at once", now.max_concurrency),
        }
        spend = st.number_input(
            "Dollars per month", 0.0, 1e9, dollars, placeholder=_NO_LIMIT, format="%.2f"
        )
        share = st.number_input(
            "Share of the leases (0 to 1)", 0.0, 1.0, now.lease_share, placeholder=_NO_LIMIT
        )
        if st.form_submit_button("Set limits"):
            body = {
                **typed,
                "monthly_spend_nano": None if spend is None else round(spend * formats.NANO),
                "lease_share": share,
            }
            path = f"/admin/v1/workspaces/{segment(chosen)}"
            _change(lambda: _post(path, Changed, body), f"The limits of {chosen} were set.")


def _whole(label: str, value: int | None) -> int | None:
    found = st.number_input(label, 1, 10**12, value, placeholder=_NO_LIMIT, step=1)
    return None if found is None else int(found)


def _draw_keys(ids: list[str], keys: list[Key]) -> None:
    left, right = st.columns(2, gap="large")
    with left, st.form("new_key", clear_on_submit=True, border=False):
        owner = st.selectbox("Workspace of the new key", ids, key="key_workspace")
        name = st.text_input("Its name", max_chars=64, placeholder="unnamed", key="key_name")
        scope = st.selectbox("Its scope", _SCOPES, key="key_scope")
        if st.form_submit_button("Create key") and owner:
            body: dict[str, Any] = {"workspace": owner, "scope": scope}
            body |= {"name": name.strip()} if name.strip() else {}
            _make(lambda: _post("/admin/v1/keys", MadeKey, body), f"A key of {owner} was made.")
    with right, st.form("rotate_key", border=False):
        labels = _labels(keys)
        old = st.selectbox("Key to rotate", list(labels), key="rotate_label")
        grace = st.selectbox("The old one works for", list(_GRACES), key="rotate_grace")
        is_sure = st.checkbox("The old key may stop working at once", key="rotate_sure")
        asks = st.form_submit_button("Rotate key")
        if asks and not _GRACES[grace] and not is_sure:
            st.warning(
                "Tick the box, or let the old key work for a while.", icon=":material/warning:"
            )
        elif asks and old:
            path = f"/admin/v1/keys/{segment(labels[old])}/rotate"
            asked = {"grace_seconds": _GRACES[grace]}
            _make(lambda: _post(path, MadeKey, asked), "The key has a successor.")


def _labels(keys: list[Key]) -> dict[str, str]:
    """The ids of keys that work, by what an admin knows them by."""
    return {
        f"{key.workspace} · {key.name} · {key.id}": key.id for key in keys if not key.revoked_at
    }


def _draw_ends(workspaces: list[Workspace], keys: list[Key]) -> None:
    left, right = st.columns(2, gap="large")
    with left:
        live = [each.id for each in workspaces if each.archived_at is None]
        chosen = st.selectbox("Workspace to archive", live, index=None, key="archive_id")
        if chosen and _is_confirmed(
            f"archive_{chosen}", "Archive it", "All its keys stop working at once."
        ):
            path = f"/admin/v1/workspaces/{segment(chosen)}/archive"
            _change(lambda: _post(path, Changed), f"{chosen} was archived.")
        archived = [each.id for each in workspaces if each.archived_at is not None]
        if archived:
            back = st.selectbox("Workspace to restore", archived, index=None, key="restore_id")
            if back and st.button("Restore it", key="restore"):
                path = f"/admin/v1/workspaces/{segment(back)}/restore"
                _change(lambda: _post(path, Changed), f"{back} was restored.")
    with right:
        labels = _labels(keys)
        key = st.selectbox("Key to revoke", list(labels), index=None, key="revoke_label")
        if key and _is_confirmed(
            f"revoke_{labels[key]}", "Revoke it", "It stops working for good: nothing restores it."
        ):
            path = f"/admin/v1/keys/{segment(labels[key])}/revoke"
            _change(lambda: _post(path, Revoked), "The key was revoked.")


def _is_confirmed(key: str, label: str, warning: str) -> bool:
    """A box to tick, then the button: whether both were done."""
    st.warning(warning, icon=":material/warning:")
    is_sure = st.checkbox("I am sure", key=f"sure_{key}")
    return st.button(label, key=f"do_{key}", type="primary", disabled=not is_sure)


def _post(path: str, shape: type[Any], body: Any = None) -> Any:
    return viewer.client().change("POST", path, shape, {} if body is None else body)


def _make(ask: Callable[[], MadeKey], said: str) -> None:
    _change(ask, said, lambda made: made.key)


def _change(ask: Callable[[], Any], said: str, key_of: Callable[[Any], str] = lambda _: "") -> None:
    """Ask the gateway, and tell the outcome above the page on the next run."""
    try:
        made = ask()
    except Refused as error:
        st.session_state[_OUTCOME] = False, str(error), ""
    except ClientError as error:
        st.session_state[_OUTCOME] = False, f"{error} Nothing was changed.", ""
    else:
        st.session_state[_OUTCOME] = True, said, key_of(made)
    st.rerun()
