"""The dashboard in a real browser, before a real gateway and the synthetic engine."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from anthropic import Anthropic, RateLimitError
from playwright.sync_api import Browser

from dashboard.access.document import document
from scripts.bench.load import marked
from scripts.docs.page_matrix import CHECKS
from scripts.setup.chromium import browsing, find_chromium
from scripts.stack import ADMIN_KEY, API_KEY, running_stack
from tests.dashboard.ledgers import HOSTILE, fill, hostile
from tests.dashboard.page import WAIT_MS, Visit, running_dashboard
from tests.gateway.admin_client import Admin
from tests.gateway.advice.weeks import week
from tests.gateway.serving import eventually, make_settings
from tests.gateway.serving import fill as put

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium"),
]
PAGES = ("/", "/savings", "/workspaces", "/requests", "/why")
SCRIPT = re.compile(r"static/js/[\w.-]+\.js")
# It is large, and few pages show any.
CODE = re.compile("/(StreamlitSyntaxHighlighter|hastscript)\\.")
CHAT = """{"messages": [{"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"}]}"""
BOOK = "A lease holds blocks until it ends. " * 120


@dataclass(frozen=True)
class Site:
    gateway: str
    url: str
    browser: Browser
    theirs: str  # a key of the workspace `theirs`

    @property
    def admin(self) -> Admin:
        return Admin(self.gateway)

    def key_of(self, workspace: str, **limits: int) -> str:
        """A key of a new workspace."""
        self.admin.workspace(workspace, **limits)
        return self.admin.make_key(workspace)[1]

    def ask(self, system: str, key: str = API_KEY) -> str:
        """One request with a marked system prompt; its id, once it is in the ledger."""
        with Anthropic(base_url=self.gateway, api_key=key, max_retries=0, timeout=120) as client:
            message = client.messages.create(
                model="holdfast-demo",
                max_tokens=8,
                system=marked(system),  # type: ignore[arg-type]
                messages=[{"role": "user", "content": "What is a lease?"}],
            )
        self.admin.recorded(message.id)
        return message.id


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    fill(folder / "data", hostile())
    put(make_settings(folder / "data"), list(week()))
    engine = {"ENGINE_MIN_CACHE_TOKENS": "64"}
    with (
        running_stack(folder / "data", "synthetic", engine) as stack,
        running_dashboard(stack.gateway, folder) as url,
        browsing() as opened,
    ):
        admin = Admin(stack.gateway)
        admin.workspace("theirs", display_name=HOSTILE)
        yield Site(stack.gateway, url, opened, admin.make_key("theirs")[1])


@pytest.fixture
def visits(site: Site) -> Iterator[list[Visit]]:
    """What a test opened; each must have been without errors and requests to other hosts."""
    opened: list[Visit] = []
    yield opened
    for visit in opened:
        visit.context.close()
        visit.check()


@pytest.fixture
def admin(site: Site, visits: list[Visit]) -> Visit:
    visits.append(Visit(site.browser, site.url, ADMIN_KEY))
    return visits[-1]


def test_traffic_moves_the_numbers(site: Site, admin: Visit) -> None:
    """Without a reload, and without anything being drawn anew that stays."""
    key = site.key_of("moving")
    site.ask(BOOK, key)
    page = admin.open("/?range=1h&workspace=moving")
    assert admin.metric("Requests") == "1"
    card = page.get_by_test_id("stMetric").first.element_handle()
    for _ in range(3):
        site.ask(BOOK, key)
    page.get_by_test_id("stMetricValue").get_by_text("4", exact=True).wait_for(timeout=WAIT_MS)
    hit_rate = admin.metric("Token hit rate")
    assert 70.0 < float(hit_rate.removesuffix("%")) < 75.0, (
        "three of four read all but the question"
    )
    assert card.evaluate("element => element.isConnected"), "the cards were replaced"


def test_what_to_change_stands_under_the_cards_while_the_page_refreshes(admin: Visit) -> None:
    """The advice asks for itself inside a page that asks for itself, too."""
    page = admin.open("/?range=1h")
    first = page.get_by_test_id("stText").filter(has_text="input tokens)").first
    first.wait_for(timeout=WAIT_MS)
    lines = page.locator(".st-key-week_body").first.get_by_role("link")
    # A line's link comes behind its text.
    lines.first.wait_for(timeout=WAIT_MS)
    cards = page.get_by_test_id("stMetric").first.bounding_box()
    chart = page.get_by_role("heading", name="Prompt tokens by class").bounding_box()
    line = first.bounding_box()
    assert cards and chart and line and cards["y"] < line["y"] < chart["y"]
    count = lines.count()
    update_text = page.get_by_text("Updated").inner_text()
    for _ in range(2):
        page.get_by_text(update_text).wait_for(state="detached", timeout=WAIT_MS)
        update_text = page.get_by_text("Updated").inner_text()
        assert first.is_visible()
        assert lines.count() == count
        assert page.locator(".st-key-week_body").count() == 1, "it is drawn in one place"


def test_a_link_to_share_has_its_range_always(site: Site, admin: Visit) -> None:
    """Also where nobody chose one, on a page that was reached by the menu, and a custom one."""
    page = admin.open("/")
    has = "asked => asked.every(each => location.search.includes(each))"
    page.wait_for_function(has, arg=["range="], timeout=WAIT_MS)
    page.get_by_test_id("stSidebarNavLink").filter(has_text="Savings").click()
    page.wait_for_function("() => location.pathname == '/savings'", timeout=WAIT_MS)
    page.wait_for_function(has, arg=["range="], timeout=WAIT_MS)
    page.get_by_role("radio", name="custom").click()
    page.wait_for_function(has, arg=["range=custom", "from=20", "to=20"], timeout=WAIT_MS)
    admin.wait_until_still()
    shared = admin.open(page.url.removeprefix(site.url))
    assert shared.get_by_role("radio", name="custom").is_checked()
    shared.wait_for_function(has, arg=["range=custom", "from=20", "to=20"], timeout=WAIT_MS)


def test_a_prefix_leads_to_its_requests(site: Site, admin: Visit) -> None:
    key = site.key_of("prefixed")
    ids = {site.ask(BOOK, key) for _ in range(2)}
    site.ask("Another book. " * 400, key)
    turn = site.admin.get(f"turns/{min(ids)}")
    query = f"range=30d&workspace=prefixed&prefix={turn['prefix']}"
    page = admin.open(f"/requests?{query}")
    page.get_by_text("2 of the newest 2 requests").or_(
        page.get_by_text("1 of the newest 2 requests")
    ).wait_for(timeout=WAIT_MS)
    assert page.get_by_label("Prefix id").input_value() == turn["prefix"]


def test_a_workspaces_key_is_offered_only_pages_that_it_may_see(
    site: Site, visits: list[Visit]
) -> None:
    visit = Visit(site.browser, site.url, site.theirs)
    visits.append(visit)
    page = visit.open("/")
    offered = page.get_by_test_id("stSidebarNavLink").all_inner_texts()
    assert {"Overview", "Prefixes and leases", "Workspaces"} <= set(offered)
    assert not {"Memory", "Fleet"} & set(offered)


def test_a_deep_link_opens_one_request(site: Site, admin: Visit) -> None:
    # Prefixes are named every 8,192 characters: these two share the first name.
    site.ask(BOOK * 2 + " Today is Sunday.")
    turn_id = site.ask(BOOK * 2 + " Today is Monday.")
    page = admin.open(f"/requests?request={turn_id}&range=1h")
    page.get_by_text(turn_id).first.wait_for(timeout=WAIT_MS)
    assert admin.metric("Read from cache") == "0"
    page.get_by_text("Why did this miss?").last.click()
    page.get_by_text("What to change").wait_for(timeout=WAIT_MS)
    assert f"miss={turn_id}" in page.url and "range=1h" in page.url
    assert admin.metric("First difference") == "System"
    assert admin.metric("Cost of the miss").startswith("$")
    difference = page.get_by_test_id("stMetric").filter(has_text="First difference").bounding_box()
    verdict = page.get_by_text("What to change").bounding_box()
    assert difference and verdict and difference["y"] < verdict["y"]
    assert admin.metric("Read from cache") == "0"
    assert int(admin.metric("Lost behind the difference").replace(",", "")) > 0
    fields = grid(page, "This request")
    assert all(row["This request"] != row["Earlier"] for row in fields)
    assert "Model" not in {row["What"] for row in fields}
    page.get_by_text("Show also what is the same").click()
    eventually(lambda: "Model" in {row["What"] for row in grid(page, "This request")})
    page.wait_for_url(re.compile(f"miss={turn_id}"), timeout=WAIT_MS)


def test_requests_are_found_by_client_and_by_what_they_read(site: Site, admin: Visit) -> None:
    """Both stand in the link, and whoever opens it has them."""
    key = site.key_of("shares")
    first = site.ask(BOOK, key)
    second = site.ask(BOOK, key)
    client = "Anthropic/Python"
    link = f"/requests?range=1h&workspace=shares&client={client}"
    for share, ids in (
        ("", [second, first]),
        ("&min_read=50", [second]),
        ("&max_read=0", [first]),
    ):
        page = admin.open(f"{link}{share}")
        eventually(
            lambda page=page, ids=ids: (
                [row["Id"].removeprefix("requests?request=") for row in grid(page, "Read (tokens)")]
                == ids
            )
        )
    page = admin.open("/requests?range=1h&workspace=shares&client=curl")
    page.get_by_text("No requests in this range that match").wait_for(timeout=WAIT_MS)
    page.get_by_label("Read at least (%)").fill("5")
    page.get_by_label("Read at least (%)").press("Enter")
    page.get_by_label("Client begins with").fill("Anthropic")
    page.get_by_label("Client begins with").press("Enter")
    page.wait_for_url(re.compile("client=Anthropic.*min_read=5"), timeout=WAIT_MS)
    eventually(lambda: len(grid(page, "Read (tokens)")) == 1)


def test_a_turn_that_read_is_no_miss_and_each_marker_has_its_reason(
    site: Site, admin: Visit
) -> None:
    """Two marked blocks, of which the first was read; the second is the conversation's new end."""
    key = site.key_of("markers")
    old = f"Of old. {BOOK}"
    new = "A new question. " * 40
    with Anthropic(base_url=site.gateway, api_key=key, max_retries=0, timeout=120) as client:
        for system in ([], marked(new)):
            content = [{"type": "text", "text": "What is a lease?"}, *system]
            message = client.messages.create(
                model="holdfast-demo",
                max_tokens=8,
                system=marked(old),  # type: ignore[arg-type]
                messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
            )
            site.admin.recorded(message.id)
    page = admin.open(f"/why?miss={message.id}&range=1h&workspace=markers")
    page.get_by_text("A hit that grew").wait_for(timeout=WAIT_MS)
    page.get_by_text("Read in full: 1 of 2 markers.").wait_for(timeout=WAIT_MS)
    listed = admin.open("/why?range=1h&workspace=markers")
    listed.get_by_text("Requests that read nothing").wait_for(timeout=WAIT_MS)
    listed.get_by_text("Of the newest 1 miss 1 has one reason").wait_for(timeout=WAIT_MS)


