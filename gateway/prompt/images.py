"""Images for a model that sees: read from base64, bounded by their headers, named by their bytes.

Nothing is decoded here: the engine's preparing process does that, and refuses what is broken.
"""

import hmac
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping

from engine.protocol import MAX_IMAGE_PIXELS, MAX_IMAGES, MAX_PROMPT_PIXELS, Image
from gateway.base.errors import InvalidRequest
from gateway.prompt.media import Media, image_size

MAX_IMAGE_BYTES = 10 * 1024 * 1024
_TYPES = {b"\x89PNG": "image/png", b"GIF8": "image/gif", b"RIFF": "image/webp"}
REFUSED = "Could not process image"
"""Coding agents look for these words, and go on without the image."""


class ImagesNamed(InvalidRequest):
    """A prompt names images by their addresses. Unless someone fetches them, this is a refusal.

    `places` has the place of each address's first use, by address. Once the files are fetched, the
    request is lowered again with them.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__(f"{next(iter(places.values()))}: must be base64 here. {REFUSED}")
        self.places = places


class ImageReader:
    """Reads the images of one request. Equal images of one scope have one id.

    `fetched` has the files by their addresses. With None, images by address are refused.
    """

    def __init__(self, scope: str, fetched: Mapping[str, bytes] | None = None) -> None:
        self._fetched = fetched
        # The images by their ids, in the order of the request.
        self.images: dict[str, Image] = {}
        # The place of each image's first use, by its id.
        self.paths: dict[str, str] = {}
        # The place of each unfetched address's first use, by address.
        self.unfetched: dict[str, str] = {}
        self._scope = scope.encode()
        self._num_shown = 0
        self._num_pixels = 0

    def read(self, path: str, media: Media) -> str:
        """The image's reference for the prompt. Raise InvalidRequest for one that can't be
        shown."""
        self._num_shown += 1
        if self._num_shown > MAX_IMAGES:
            raise InvalidRequest(f"{path}: at most {MAX_IMAGES} images. {REFUSED}")
        data = b""
        is_address = media.name.startswith(("http://", "https://"))
        if is_address and self._fetched is not None:
            if media.name not in self._fetched:
                self.unfetched.setdefault(media.name, path)
                return f"[image {'0' * 64}]"
            data = self._fetched[media.name]
        elif not media.data:
            hint = ": this server fetches no addresses" if is_address else ", in a URL as `data:`"
            raise InvalidRequest(f"{path}: must be base64{hint}. {REFUSED}")
        if len(media.data) // 4 * 3 - 2 > MAX_IMAGE_BYTES:
            raise InvalidRequest(f"{path}: at most {MAX_IMAGE_BYTES} bytes an image. {REFUSED}")
        try:
            data = data or b64decode(media.data, validate=True)
        except (Base64Error, ValueError):
            raise InvalidRequest(f"{path}: must be base64. {REFUSED}") from None
        size = image_size(data)
        if size is None:
            raise InvalidRequest(f"{path}: must be a PNG, JPEG, GIF or WebP file. {REFUSED}")
        width, height = size
        if not 0 < width * height <= MAX_IMAGE_PIXELS:
            raise InvalidRequest(
                f"{path}: {width} × {height} pixels, of {MAX_IMAGE_PIXELS} at most. {REFUSED}"
            )
        self._num_pixels += width * height
        if self._num_pixels > MAX_PROMPT_PIXELS:
            raise InvalidRequest(
                f"{path}: at most {MAX_PROMPT_PIXELS} pixels of all images together. {REFUSED}"
            )
        image = Image(
            id=hmac.digest(self._scope, data, "sha256").hex(),
            media_type=_TYPES.get(data[:4], "image/jpeg"),
            data=data,
            width=width,
            height=height,
        )
        if image.id not in self.images:
            self.images[image.id] = image
            self.paths[image.id] = path
        return image.reference
