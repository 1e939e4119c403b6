"""The gate, the sign-in page and what they promise, over HTTP and websockets of a real server."""

import http.client
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from dashboard.access import document
from dashboard.access.login import inside
from dashboard.access.sessions import (
    COOKIE,
    MAX_FAILED,
    MAX_SESSIONS,
    Sessions,
)
from dashboard.client import AdminClient
from gateway.structs.fleet import About
from tests.dashboard.conftest import Gateways
from tests.dashboard.fake_admin import ADMIN_KEY as FAKE_KEY
from tests.dashboard.fake_admin import serve_fake
from tests.dashboard.live_answers import about
from tests.dashboard.page import running_dashboard
from tests.gateway.serving import ADMIN_KEY, API_KEY

ABOUT = msgspec.convert(about(), About)
POLICY = re.compile(r"[a-z-]+-src [^;]*(http:|https:|\*)|unsafe-eval")


@dataclass(frozen=True)
class Site:
    url: str
    logs: Path

    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    @contextmanager
    def signed_in(self, key: str = ADMIN_KEY) -> Iterator[httpx.Client]:
        with self.http() as client:
            assert client.post("/login", data={"key": key}).status_code == 303
            yield client

    def websocket_status(self, cookie: str = "", **changes: str) -> int:
        """What the handshake is answered with; 101 opens it."""
        address = urlsplit(self.url).netloc
        connection = http.client.HTTPConnection(address, timeout=120)
        headers = {
            "host": address,
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
            "cookie": f"{COOKIE}={cookie}",
            **changes,
        }
        connection.request("GET", "/_stcore/stream", headers=headers)
        status = connection.getresponse().status
        connection.close()
        return status


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, gateways: Gateways) -> Iterator[Site]:
    logs = tmp_path_factory.mktemp("logs")
    with running_dashboard(gateways.url("empty"), logs) as url:
        yield Site(url, logs)


@pytest.mark.parametrize(
    "path", ["/", "/savings", "/_stcore/host-config", "/media/x.csv", "/static/js/x.js", "/x/../"]
)
def test_nothing_is_there_without_a_session(site: Site, path: str) -> None:
    with site.http(accept="text/html") as client:
        reply = client.get(path)
        assert reply.status_code == 303 and reply.headers["location"].startswith("/login")
    with site.http(accept="*/*") as client:
        assert client.get(path).status_code == 401
        assert client.post(path).status_code == 401
    assert site.websocket_status() == 403
    assert site.websocket_status("forged.aaaaaa.bbbbbbbbbbbbbbbbbbbbbbbbbbb") == 403


@pytest.mark.parametrize("key", [ADMIN_KEY, API_KEY])
def test_a_key_opens_pages_and_the_websocket(site: Site, key: str) -> None:
    with site.signed_in(key) as client:
        assert client.get("/savings").status_code == 200
        assert client.post("/_stcore/agent/interact", json={}).status_code >= 400, "it is off"
        assert client.get("/overview?range=6h").headers["location"] == "/?range=6h"
        assert site.websocket_status(client.cookies[COOKIE]) == 101


def test_the_cookie_and_the_headers(site: Site) -> None:
    with site.http() as client:
        reply = client.post("/login", data={"key": ADMIN_KEY})
        cookie = reply.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and "max-age=43200" in cookie
        assert ADMIN_KEY not in str(reply.headers)
        for path in ("/", "/login", "/_stcore/health", "/nothing/here", "/static/nothing.js"):
            headers = client.get(path).headers
            assert not POLICY.search(headers["content-security-policy"]), path
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "no-referrer"


def test_what_was_typed_is_neither_shown_nor_logged(site: Site) -> None:
    typed = "hf-typed-<script>alert(1)</script>-secret"
    with site.http() as client:
        reply = client.post("/login", data={"key": typed})
        assert reply.status_code == 401 and "does not know this key" in reply.text
        assert "typed" not in reply.text
        for body in ("key=" + "a" * 5000, "key=%ff%fe", "key=a b", "other=1", ""):
            form = {"content-type": "application/x-www-form-urlencoded"}
            assert client.post("/login", content=body, headers=form).status_code == 400
    assert "secret" not in (site.logs / "dashboard.log").read_text("utf-8")


def test_other_sites_can_neither_post_nor_connect(site: Site) -> None:
    with site.signed_in() as client:
        evil = {"origin": "http://evil.test"}
        assert client.post("/login", data={"key": ADMIN_KEY}, headers=evil).status_code == 403
        cookie = client.cookies[COOKIE]
        assert site.websocket_status(cookie, origin="http://evil.test") == 403
        assert site.websocket_status(cookie, host="evil.test") in (400, 403)
        assert client.get("/", headers={"host": "evil.test"}).status_code == 400


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{next}", "https://{here}", "http://localhost:{port}", "null"]
)
def test_another_port_scheme_or_name_of_this_host_is_another_site(site: Site, address: str) -> None:
    """The strict cookie comes with its requests, since a site has no port."""
    here = urlsplit(site.url)
    port = here.port or 0
    origin = address.format(next=port + 1, port=port, here=here.netloc)
    with site.signed_in() as client:
        cookie = client.cookies[COOKIE]
        assert site.websocket_status(cookie, origin=site.url) == 101
        assert site.websocket_status(cookie, origin=origin) == 403
        elsewhere = {"origin": origin, "sec-fetch-site": "same-site"}
        assert client.post("/login", data={"key": ADMIN_KEY}, headers=elsewhere).status_code == 403
        assert client.put("/_stcore/upload_file/a/b", headers=elsewhere).status_code == 403
        assert client.get("/", headers={"origin": origin}).status_code == 200
    assert "DASHBOARD_TRUSTED_PROXIES" in (site.logs / "dashboard.log").read_text("utf-8")


