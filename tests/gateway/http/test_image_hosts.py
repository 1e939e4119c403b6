"""Images by address: fetched from listed hosts alone, over TLS, from checked addresses."""

import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from anthropic import Anthropic, BadRequestError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from openai import OpenAI

from engine.protocol import Image
from gateway.app import create_app
from gateway.http.image_hosts import ImageHosts, is_public, look_up
from tests.e2e.prompts import png
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, eventually, make_settings, running, serve, serve_app
from tests.migrated import migrate

HOST = "pictures.example"
FILE = png(20, 20)


def certified(directory: Path) -> tuple[str, str]:
    """A certificate of HOST and its key, both as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return str(files[0]), str(files[1])


class Pictures:
    """A host of images. `seen` are the paths that were asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        self.seen.append(path)
        assert dict(scope["headers"])[b"host"] == HOST.encode()
        headers = [(b"location", f"https://{HOST}/a.png".encode())] if path == "/moved" else []
        status = {"/moved": 302, "/gone": 404}.get(path, 200)
        body = bytes(11 * 2**20) if path == "/endless" else FILE
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class House(Stack):
    pictures: Pictures


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("gateway")
    pictures = Pictures()
    certificate, key = certified(directory)
    config = uvicorn.Config(
        pictures, "127.0.0.1", 0, log_config=None, ssl_certfile=certificate, ssl_keyfile=key
    )
    with ExitStack() as exits:
        port = urlsplit(exits.enter_context(running(uvicorn.Server(config)))).port or 0
        engine = ScriptedEngine(capabilities=(*ScriptedEngine.capabilities, "images"))
        settings = make_settings(directory, exits.enter_context(serve(engine)))
        migrate(settings)

        async def find(host: str) -> Sequence[tuple[str, int]]:
            if host == HOST:
                return [("127.0.0.1", port)]
            return [("127.0.0.1", port), ("10.1.2.3", port)] if host == "inner.example" else []

        hosts = ImageHosts(
            [HOST, "inner.example", "nowhere.example"],
            find=find,
            is_allowed=lambda address: address == "127.0.0.1" or is_public(address),
            trust=ssl.create_default_context(cafile=certificate),
        )
        app = create_app(settings, image_hosts=hosts)
        stack = House(exits.enter_context(serve_app(app, settings)), engine, directory)
        stack.pictures = pictures
        exits.callback(stack.close)
        eventually(stack.is_ready)
        yield stack


def shown_by(house: House, url: str) -> Image:
    """The image that the engine got of a block of Anthropic's with this address."""
    source: Any = {"type": "url", "url": url}
    content: Any = [{"type": "text", "text": "See."}, {"type": "image", "source": source}]
    client = Anthropic(base_url=house.url, api_key=API_KEY, max_retries=0, timeout=120)
    with client:
        client.messages.create(
            model="scripted", max_tokens=9, messages=[{"role": "user", "content": content}]
        )
    (image,) = house.engine.requests[-1].prompt.images
    return image


def test_an_image_of_a_listed_host_is_known_by_its_bytes(house: House) -> None:
    image = shown_by(house, f"https://{HOST}/a.png")
    assert (image.data, image.media_type, image.width) == (FILE, "image/png", 20)
    assert shown_by(house, f"https://{HOST}/other.png?size=1").id == image.id
    assert house.engine.requests[-1].prompt.messages[0].parts[1].text == image.reference  # type: ignore[union-attr]
    openai = OpenAI(api_key=API_KEY, base_url=f"{house.url}/v1", max_retries=0)
    url: Any = {"type": "image_url", "image_url": {"url": f"https://{HOST}/b.png"}}
    with openai:
        openai.chat.completions.create(
            model="scripted", max_tokens=9, messages=[{"role": "user", "content": [url, url]}]
        )
    assert [part.id for part in house.engine.requests[-1].prompt.images] == [image.id]
    assert house.pictures.seen[-1:] == ["/b.png"] and house.pictures.seen[-2] != "/b.png"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"http://{HOST}/a.png", "must be https"),
        (f"https://{HOST}:8443/a.png", "without a port"),
        (f"https://user@{HOST}/a.png", "a name of a user"),
        ("https://other.example/a.png", "fetches no addresses of that host"),
        ("https://127.0.0.1/a.png", "fetches no addresses of that host"),
        ("https://[::1]/a.png", "fetches no addresses of that host"),
        (f"https://{HOST}.evil.example/a.png", "fetches no addresses of that host"),
        (f"https://evil.example\\@{HOST}/a.png", "messages.0.content.1: "),
        ("https://inner.example/a.png", "an address that is not public"),
        ("https://nowhere.example/a.png", "an address that is not public"),
        (f"https://{HOST}/moved", "the status 302"),
        (f"https://{HOST}/gone", "the status 404"),
        (f"https://{HOST}/endless", "at most 10485760 bytes"),
        ("https://[", "messages.0.content.1: "),
    ],
)
def test_another_address_is_a_400_that_names_the_block(house: House, url: str, words: str) -> None:
    before = len(house.pictures.seen)
    with pytest.raises(BadRequestError) as raised:
        shown_by(house, url)
    message = raised.value.body["error"]["message"]  # type: ignore[index]
    assert message.startswith("messages.0.content.1: ") and words in message
    assert message.endswith("Could not process image")
    is_asked = url.startswith(f"https://{HOST}/")
    assert house.pictures.seen[before:] == ([urlsplit(url).path] if is_asked else [])


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "192.168.1.1", "0.0.0.0"),
        *("::1", "::ffff:127.0.0.1", "fe80::1", "fd00::1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("224.0.0.1", "ff0e::1", "2001:0:7f00:1::"),
        "64:ff9b:1::1",
        "::127.0.0.1",
    ],
)
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")


@pytest.mark.anyio
async def test_a_name_of_this_machine_is_looked_up_and_refused() -> None:
    addresses = await look_up("localhost")
    assert addresses and not any(is_public(address) for address, _ in addresses)