def test_misses_lead_to_as_many_requests_as_were_counted(site: Site, admin: Visit) -> None:
    """The filters stay: of one workspace of many."""
    key = site.key_of("counted")
    site.ask(f"To be counted. {BOOK}", key)
    page = admin.open("/?range=1h&workspace=counted")
    page.get_by_role("link", name="First time seen").click()
    page.get_by_text("0 of the newest 1 request read from the cache").wait_for(timeout=WAIT_MS)
    assert "workspace=counted" in page.url and "range=1h" in page.url


def test_what_a_workspace_keeps_is_shown_and_deleted_there(site: Site, admin: Visit) -> None:
    key = site.key_of("keeping", keep_days=3)
    first = site.ask(BOOK, key)
    turn_id = site.ask(BOOK, key)
    page = admin.open(f"/requests?request={turn_id}&range=1h")
    page.get_by_text("Its workspace keeps them").wait_for(timeout=WAIT_MS)
    page.get_by_text("synthetic 0 1 2").first.wait_for(timeout=WAIT_MS)
    page.get_by_text("Its conversation, turn by turn").wait_for(timeout=WAIT_MS)
    page.get_by_text("Prompt", exact=True).click()
    page.get_by_text("A lease holds blocks until it ends").first.wait_for(timeout=WAIT_MS)
    page.get_by_role("button", name="Delete prompt and answer").click()
    page.get_by_text("Its workspace keeps them").wait_for(state="detached", timeout=WAIT_MS)
    site.admin.get(f"turns/{turn_id}/content", status=404)
    site.admin.get(f"turns/{first}/content")


