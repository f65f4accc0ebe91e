"""The page of a run: one file of HTML with its style and script inside, live or with its data.

Its policy lets the browser run this script alone, and load nothing from anywhere else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

LIVE, REPORT = "'self'", "'none'"
"""Where the page may ask for news: its own server, or nowhere."""


@cache
def _part(name: str) -> str:
    return files("nestpipe.dashboard").joinpath(name).read_text("utf-8")


def policy(connect: str) -> str:
    """What the browser lets the page do, as a Content-Security-Policy."""
    digest = hashlib.sha256(_part("page.js").encode()).digest()
    script = f"'sha256-{base64.b64encode(digest).decode()}'"
    return (
        f"default-src 'none'; script-src {script}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _filled(connect: str, data: Any) -> str:
    # In a script `<` could end it or begin a comment; in JSON it stands in strings alone.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _part("page.html").replace("@@POLICY@@", policy(connect))
    return page.replace("@@DATA@@", text).replace("@@SCRIPT@@", _part("page.js"))


def live_page(*, needs_token: bool) -> str:
    """The page without any data: it asks its server for them."""
    return _filled(LIVE, {"live": True, "needs_token": needs_token})


def report_page(data: dict[str, Any]) -> str:
    """The page with its data inside, which asks nobody: a report to keep or send."""
    return _filled(REPORT, {"live": False, **data})