def test_a_link_from_another_site_is_asked_again_with_the_cookie(site: Site) -> None:
    """A strict cookie stays away from the first request; the second one comes from here."""
    with site.http(accept="text/html") as client:
        reply = client.get("/savings?range=6h", headers={"sec-fetch-site": "cross-site"})
        assert reply.status_code == 200 and 'http-equiv="refresh" content="0"' in reply.text


def statuses(site: Site) -> list[int]:
    """Of wrong keys, one more than may fail, each said to be of another address."""
    with site.http() as client:
        return [
            client.post(
                "/login",
                data={"key": f"hf-{number}"},
                headers={"x-forwarded-for": f"203.0.113.{number}"},
            ).status_code
            for number in range(MAX_FAILED + 1)
        ]


def test_wrong_keys_are_slowed_down_from_any_address(gateways: Gateways, tmp_path: Path) -> None:
    with running_dashboard(gateways.url("empty"), tmp_path) as url:
        site = Site(url, tmp_path)
        assert statuses(site) == [401] * MAX_FAILED + [429]
        with site.http() as client:
            reply = client.post("/login", data={"key": ADMIN_KEY})
            assert reply.status_code == 429 and 0 < int(reply.headers["retry-after"]) <= 60


def test_a_trusted_proxy_is_believed_and_without_a_gateway_nobody_comes_in(tmp_path: Path) -> None:
    proxy = {"DASHBOARD_TRUSTED_PROXIES": "127.0.0.1"}
    with ExitStack() as gateway:
        fake = gateway.enter_context(serve_fake())
        fake.answers["/admin/v1/about"] = about()
        with running_dashboard(fake.url, tmp_path, **proxy) as url:
            site = Site(url, tmp_path)
            assert statuses(site) == [401] * (MAX_FAILED + 1)
            with site.http(**{"x-forwarded-proto": "https"}) as client:
                reply = client.post("/login", data={"key": FAKE_KEY})
                assert "secure" in reply.headers["set-cookie"].lower()
                cookie = reply.cookies[COOKIE]
            origin = url.replace("http://", "https://")
            served = {"x-forwarded-proto": "https", "origin": origin}
            assert site.websocket_status(cookie, **served) == 101
            gateway.close()
            with site.http() as client:
                reply = client.post("/login", data={"key": FAKE_KEY})
            assert reply.status_code == 503 and "does not answer" in reply.text
            assert "set-cookie" not in reply.headers


@pytest.mark.parametrize(
    ("target", "led_to"),
    [
        ("/why?miss=msg_1&range=6h", "/why?miss=msg_1&range=6h"),
        ("//evil.test", "/"),
        ("/\\evil.test", "/"),
        ("https://evil.test", "/"),
        ("/a\r\nset-cookie: b", "/"),
        ("javascript:alert(1)", "/"),
        ("", "/"),
    ],
)
def test_sign_in_leads_to_no_other_site(target: str, led_to: str) -> None:
    assert inside(target) == led_to


def client_of(key: str) -> AdminClient:
    return AdminClient("http://127.0.0.1:9", key)


def test_a_session_ends_by_time_by_hand_and_when_there_are_too_many() -> None:
    now = [0.0]
    sessions = Sessions(100.0, lambda: now[0])
    first = sessions.open(client_of("a"), ABOUT)
    second = sessions.open(client_of("a"), ABOUT)
    pair = [sessions.find(first), sessions.find(second)]
    assert pair[0] and pair[1] and pair[0].client is pair[1].client, "one key, one client"
    sessions.close(first)
    assert sessions.find(first) is None and sessions.find(second) is not None
    now[0] = 100.0
    assert sessions.find(second) is None
    client = client_of("b")
    oldest = sessions.open(client, ABOUT)
    for _ in range(MAX_SESSIONS):
        sessions.open(client, ABOUT)
    assert sessions.find(oldest) is None
    sessions.close_all()


def test_the_document_names_the_scripts_that_pages_want_and_all_that_these_import() -> None:
    """Where a version of Streamlit names them otherwise, this fails and pages are only slower."""
    chunks = document.manifest()
    files = document.scripts(chunks)
    for name in document.WANTED:
        assert any(Path(file).name.startswith(f"{name}.") for file in files), name
    assert len(files) == len(set(files)) > len(document.WANTED)
    for chunk in chunks.values():
        if chunk["file"] in files:
            assert {chunks[key]["file"] for key in chunk.get("imports", [])} <= set(files)
    assert not any("PlotlyChart" in file or "EChartsChart" in file for file in files)
    head = document.document().split("</head>")[0]
    for file in files:
        assert (document.FOLDER / file).is_file()
        assert f'<link rel="modulepreload" href="./{file}">' in head