def test_a_prefix_is_called_by_its_first_words_where_they_are_kept(
    site: Site, visits: list[Visit], admin: Visit
) -> None:
    """By whoever may read them: an admin key that may only read sees none."""
    beginning = "The keeper of the lamp writes"
    key = site.key_of("worded", keep_days=3)
    for _ in range(2):
        last = site.ask(f"{beginning}\n all that he sees. {BOOK}", key)
    for path in ("/prefixes?workspace=worded", "/savings?range=1h&workspace=worded"):
        page = admin.open(path)
        eventually(
            lambda page=page: any(
                row["Prefix"].startswith(f"{beginning} all that") for row in grid(page, "Prefix")
            )
        )
    # Memory calls it the same.
    names = {row["Prefix"] for row in grid(admin.open("/prefixes?workspace=worded"), "Prefix")}
    page = admin.open("/memory")
    page.get_by_test_id("stButtonGroup").get_by_text("Prefix", exact=True).click(timeout=WAIT_MS)
    eventually(lambda: names <= {row["Prefix"] for row in grid(page, "Prefix")})
    watching = site.admin.make_key("default", scope="read_only_admin")[1]
    site_visit = Visit(site.browser, site.url, watching)
    visits.append(site_visit)
    page = site_visit.open("/prefixes?workspace=worded")
    eventually(lambda: len(grid(page, "Prefix")) > 0)
    assert beginning not in str(grid(page, "Prefix"))
    site.admin.delete(f"turns/{last}/content")


