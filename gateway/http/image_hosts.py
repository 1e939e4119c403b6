"""Images by address, from hosts that the operator lists.

If any host were called, the writer of a prompt could choose what this server calls (CWE-918). These
rules are from OWASP's cheat sheet on server-side request forgery:

- Only listed hosts are called, by `https` on its own port. No redirect is followed.
- The connection goes to the address that was checked, so a second look-up can't change it (DNS
  rebinding).
- The address is none of RFC 6890's special ones, and carries no IPv4 address inside.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from ipaddress import IPv6Address, IPv6Network, ip_address
from socket import SOCK_STREAM

import httpx

from gateway.admission.rates import ReadLimit
from gateway.base.errors import InvalidRequest
from gateway.prompt.images import MAX_IMAGE_BYTES, REFUSED

PORT = 443
SECONDS = 20.0
"""The time for all images of a request. A silence of 5 s ends a fetch before that."""
PER_WORKSPACE = 4
"""How many requests of a workspace fetch images at once."""
MAX_BYTES = 3 * MAX_IMAGE_BYTES
"""The most bytes of all images of a request."""
LookUp = Callable[[str], Awaitable[Sequence[tuple[str, int]]]]
_WITH_IPV4 = [IPv6Network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")]


async def look_up(host: str) -> Sequence[tuple[str, int]]:
    """The addresses and ports of a host. Raise OSError or UnicodeError."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, PORT, type=SOCK_STREAM)
    return [(str(address[0]), PORT) for *_, address in answers]


def is_public(address: str) -> bool:
    ip = ip_address(address)
    if isinstance(ip, IPv6Address) and (
        ip.sixtofour or ip.teredo or any(ip in net for net in _WITH_IPV4)
    ):
        return False
    return ip.is_global and not ip.is_multicast


class _Refused(Exception):
    """An address is not fetched, or its answer is refused."""


class ImageHosts:
    """Fetches from `hosts` in bounded time and size, a few requests of a workspace at a time."""

    def __init__(
        self,
        hosts: Collection[str],
        *,
        find: LookUp = look_up,
        is_allowed: Callable[[str], bool] = is_public,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """`trust` says which certificates are trusted; by default those that the system trusts."""
        self.hosts = frozenset(host.lower() for host in hosts)
        self._find = find
        self._is_allowed = is_allowed
        self._trust = trust or (ssl.create_default_context() if hosts else None)
        self._places = ReadLimit(PER_WORKSPACE, 0.0, "requests with images by address at once")

    async def fetch(
        self, workspace: str, places: Mapping[str, str], take: Callable[[int], Awaitable[None]]
    ) -> dict[str, bytes]:
        """The files at the addresses in `places`, which has the place of each in the request.
        `take` is awaited with the number of bytes of each file, and may refuse it. Raise
        InvalidRequest with the place, or RateLimited."""
        files = dict[str, bytes]()
        async with self._places.taken(workspace):
            deadline = asyncio.get_running_loop().time() + SECONDS
            room = MAX_BYTES
            for address, place in places.items():
                try:
                    async with asyncio.timeout_at(deadline):
                        file = await self._get(address, min(room, MAX_IMAGE_BYTES))
                except _Refused as error:
                    raise InvalidRequest(f"{place}: {error}. {REFUSED}") from None
                except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
                    raise InvalidRequest(f"{place}: does not answer. {REFUSED}") from None
                await take(len(file))
                files[address] = file
                room = room - len(file)
        return files

    async def _get(self, address: str, room: int) -> bytes:
        # The same parser checks and calls, because two parsers may read an address in two ways.
        url = httpx.URL(address)
        if url.scheme != "https" or url.port not in (None, PORT) or url.userinfo:
            raise _Refused("must be https, without a port or a name of a user")
        host = url.raw_host.decode("ascii")
        if host not in self.hosts:
            raise _Refused("this server fetches no addresses of that host")
        addresses = await self._find(host)
        if not addresses or not all(self._is_allowed(address) for address, _ in addresses):
            raise _Refused("its host has an address that is not public")
        assert self._trust is not None
        # Connections are not kept, because one to another host at this address would be reused.
        async with (
            httpx.AsyncClient(
                verify=self._trust,
                trust_env=False,
                follow_redirects=False,
                limits=httpx.Limits(max_keepalive_connections=0),
            ) as client,
            client.stream(
                "GET",
                url.copy_with(host=addresses[0][0], port=addresses[0][1]),
                headers={"host": host, "accept": "image/*", "accept-encoding": "identity"},
                extensions={"sni_hostname": host},
            ) as response,
        ):
            if response.status_code != 200:
                raise _Refused(f"its server answered with the status {response.status_code}")
            file = bytearray()
            async for chunk in response.aiter_raw():
                file += chunk
                if len(file) > room:
                    raise _Refused(f"at most {room} bytes")
        return bytes(file)
