"""Where engines are: what may stand in HOLDFAST_ENGINES and in the admin API."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

ENGINE_NAME_CHARACTERS = 64
URL_MUST_BE = "must be http:// or https://, a host, and no more than a port and a path"
_ENGINE_NAME = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,63}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:\[\]-]")
# ASCII without blanks; the path without a query.
_URL = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]+)(?::[0-9]{1,5})?(?:/[!\"$->@-~]*)?"
)


class EnginePlace(NamedTuple):
    """One engine of HOLDFAST_ENGINES.

    Ledger rows, metrics and the admin API call the engine by this name. The name depends on the
    engine's own entry alone, so a list in another order means the same engines.
    """

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "EnginePlace":
        """Read `name=URL`, or a URL alone.

        An engine without a name is called by its host and port (and path).
        """
        if not text.startswith(("http://", "https://")):
            name, _, url = text.partition("=")
            return cls(name.strip(), url.strip())
        place = text.partition("://")[2]
        return cls(_NOT_IN_NAMES.sub("-", place)[:ENGINE_NAME_CHARACTERS].rstrip("-"), text)

    @property
    def is_name(self) -> bool:
        return bool(_ENGINE_NAME.fullmatch(self.name))


def is_engine_url(url: str) -> bool:
    """Whether an engine may have this URL. Its path goes into request lines, and it is logged."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:  # brackets, a port above 65,535, a label above 63 characters
        return False
    return _URL.fullmatch(url) is not None and bool(host) and port != 0


def engine_list(text: str) -> tuple[str, ...]:
    """The entries of HOLDFAST_ENGINES. Raise ValueError for a wrong one.

    The message names the entry by its number, because a URL may have a password.
    """
    entries = tuple(entry.strip().rstrip("/") for entry in text.split(",") if entry.strip())
    if not entries:
        raise ValueError("must be http(s) URLs, or name=URL, separated by commas")
    places = [EnginePlace.parse(entry) for entry in entries]
    for number, place in enumerate(places, 1):
        if not is_engine_url(place.url):
            raise ValueError(f"URL {number} {URL_MUST_BE}")
        if not place.is_name:
            raise ValueError(
                f"name {number} must be 1 to {ENGINE_NAME_CHARACTERS} letters, digits and any of"
                " . _ : [ ] -, and begin with a letter or digit"
            )
    for found in ([place.url for place in places], [place.name for place in places]):
        if len(set(found)) != len(found):
            raise ValueError("names an engine twice")
    return entries