def test_an_id_in_a_table_leads_to_its_request(site: Site, admin: Visit) -> None:
    key = site.key_of("linked")
    turn_id = site.ask(BOOK, key)
    page = admin.open("/requests?range=1h&workspace=linked")
    table = page.get_by_test_id("stDataFrame").first
    table.wait_for(timeout=WAIT_MS)

    def is_opened() -> bool:
        """The grid is a canvas, painted some time after it stands: a picking box, time, money,
        tokens, the id."""
        table.click(position={"x": 590, "y": 52})
        page.wait_for_timeout(3000)
        return any(f"requests?request={turn_id}" in tab.url for tab in admin.context.pages)

    eventually(is_opened)


def test_a_link_leads_through_the_sign_in(site: Site, visits: list[Visit]) -> None:
    visit = Visit(site.browser, site.url, None)
    visits.append(visit)
    page = visit.page
    page.goto(f"{site.url}/savings?range=6h")
    assert "/login?next=" in page.url
    page.fill("#key", API_KEY)
    page.click("button")
    visit.wait_until_still()
    assert page.url == f"{site.url}/savings?range=6h"
    assert page.get_by_role("heading", name="Savings").is_visible()


def test_filters_stay_from_page_to_page(admin: Visit) -> None:
    page = admin.open("/?range=7d&workspace=default")
    page.get_by_role("link", name="Savings").click()
    page.get_by_role("heading", name="Savings", exact=True).wait_for(timeout=WAIT_MS)
    admin.wait_until_still()
    page.wait_for_url(re.compile("/savings.*range=7d"), timeout=WAIT_MS)
    assert "workspace=default" in page.url


def test_a_workspace_sees_itself_alone(site: Site, visits: list[Visit]) -> None:
    site.ask(BOOK, site.theirs)
    mine = site.ask(BOOK)
    visit = Visit(site.browser, site.url, site.theirs)
    visits.append(visit)
    visit.open("/?range=1h&workspace=default")
    assert visit.metric("Requests") == "1", "the only one that asks with that key"
    assert "Engines now" not in visit.text()
    visit.open(f"/requests?request={mine}")
    visit.page.get_by_text("There is no such request").wait_for(timeout=WAIT_MS)
    visit.open(f"/why?miss={mine}")
    visit.page.get_by_text("There is no such request").wait_for(timeout=WAIT_MS)
    visit.open("/workspaces")
    assert visit.metric("With traffic") == "1"


def grid(page: Any, column: str) -> list[dict[str, str]]:
    """The rows of the first table with such a column, as a screen reader finds them."""
    return page.evaluate(  # type: ignore[no-any-return]
        """column => {
            const texts = row => [...row.querySelectorAll('th, td')].map(cell => cell.textContent);
            for (const table of document.querySelectorAll('canvas table')) {
                const [head, ...rows] = [...table.querySelectorAll('tr')].map(texts);
                if (head && head.includes(column))
                    return rows.map(
                        row => Object.fromEntries(row.map((cell, i) => [head[i], cell])));
            }
            return [];
        }""",
        column,
    )


