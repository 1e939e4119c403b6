"""The security headers of every response.

They forbid content from other hosts, frames around pages, and guessed media types.
"""

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
    """The policy of Streamlit's pages.

    It allows Streamlit's files, and the inline scripts of its index by their hashes. Inline styles
    are allowed as such: scripts make them anew each time, so they have no known hashes.
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
    """The policy of the sign-in page: no script, and one style."""
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
