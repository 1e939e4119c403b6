"""Which key may do what: every route with every kind of key, and headers that are no key at all."""

import http.client
import random
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.operations import APPLICATION, OPERATIONS
from tests.gateway.serving import ADMIN_KEY, API_KEY, eventually, soon_after

NUM_FUZZED = 2000
CLOSED = [operation for operation in OPERATIONS if operation.keys]
# What a key that is not an admin's may look at, of its own workspace.
OWN = set(
    "advise summarizeAdvice plan planChoices planWithProgress getAbout getDivergence"
    " listWorkspaces getWorkspace listKeys getUsage getUsageGroups getLatencySamples listLeases"
    " getSavings getLatency listPrefixes listRefusals countRefusals listLimited searchTurns"
    " getTurn getConversation getContent getBeginning exportUsage exportTrace"
    " listConditions".split()
)
CONTENTS = {"getContent", "getBeginning"}
READS_BY_POST = {"advise", "plan", "planWithProgress"}
NO_KEYS = ("none", "wrong", "revoked", "expired", "archived")
REFUSED = {
    # In Anthropic's, OpenAI's and Google's words.
    401: {"authentication_error", "invalid_request_error", "UNAUTHENTICATED"},
    403: {"permission_error", "invalid_request_error", "PERMISSION_DENIED"},
}


@pytest.fixture(scope="module")
def keys(shared: Stack) -> Iterator[dict[str, str]]:
    """One key of each kind, of the workspace `mine`; `theirs` may have another one's."""
    eventually(shared.is_ready)
    admin = Admin(shared.url)
    by_kind: dict[str, str] = {}
    for workspace in ("mine", "theirs", "archived", "spare"):
        admin.workspace(workspace)
    for scope in ("inference", "read_only", "read_only_admin", "admin"):
        by_kind[scope] = admin.make_key("mine", scope=scope)[1]
    by_kind["theirs"] = admin.make_key("theirs", scope="read_only")[1]
    key_id, by_kind["revoked"] = admin.make_key("mine", scope="admin")
    admin.post(f"keys/{key_id}/revoke")
    _, by_kind["archived"] = admin.make_key("archived", scope="admin")
    admin.post("workspaces/archived/archive")
    soon = soon_after(lambda: admin.make_key("mine", scope="admin"), 2)
    _, by_kind["expired"] = admin.make_key("mine", scope="admin", expires_at=soon.isoformat())
    eventually(lambda: datetime.now(UTC) > soon)
    yield {**by_kind, "wrong": "hf-" + "x" * 43, "configured": ADMIN_KEY}