def test_the_id_of_any_dialect_opens_its_request(site: Site, admin: Visit) -> None:
    options = {"model": "synthetic", "max_tokens": 4}
    messages = [{"role": "user", "content": "What is a lease?"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**options, "messages": messages},
        "/v1/responses": {"model": "synthetic", "max_output_tokens": 16, "input": "Why?"},
        "/v1beta/models/synthetic:generateContent": {
            "contents": [{"role": "user", "parts": [{"text": "What is a lease?"}]}],
            "generationConfig": {"maxOutputTokens": 4},
        },
    }
    ids = []
    batch = {"requests": [{"custom_id": "a", "params": {**options, "messages": messages}}]}
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=site.gateway, headers=headers, timeout=120) as http:
        for path, body in bodies.items():
            reply = http.post(path, json=body).raise_for_status()
            answer = reply.json()
            ids += [answer.get("id") or answer["responseId"], reply.headers["x-request-id"]]
        created = http.post("/v1/messages/batches", json=batch).raise_for_status().json()
        results = f"/v1/messages/batches/{created['id']}/results"
        eventually(lambda: http.get(results).status_code == 200)
        ids.append(http.get(results).json()["result"]["message"]["id"])
    assert [turn_id.partition("-")[0].partition("_")[0] for turn_id in ids[:4:2]] == [
        "chatcmpl",
        "resp",
    ]
    for turn_id in ids:
        site.admin.recorded(turn_id)
        page = admin.open(f"/requests?request={turn_id}&range=1h")
        page.get_by_text(re.compile("^msg_[0-9a-f]{28} · ")).wait_for(timeout=WAIT_MS)
        assert admin.metric("Prompt tokens") != "0"


def test_a_plan_of_a_range_is_drawn_beside_the_engines_that_there_are(
    site: Site, admin: Visit
) -> None:
    page = admin.open("/plan?range=7d&workspace=sound")
    page.get_by_text(re.compile(r"engine, each with [\d,]+ tokens on the device")).first.wait_for(
        timeout=WAIT_MS
    )
    # No engine serves the models of the range any more, so its memory is typed.
    page.get_by_label("Tokens on the device").fill("163840")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_text("What each change would give").wait_for(timeout=WAIT_MS)
    eventually(lambda: grid(page, "Share best effort"))
    rows = grid(page, "Share best effort")
    labels = [row["Fleet"] for row in rows]
    assert "1 times the memory" in labels
    assert all(row["Engines"] for row in rows)


def test_what_a_limit_refused_is_counted_and_named(site: Site, admin: Visit) -> None:
    key = site.key_of("limited", requests_per_minute=1)
    site.ask(BOOK, key)
    for _ in range(2):
        with pytest.raises(RateLimitError):
            site.ask(BOOK, key)
    page = admin.open("/?range=1h&workspace=limited")
    page.get_by_text("0 failed, 2 refused").wait_for(timeout=WAIT_MS)
    page = admin.open("/workspaces?range=1h&workspace=limited")
    eventually(lambda: grid(page, "Refused requests"))
    (row,) = grid(page, "Refused requests")
    assert row["Refused requests"] == "2" and row["Limit"] == "requests per minute"


def test_prefixes_are_told_by_kind_and_their_rest_is_within_their_ttl(
    site: Site, admin: Visit
) -> None:
    site.ask(f"A prefix. {BOOK}")
    page = admin.open("/prefixes")
    eventually(lambda: grid(page, "Ends in"))
    for row in grid(page, "Ends in"):
        assert row["Tokens"] != "0" and not re.fullmatch("[0-9a-f]{16,}", row["Prefix"])
        minutes = int(row["Ends in"].partition(":")[0])
        assert {"5m": minutes <= 5, "1h": minutes <= 60}.get(row["TTL"], True)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/requests",
        *(
            pytest.param(path, marks=pytest.mark.slow)
            for path in ("/savings", "/workspaces", "/why", "/latency")
        ),
    ],
)
def test_hostile_names_are_only_names(admin: Visit, path: str) -> None:
    """Nothing is loaded, run or marked up: `visits` sees requests, errors and dialogs."""
    page = admin.open(f"{path}?range=24h&request=msg_{1:028x}&miss=msg_{1:028x}")
    assert page.locator("img[src*='evil']").count() == 0
    admin.choose_from("Model", HOSTILE)
    assert page.locator("img[src*='evil']").count() == 0


