"""How `scripts/compose_check` waits for the dashboard on a machine that is busy."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

pytest.importorskip("playwright")

from scripts.compose.check import NUM_CARDS, sign_in
from scripts.compose.project import ComposeError
from scripts.setup.chromium import find_chromium

if find_chromium() is None:
    pytest.skip("no Chromium here", allow_module_level=True)

# One card at first, none while the page is drawn again, then all of them without numbers.
PAGE = """<!doctype html><link rel="icon" href="data:,"><input id="key"><button>Sign in</button>
<p>Updated</p><div id="cards"><div data-testid="stMetric">Requests 1</div></div>
<script>
const card = (i, text) => `<div data-testid="stMetric">Card${i} ${text}</div>`;
const draw = (num, text) => document.getElementById("cards").innerHTML =
  Array.from({length: num}, (_, i) => card(i, text)).join("");
setTimeout(() => draw(0, ""), 300);
setTimeout(() => draw(4, ""), 1500);
setTimeout(() => END, 3000);
</script>"""
ALL = 'draw(4, "7")'
EXCEPTION = 'document.body.innerHTML += `<p data-testid="stException">KeyError</p>`'


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        end = EXCEPTION if self.path.startswith("/broken") else ALL
        body = PAGE.replace("END", end).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads this."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_cards_are_read_when_all_are_there_however_often_the_page_is_drawn(url: str) -> None:
    assert sign_in(url, "key") == "; ".join(f"Card{number} 7" for number in range(NUM_CARDS))


def test_an_exception_on_the_page_is_told_and_not_waited_for(url: str) -> None:
    with pytest.raises(ComposeError, match="KeyError"):
        sign_in(f"{url}/broken", "key")
