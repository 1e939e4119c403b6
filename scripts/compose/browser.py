"""The dashboard in Chromium: sign in with a key, and see what the gateway has counted."""

from scripts.compose.project import ComposeError
from scripts.setup import chromium

WAIT_MS = 600_000
"""A busy machine needs minutes. A page that shows an error is not waited for."""
NUM_CARDS = 4
# The cards' texts, read at one moment: a page that updates itself replaces them. Undefined until
# there are enough and each has its number, or until the page shows an exception.
CARDS = """
num => {
  const texts = name => [...document.querySelectorAll(`[data-testid="${name}"]`)].map(
    element => element.innerText.split(/\\s+/).filter(word => word).join(" "));
  const cards = texts("stMetric"), errors = texts("stException");
  const isThere = cards.length >= num && cards.every(text => text.includes(" "));
  return isThere || errors.length ? {cards, errors} : undefined;
}
"""


def sign_in(url: str, key: str) -> str:
    """Sign in and return the first cards of the overview.

    Raises ComposeError for any error that the page shows or logs.
    """
    errors: list[str] = []
    with chromium.browsing() as browser:
        page = chromium.new_page(browser)
        page.set_default_timeout(WAIT_MS)
        chromium.listen(page, errors)
        chromium.sign_in(page, url, key)
        page.get_by_text("Updated").first.wait_for()
        seen = page.wait_for_function(CARDS, arg=NUM_CARDS).json_value()
    shown: list[str] = seen["cards"]
    errors += seen["errors"]
    if errors or len(shown) < NUM_CARDS:
        raise ComposeError(f"the dashboard shows {len(shown)} cards and these errors: {errors}")
    return "; ".join(shown[:NUM_CARDS])