def problems_of(page: Any) -> list[str]:
    """What is wrong and stays so: charts and tables are drawn by the browser, behind the script."""
    problems: list[str] = []
    for _ in range(40):
        page.wait_for_timeout(1500)
        problems = page.evaluate(CHECKS)
        if not problems:
            break
    return problems


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        # scripts/long_tests pages has more of them.
        pytest.param("light", 1200, marks=pytest.mark.slow),
        ("dark", 480),
    ],
)
def test_all_text_can_be_read(site: Site, visits: list[Visit], scheme: str, width: int) -> None:
    """Contrast of 4.5 to 1 at least, nothing clipped or overlapping, nothing wider than the window,
    on a phone too."""
    turn_id = site.ask(BOOK + f" In {scheme}.")
    viewport = {"width": width, "height": 1000}
    visit = Visit(site.browser, site.url, ADMIN_KEY, color_scheme=scheme, viewport=viewport)
    visits.append(visit)
    for path in (*PAGES, "/latency", "/memory", "/plan"):
        page = visit.open(f"{path}?range=24h&request={turn_id}&miss={turn_id}")
        assert problems_of(page) == [], path


LOW = {1440: (70, 96), 480: (100, 130)}
"""By the window's width the most pixels of a card's words, and of a card in a row with a line."""


@pytest.mark.parametrize("width", LOW)
def test_cards_are_low(site: Site, visits: list[Visit], width: int) -> None:
    """Their numbers are text of 16 pixels at least."""
    viewport = {"width": width, "height": 1000}
    visit = Visit(site.browser, site.url, ADMIN_KEY, viewport=viewport)
    visits.append(visit)
    page = visit.open("/?range=7d")
    page.locator("[data-testid=stMetricChart] svg").first.wait_for(timeout=WAIT_MS)
    for card in page.get_by_test_id("stMetric").all():
        box = card.bounding_box()
        words = card.locator("> div").first.bounding_box()
        assert words and words["height"] <= LOW[width][0], card.inner_text()
        assert box and box["height"] <= LOW[width][1], card.inner_text()
        size: str = card.get_by_test_id("stMetricValue").evaluate(
            "value => getComputedStyle(value).fontSize"
        )
        assert float(size.removesuffix("px")) >= 16
    cards = page.locator("[data-testid=stMetric] > div").all()
    for part in cards:
        inside = part.bounding_box()
        card_box = part.locator("..").bounding_box()
        assert inside and card_box
        assert inside["y"] + inside["height"] <= card_box["y"] + card_box["height"] + 1


def test_a_phone_folds_filters_and_says_what_they_are_set_to(
    site: Site, visits: list[Visit]
) -> None:
    viewport = {"width": 480, "height": 1000}
    visit = Visit(site.browser, site.url, ADMIN_KEY, viewport=viewport)
    visits.append(visit)
    page = visit.open("/requests?range=7d&model=holdfast-demo&outcome=error")
    model = page.get_by_label("Model")
    outcome = page.get_by_label("Outcome")
    assert not model.first.is_visible() and not outcome.first.is_visible()
    page.get_by_text("Filters: the last 7 days, 1 more").click()
    model.first.wait_for(timeout=WAIT_MS)
    page.get_by_text("Filters of requests: 1 set").click()
    outcome.first.wait_for(timeout=WAIT_MS)
    page.set_viewport_size({"width": 1200, "height": 1000})
    page.get_by_text("Filters: the last 7 days, 1 more").wait_for(state="hidden", timeout=WAIT_MS)
    assert model.first.is_visible() and outcome.first.is_visible()


@pytest.mark.parametrize("path", ["/", "/requests", "/advice", "/workspaces"])
def test_what_a_page_draws_is_loaded_with_it(admin: Visit, path: str) -> None:
    """What comes behind a sign-out, such as late advice, has the scripts that draw it: the server
    refuses them then, and the browser logs an error."""
    loaded = set[str]()
    admin.page.on("request", lambda request: loaded.update(SCRIPT.findall(request.url)))
    page = admin.open(path)
    if path == "/":
        links = page.locator(".st-key-week_body").first.get_by_role("link")
        links.first.wait_for(timeout=WAIT_MS)
    assert loaded
    named = set(SCRIPT.findall(document()))
    late = {file for file in loaded - named if not CODE.search(file)}
    assert not late, "its document does not name them"