@pytest.fixture(scope="module")
def http_(shared: Stack) -> Iterator[httpx.Client]:
    headers = {"anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=shared.url, headers=headers, timeout=120, trust_env=False) as client:
        yield client


def call(http_: httpx.Client, operation: Any, key: str | None) -> httpx.Response:
    # Who may change things archives the spare one, not the one whose keys the test needs.
    workspace = "mine" if operation.method == "get" else "spare"
    names = {"workspace_id": workspace, "key_id": "key_none", "turn_id": "msg_none"}
    path = operation.path
    for name, value in {**names, "entry": "0" * 32}.items():
        path = path.replace(f"{{{name}}}", value)
    content = {"json": {}} if operation.body is not None else {}
    return http_.request(
        operation.method, path, headers={"x-api-key": key} if key else {}, **content
    )


def expected(operation: Any, kind: str) -> int | None:
    """The status of a key that may not, None for one that may."""
    is_admin = operation.path.startswith(("/admin", "/v1/organizations"))
    if kind in NO_KEYS:
        return 401
    if kind == "configured":
        return None if is_admin else 401
    if kind == "admin":
        return None
    if kind == "read_only_admin":
        is_read = operation.method == "get" or operation.id in READS_BY_POST
        is_read = is_read and operation.id not in CONTENTS
        return None if is_admin and is_read else 403
    if is_admin:
        return None if operation.id in OWN else 403
    return 403 if kind == "read_only" else None


@pytest.mark.parametrize("operation", CLOSED, ids=lambda operation: operation.id)
def test_each_route_by_each_key(http_: httpx.Client, keys: dict[str, str], operation: Any) -> None:
    """A key that ended is answered like one that never was."""
    shapes = {}
    for kind in (*NO_KEYS, "inference", "read_only", "read_only_admin", "admin", "configured"):
        reply = call(http_, operation, keys.get(kind))
        status = expected(operation, kind)
        if status is None:
            assert reply.status_code not in (401, 403), (kind, reply.text)
            continue
        assert reply.status_code == status, (kind, reply.text)
        error = reply.json()["error"]
        assert error.get("type", error.get("status")) in REFUSED[status]
        assert "anthropic-workspace-id" not in reply.headers
        request_id = reply.headers.get("request-id") or reply.headers["x-request-id"]
        # Whether an early answer is the connection's last depends on how much of the request had
        # come by then, and on nothing of the key.
        headers = sorted(set(reply.headers) - {"connection"})
        shapes[kind] = reply.text.replace(request_id, ""), headers
    assert shapes["wrong"] == shapes["revoked"] == shapes["expired"] == shapes["archived"]


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.mark.parametrize("kind", ["none", "wrong", "read_only"])
@pytest.mark.parametrize("path", sorted({route.path for route in APPLICATION.routes}))
def test_no_method_of_any_route_fails_by_itself(
    stack: Stack, http_: httpx.Client, keys: dict[str, str], path: str, kind: str
) -> None:
    """OPTIONS without a key was a 500 and a traceback on every route of the admin API."""
    served = re.sub(r"\{[^}]*\}", "none", path)
    headers = {"x-api-key": keys[kind]} if kind in keys else {}
    for method in METHODS:
        reply = http_.request(method, served, headers=headers)
        assert reply.status_code < 500 or reply.json()["error"]["type"] == "overloaded_error", (
            method,
            reply.text,
        )
        if method == "OPTIONS":
            assert reply.status_code == 204 and "OPTIONS" in reply.headers["allow"]
            assert not reply.content


@pytest.mark.parametrize("path", ["/admin%2fv1%2fkeys", "/admin%2Fv1/keys", "/%61dmin/v1/keys"])
def test_an_encoded_path_does_not_pass_a_proxy_that_closes_the_admin_api(
    stack: Stack, keys: dict[str, str], path: str
) -> None:
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=60)
    connection.request("GET", path, headers={"x-api-key": keys["admin"]})
    reply = connection.getresponse()
    assert reply.status == 404 and b"percent-encoded" in reply.read()
    connection.close()


def test_a_reader_sees_its_workspace_and_no_others(stack: Stack, keys: dict[str, str]) -> None:
    mine = Admin(stack.url, keys["read_only"])
    theirs = Admin(stack.url, keys["theirs"])
    assert [workspace["id"] for workspace in mine.get("workspaces")] == ["mine"]
    assert [workspace["id"] for workspace in theirs.get("workspaces")] == ["theirs"]
    assert mine.get("workspaces/mine")["workspace"]["id"] == "mine"
    hidden = mine.get("workspaces/theirs", status=404)["error"]
    unknown = mine.get("workspaces/nobody", status=404)["error"]
    assert hidden["message"].replace("theirs", "nobody") == unknown["message"]
    assert {key["workspace"] for key in mine.get("keys")} == {"mine"}
    assert mine.get("keys?workspace=theirs") == []
    assert {key["workspace"] for key in Admin(stack.url).get("keys")} > {"mine", "theirs"}
    about = mine.get("about")
    assert (about["workspace"], about["workspaces"]) == ("mine", ["mine"])
    assert {"mine", "theirs"} < set(Admin(stack.url).get("about")["workspaces"])


def test_an_admin_key_works_for_its_workspace(stack: Stack, keys: dict[str, str]) -> None:
    admin = Admin(stack.url, keys["admin"])
    admin.workspace("made")
    assert "made" in [workspace["id"] for workspace in admin.get("workspaces")]
    with stack.http(keys["admin"]) as http:
        reply = http.post("/v1/messages", json=body())
    assert (reply.status_code, reply.headers["anthropic-workspace-id"]) == (200, "mine")


def test_no_answer_after_its_making_shows_a_key_or_its_digest(
    stack: Stack, keys: dict[str, str]
) -> None:
    text = str(Admin(stack.url).get("keys")) + str(Admin(stack.url).get("workspaces"))
    for key in keys.values():
        assert key not in text
    assert "digest" not in text


