"""An admin makes and changes workspaces and keys on their page, against a real gateway."""

from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.client import AdminClient, ClientError, NotAnswered
from tests.dashboard.conftest import Gateways, Show
from tests.dashboard.fake_admin import ADMIN_KEY as FAKE_KEY
from tests.dashboard.fake_admin import serve_fake
from tests.dashboard.signed_in import press, said
from tests.gateway.admin_client import Admin
from tests.gateway.serving import ADMIN_KEY, API_KEY


@pytest.fixture(scope="module")
def gateway(gateways: Gateways) -> str:
    return gateways.url("managed")


@pytest.fixture
def admin(gateway: str) -> Admin:
    return Admin(gateway, ADMIN_KEY)


@pytest.fixture
def page(gateway: str, show: Show) -> AppTest:
    return show(gateway, "workspaces")


def works(gateway: str, key: str) -> bool:
    reply = httpx.get(f"{gateway}/admin/v1/about", headers={"x-api-key": key}, timeout=60)
    return reply.status_code == 200


def test_a_workspace_is_made_limited_archived_and_restored(page: AppTest, admin: Admin) -> None:
    page.text_input(key="new_id_0").set_value("desk")
    press(page, "Create workspace")
    assert "desk" in [workspace["id"] for workspace in admin.get("workspaces")]
    page.selectbox(key="limit_workspace").set_value("desk").run()
    page.number_input[0].set_value(60)
    page.selectbox(key="auto_cache_desk").set_value("prefix")
    press(page, "Set limits")
    limited = admin.get("workspaces/desk")["workspace"]
    assert limited["requests_per_minute"] == 60
    assert limited["auto_cache"] == "prefix"
    assert limited["auto_cache_ttl"] is None
    page.selectbox(key="archive_id").set_value("desk").run()
    assert page.button(key="do_archive_desk").disabled, "not before it is confirmed"
    page.checkbox(key="sure_archive_desk").set_value(True).run()
    press(page, "Archive it")
    assert admin.get("workspaces/desk")["workspace"]["archived_at"] is not None
    page.selectbox(key="restore_id").set_value("desk").run()
    press(page, "Restore it")
    assert admin.get("workspaces/desk")["workspace"]["archived_at"] is None


def test_a_key_is_shown_once_rotated_and_revoked(page: AppTest, admin: Admin, gateway: str) -> None:
    admin.workspace("keys")
    page.run()
    page.selectbox(key="key_workspace").set_value("keys")
    page.text_input(key="key_name_0").set_value("robot")
    press(page, "Create key")
    key = page.code[0].value
    assert works(gateway, key)
    page.run()
    assert key in [element.value for element in page.code], "a refresh does not take it away"
    press(page, "Dismiss")
    assert key not in [element.value for element in page.code], "it is shown until it is dismissed"
    (info,) = admin.get("keys?workspace=keys")
    label = f"keys · robot · {info['id']}"
    page.selectbox(key="rotate_label").set_value(label)
    page.selectbox(key="rotate_grace").set_value("none: it ends now")
    press(page, "Rotate key")
    assert works(gateway, key), "the old key does not end unconfirmed"
    page.checkbox(key="rotate_sure").set_value(True)
    press(page, "Rotate key")
    successor = page.code[0].value
    assert works(gateway, successor) and not works(gateway, key)
    new = next(k for k in admin.get("keys?workspace=keys") if k["id"] != info["id"])
    page.run()
    page.selectbox(key="revoke_label").set_value(f"keys · robot · {new['id']}").run()
    page.checkbox(key=f"sure_revoke_{new['id']}").set_value(True).run()
    press(page, "Revoke it")
    assert not works(gateway, successor)


def test_what_the_gateway_refuses_is_said_as_plain_text(page: AppTest, admin: Admin) -> None:
    page.text_input(key="new_id_0").set_value("not an id :red[x]")
    page.text_input(key="new_name_0").set_value("A desk")
    press(page, "Create workspace")
    assert page.text_input(key="new_id_0").value == "not an id :red[x]", "it clears nothing"
    assert page.text_input(key="new_name_0").value == "A desk"
    assert any("id" in element.value and "400" in element.value for element in page.text)
    assert not any(":red[x]" in str(element.value) for element in (*page.markdown, *page.error))


def test_a_key_that_may_only_read_sees_all_and_is_offered_no_change(
    gateway: str, show: Show, admin: Admin
) -> None:
    key = admin.make_key("default", scope="read_only_admin")[1]
    for name in ("overview", "workspaces", "prefixes", "memory", "fleet", "advice", "requests"):
        app = show(gateway, name, key)
        assert "read-only admin: all workspaces" in said(app, "text")
        labels = {button.label for button in app.button}
        assert not labels & {"Create workspace", "Create key", "Set limits", "Revoke it"}
    reader = Admin(gateway, key)
    assert len(reader.get("workspaces")) == len(admin.get("workspaces"))
    refused = reader.post("workspaces", {"id": "not-made"}, status=403)
    assert refused["error"]["type"] == "permission_error"


def test_a_workspaces_own_key_changes_nothing(gateway: str, show: Show) -> None:
    app = show(gateway, "workspaces", API_KEY)
    assert "Create workspace" not in [button.label for button in app.button]


def test_a_change_whose_answer_did_not_come_is_not_said_to_be_none(
    page: AppTest, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made."""
    ask = httpx.Client.request

    def lose(client: httpx.Client, method: str, *arguments: Any, **options: Any) -> httpx.Response:
        reply = ask(client, method, *arguments, **options)
        if method == "POST":
            raise httpx.ReadTimeout("late")
        return reply

    monkeypatch.setattr(httpx.Client, "request", lose)
    page.text_input(key="new_id_0").set_value("late")
    press(page, "Create workspace")
    monkeypatch.undo()
    assert "late" in [workspace["id"] for workspace in admin.get("workspaces")]
    assert "Whether it was changed is not known: the tables tell." in said(page)
    assert "Nothing was changed" not in said(page)


@pytest.mark.parametrize(
    ("status", "is_known"), [(200, False), (403, True), (404, True), (500, False), (529, False)]
)
def test_only_an_answer_tells_that_nothing_was_done(status: int, is_known: bool) -> None:
    with serve_fake() as fake:
        fake.status = status
        client = AdminClient(fake.url, FAKE_KEY)
        with pytest.raises(ClientError) as raised:
            # 200 comes with an answer of another shape.
            client.change("POST", "/admin/v1/keys", dict[str, Any], {})
        assert isinstance(raised.value, NotAnswered) != is_known
        client.close()
    nobody = AdminClient("http://127.0.0.1:9", FAKE_KEY)
    with pytest.raises(ClientError) as raised:
        nobody.change("POST", "/admin/v1/keys", dict[str, Any], {})
    assert not isinstance(raised.value, NotAnswered)
    nobody.close()