@pytest.mark.parametrize("path", ["/", pytest.param("/latency", marks=pytest.mark.slow)])
def test_signing_out_ends_what_is_open_elsewhere(admin: Visit, path: str) -> None:
    """Also where the overview's advice has not come yet."""
    page = admin.open(path)
    admin.wait_until_still()
    page.wait_for_load_state("networkidle", timeout=WAIT_MS)
    second_tab = admin.context.new_page()
    second_tab.goto(f"{admin.url}/savings")
    second_tab.get_by_text("Updated").wait_for(timeout=WAIT_MS)
    second_tab.get_by_role("button", name="Sign out").click()
    second_tab.get_by_text("Reload this page to sign in again").wait_for(timeout=WAIT_MS)
    page.get_by_text("Reload this page to sign in again").wait_for(timeout=WAIT_MS)
    page.reload()
    sign_in = urlsplit(page.url)
    assert sign_in.path == "/login"
    assert parse_qs(sign_in.query).get("next", ["/"]) == [path]


def test_a_new_key_stays_until_it_is_dismissed(site: Site, admin: Visit) -> None:
    """The page's own refresh took it away within 5 seconds."""
    site.admin.workspace("made")
    page = admin.open("/workspaces?range=1h")
    page.get_by_text("Make and change workspaces and keys").click()
    page.get_by_role("tab", name="New or rotated key").click()
    page.get_by_role("button", name="Create key").click()
    notice = page.get_by_text("The key is shown this once")
    notice.wait_for(timeout=WAIT_MS)
    before = page.get_by_text("Updated").first.inner_text()
    page.wait_for_function(
        "told => !document.body.innerText.includes(told)", arg=before, timeout=WAIT_MS
    )
    assert notice.is_visible()
    assert page.get_by_role("button", name="Create key").is_visible(), "the form stays open"
    page.get_by_role("button", name="Dismiss").click()
    notice.wait_for(state="detached", timeout=WAIT_MS)


def test_a_lease_is_dropped_by_a_click_and_gone_in_the_engine(site: Site, admin: Visit) -> None:
    key = site.key_of("dropping")
    site.ask(BOOK, key)
    assert len(site.admin.get("leases?workspace=dropping")) == 1
    page = admin.open("/prefixes?workspace=dropping")
    table = page.get_by_test_id("stDataFrame").first
    table.wait_for(timeout=WAIT_MS)
    # The table is a canvas; its first column holds the box that picks a row.
    table.click(position={"x": 16, "y": 52})
    drop = page.get_by_role("button", name="Drop it")
    drop.wait_for(timeout=WAIT_MS)
    drop.click()
    page.get_by_text("Dropped. The engine holds it no more.").wait_for(timeout=WAIT_MS)
    assert site.admin.get("leases?workspace=dropping") == []
    again = site.ask(BOOK, key)
    assert site.admin.get(f"turns/{again}")["miss_reason"] == "dropped"


def test_the_playground_shows_what_became_of_the_prompt(site: Site, visits: list[Visit]) -> None:
    visits.append(Visit(site.browser, site.url, API_KEY))
    page = visits[-1].page
    page.goto(f"{site.url}/playground")
    button = page.get_by_role("button", name="Send", exact=True)
    button.click(timeout=WAIT_MS)
    page.get_by_text("written, 1 hour").first.wait_for(timeout=WAIT_MS)
    page.get_by_text("synthetic 0 1 2").first.wait_for(timeout=WAIT_MS)
    button.click(timeout=WAIT_MS)
    page.get_by_text(re.compile(r"^[\d,]+ read from cache$")).first.wait_for(timeout=WAIT_MS)
    page.get_by_text("JSON or curl").first.click()
    pasted = page.get_by_label("A JSON body, or a curl command, of any API")
    pasted.fill(f"curl x/v1/chat/completions -d '{CHAT}'")
    pasted.press("Control+Enter")
    page.get_by_text("OpenAI Chat Completions, sent as").wait_for(timeout=WAIT_MS)
    page.get_by_role("button", name="Take it apart into blocks").click()
    page.get_by_label("1. System").wait_for(timeout=WAIT_MS)
    assert page.get_by_label("2. User").input_value() == "Who are you?"
