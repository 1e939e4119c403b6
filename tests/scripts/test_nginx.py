"""The configurations of gateway/OPERATING.md, in a real nginx before real servers."""

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dashboard.access.sessions import COOKIE
from scripts.bench.load import ask_now, body_of, headers_of
from scripts.setup.chromium import browsing, find_chromium, sign_in
from scripts.stack import ADMIN_KEY, API_KEY, HOST, ROOT, free_port, running_stack, start, stop
from tests.dashboard.page import WAIT_MS, Visit, running_dashboard
from tests.gateway.serving import eventually

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
GATEWAY_NAME = "api.example.com"
DASHBOARD_NAME = "dashboard.example.com"
MODEL = "synthetic"
DECODE_MS = 50
NUM_TOKENS = 40
# A page that is drawn over its WebSocket shows more than Streamlit's own document.
DRAWN = "Updated"
PRINTED = re.findall(
    r"^```nginx\n(.*?)^```", (ROOT / "gateway" / "OPERATING.md").read_text("utf-8"), re.M | re.S
)


def configure(folder: Path, snippets: list[str]) -> list[str]:
    """Write what a machine with nginx has around the snippets, and a certificate for both names.
    Returns the command that runs nginx on them."""
    (folder / "conf.d").mkdir()
    for number, snippet in enumerate(snippets):
        (folder / "conf.d" / f"holdfast-{number}.conf").write_text(snippet, "utf-8")
    temp_paths = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = f"""
        user {"root" if is_root() else "nobody"};
        daemon off;
        pid {folder}/nginx.pid;
        error_log {folder}/error.log;
        events {{ worker_connections 256; }}
        http {{ access_log off; {temp_paths} include {folder}/conf.d/*.conf; }}
    """
    (folder / "nginx.conf").write_text(main, "utf-8")
    names = f"subjectAltName=DNS:{GATEWAY_NAME},DNS:{DASHBOARD_NAME},IP:{HOST}"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={GATEWAY_NAME}", "-addext", names),
            *("-keyout", folder / "holdfast.key", "-out", folder / "holdfast.crt"),
        ],
        check=True,
        capture_output=True,
    )
    assert NGINX is not None
    return [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]


def is_root() -> bool:
    return Path("/proc/self").stat().st_uid == 0


def may_listen_on(port: int) -> bool:
    """Whether the system lets this user have such a port. Another program's hold is no refusal."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except PermissionError:
            return False
        except OSError:
            return True
    return True


@contextmanager
def running_nginx(folder: Path, snippets: list[str], port: int) -> Iterator[ssl.SSLContext]:
    """Run nginx until it answers at `port`; yields what trusts its certificate."""
    process = start(configure(folder, snippets), {}, folder / "nginx.log")
    try:
        trust = ssl.create_default_context(cafile=str(folder / "holdfast.crt"))
        eventually(lambda: accepts(port))
        yield trust
    finally:
        stop(process)


def accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=5).close()
    except OSError:
        return False
    return True


def placed(snippet: str, places: dict[str, str]) -> str:
    """A snippet with the places of this machine. Each must be in it: else nothing is tested."""
    for printed, ours in places.items():
        assert printed in snippet, printed
        snippet = snippet.replace(printed, ours)
    return snippet


def test_nginx_takes_both_configurations_as_they_are_printed(tmp_path: Path) -> None:
    if not may_listen_on(443):
        pytest.skip("port 443 is not for this user, and nginx -t opens it")
    assert len(PRINTED) == 2
    tried = subprocess.run(
        [*configure(tmp_path, PRINTED), "-t"], capture_output=True, text=True, timeout=60
    )
    assert tried.returncode == 0, tried.stderr
    assert "test is successful" in tried.stderr and "emerg" not in tried.stderr


def test_a_stream_passes_as_it_is_made_and_operators_routes_do_not(tmp_path: Path) -> None:
    port = free_port()
    engine = {"ENGINE_SYNTHETIC_DECODE_MS": str(DECODE_MS), "ENGINE_MIN_CACHE_TOKENS": "64"}
    with running_stack(tmp_path / "data", "synthetic", engine) as stack:
        address = stack.gateway.removeprefix("http://")
        places = {
            "listen 443": f"listen {HOST}:{port}",
            "10.0.0.11:8080": address,
            "server 10.0.0.12:8080": f"server {address}",
        }
        with (
            running_nginx(tmp_path, [placed(PRINTED[0], places)], port) as trust,
            httpx.Client(
                base_url=f"https://{HOST}:{port}",
                headers={**headers_of(API_KEY), "host": GATEWAY_NAME},
                verify=trust,
                timeout=120,
                trust_env=False,
            ) as client,
        ):
            text = "A lease holds blocks until it ends. " * 100
            body = body_of(MODEL, text, "What is a lease?", max_tokens=NUM_TOKENS)
            first = ask_now(client, {**body, "stream": True})
            second = ask_now(client, {**body, "stream": True})
            hidden = [client.get(path).status_code for path in ("/metrics", "/admin/v1/about")]
            models = client.get("/v1/models")
    for answer in (first, second):
        assert answer.is_whole and answer.first_seconds is not None, answer.error
        seconds = NUM_TOKENS * DECODE_MS / 1000
        assert answer.seconds - answer.first_seconds > seconds / 2, "the proxy kept it back"
    written_tokens = first.usage["cache_creation_input_tokens"]
    assert written_tokens and second.usage["cache_read_input_tokens"] == written_tokens
    assert hidden == [404, 404]
    assert models.status_code == 200 and "nginx" in models.headers["server"]


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_the_dashboard_signs_in_and_is_drawn_over_its_websocket(tmp_path: Path) -> None:
    port = free_port()
    names = {"DASHBOARD_ALLOWED_HOSTS": f"{DASHBOARD_NAME},{HOST}"}
    with running_stack(tmp_path / "data", "synthetic") as stack:
        with running_dashboard(
            stack.gateway, tmp_path, DASHBOARD_TRUSTED_PROXIES=HOST, **names
        ) as url:
            places = {
                "listen 443": f"listen {HOST}:{port}",
                "10.0.0.11:8501": url.removeprefix("http://"),
            }
            with (
                running_nginx(tmp_path, [placed(PRINTED[1], places)], port),
                browsing(f"--host-resolver-rules=MAP {DASHBOARD_NAME} {HOST}") as opened,
            ):
                public = f"https://{DASHBOARD_NAME}:{port}"
                visit = Visit(opened, public, None, ignore_https_errors=True)
                sockets: list[str] = []
                visit.page.on("websocket", lambda socket: sockets.append(socket.url))
                sign_in(visit.page, public, ADMIN_KEY)
                visit.page.wait_for_url(f"{public}/", timeout=WAIT_MS, wait_until="commit")
                visit.open("/")
                assert DRAWN in visit.text()
                (session,) = (c for c in visit.context.cookies() if c["name"] == COOKIE)
                visit.check()
    assert sockets and all(name.startswith(public.replace("http", "ws")) for name in sockets)
    assert session["secure"], "the dashboard does not know that the browser used TLS"