@pytest.mark.parametrize(
    ("path", "document", "named"),
    [
        ("workspaces", {}, ["id: field required"]),
        (
            "workspaces",
            {"id": "-x", "requests_per_minute": 0, "lease_share": 1.5, "nonsense": 1},
            ["id: ", "requests_per_minute: ", "lease_share: ", "nonsense: unknown field"],
        ),
        ("workspaces", {"id": "ok", "tokens_per_minute": "many"}, ["tokens_per_minute: "]),
        ("workspaces", {"id": "a/b"}, ["id: "]),
        ("workspaces", {"id": "default"}, ["id: there is a workspace `default` already"]),
        ("workspaces/mine", {"monthly_spend_nano": -1}, ["monthly_spend_nano: "]),
        ("workspaces/mine", {"display_name": ""}, ["display_name: "]),
        ("workspaces/default/archive", None, ["workspace: the default"]),
        ("keys", {"workspace": "mine", "scope": "all"}, ["scope: "]),
        ("keys", {"workspace": "mine", "expires_at": "2027-01-01T00:00:00"}, ["expires_at: "]),
        ("keys", {"workspace": "mine", "expires_at": "2020-01-01T00:00:00Z"}, ["in the future"]),
        ("keys/key_0/rotate", {"grace_seconds": -1}, ["grace_seconds: "]),
        ("keys", [1], ["must be a JSON object"]),
    ],
)
def test_every_bad_field_is_named(
    stack: Stack, keys: dict[str, str], path: str, document: Any, named: list[str]
) -> None:
    error = Admin(stack.url).post(path, document, status=400)["error"]
    assert error["type"] == "invalid_request_error"
    for name in named:
        assert name in error["message"]


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("workspaces/nobody", {}),
        ("workspaces/nobody/archive", None),
        ("workspaces/%00", {}),
        ("keys", {"workspace": "nobody"}),
        ("keys/key_0123456789abcdef/revoke", None),
        ("keys/key_0123456789abcdef/rotate", {}),
        ("keys/%00/revoke", None),
    ],
)
def test_what_there_is_not_is_a_404(stack: Stack, path: str, document: Any) -> None:
    assert Admin(stack.url).post(path, document, status=404)["error"]["type"] == "not_found_error"


def fuzzed(seed: random.Random) -> tuple[str, bytes]:
    """A header that could carry a key, and bytes that are none."""
    name = seed.choice(["x-api-key", "authorization"])
    header = bytearray(API_KEY.encode() if name == "x-api-key" else b"Bearer " + API_KEY.encode())
    for _ in range(seed.randint(1, 4)):
        at = seed.randrange(len(header) + 1)
        match seed.randrange(5):
            case 0:
                header[at:at] = bytes(seed.randrange(256) for _ in range(seed.randint(1, 12)))
            case 1:
                del header[at : at + seed.randint(1, 12)]
            case 2:
                header[at:at] = seed.choice([b"\xff\xfe", b"\x00", b"' OR 1=1 --", b"%00", b"\x7f"])
            case 3:
                header = bytearray(
                    seed.choice([b"", b" ", b"Basic YTpi", b"Bearer", b"Bearer  \t"])
                )
            case _:
                header = header * seed.randint(2, 40)
    value = bytes(header).replace(b"\r", b"?").replace(b"\n", b"?")
    return name, value.replace(API_KEY.encode(), b"hf-test-kez")


def test_no_header_that_is_not_a_key_gets_in_or_breaks_anything(stack: Stack) -> None:
    seed = random.Random(20261121)
    statuses = Counter[int]()
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=120)
    for _ in range(NUM_FUZZED):
        name, value = fuzzed(seed)
        connection.putrequest("GET", seed.choice(["/v1/models", "/admin/v1/workspaces"]))
        connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        text = reply.read()
        # 400 is the HTTP parser's own, where the bytes are no header at all; 431, too long a one.
        assert reply.status in (400, 401, 431), (name, value, text)
        if reply.status == 401:
            assert b"authentication_error" in text or b"invalid_request_error" in text
        else:
            connection.close()
        statuses[reply.status] += 1
    connection.close()
    assert statuses[401] > NUM_FUZZED / 4, statuses
    with stack.http() as http_:
        assert http_.post("/v1/messages", json=body()).status_code == 200
