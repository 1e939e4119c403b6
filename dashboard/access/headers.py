"""The headers of every response: nothing from another host, nothing framed, nothing guessed."""

import base64
import hashlib
from collections.abc import Iterable
from functools import cache

from dashboard.access.index import INLINE, document


def digest_of(text: str) -> str:
    """A CSP source that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def app_policy() -> str:
    """Streamlit's own page: its bundled scripts, and the inline ones of its index by their hash.

    Its styles are made by scripts, inline and always new, so they can't be told by hashes.
    """
    scripts = " ".join(digest_of(inline) for inline in INLINE.findall(document()))
    return _policy(
        "default-src 'self'",
        f"script-src 'self' {scripts}".strip(),
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "worker-src 'self' blob:",
        "frame-src 'none'",
    )


def page_policy(style: str) -> str:
    """A page of our own: no script at all, one style."""
    return _policy("default-src 'none'", f"style-src {digest_of(style)}", "img-src 'self'")


def _policy(*parts: str) -> str:
    common = ("frame-ancestors 'none'", "base-uri 'self'", "form-action 'self'")
    return "; ".join((*parts, "object-src 'none'", *common))


def security_headers(policy: str) -> Iterable[tuple[str, str]]:
    return (
        ("content-security-policy", policy),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    )
