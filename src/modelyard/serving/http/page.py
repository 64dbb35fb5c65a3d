"""The page at /: one file, nothing from elsewhere, and a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PAGE = (Path(__file__).parent / "page.html").read_bytes()


def _digest(tag: bytes) -> str:
    """The source expression for the one inline element of that name."""
    (inside,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_digest(b'script')}; style-src {_digest(b'style')}; img-src blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
