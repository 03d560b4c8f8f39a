"""What web pages may ask of the proxy: a page in a user's browser reaches whatever network the user is in.

A browser sends some requests of a page to any host without asking that host first. Their bodies are of three media
types, or of none; so a body must be JSON, which a browser sends to another origin only after a preflight. Forms are
taken where workers have no other input; there the page's origin must be allowed. https://fetch.spec.whatwg.org
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ..config import ANY_ORIGIN, OPERATOR_PATHS
from ..errors import Forbidden, UnsupportedMediaType
from ..openai.form import is_form

Headers = tuple[tuple[str, str], ...]

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_JSON = re.compile(rf"application/json|{_TOKEN}/{_TOKEN}\+json", re.I)
_NAMES = re.compile(rf"{_TOKEN}(?:[ \t]*,[ \t]*{_TOKEN})*")
_ADMIN = "/admin"
_ADMIN_KEY = "x-admin-key"
KEPT_S = 600  # for which a browser may reuse a preflight's answer


def check_is_json(headers: Mapping[str, str]) -> None:
    """UnsupportedMediaType (415) unless the body is said to be JSON. headers: names in lower case."""
    given = headers.get("content-type", "")
    if given != "application/json" and _JSON.fullmatch(given.partition(";")[0].strip()) is None:
        raise UnsupportedMediaType("Content-Type: must be application/json", param="Content-Type")


class Origins:
    """The origins whose pages may read answers; pages of any other may not, nor send what needs a preflight.

    allowed: exact origins, or `*` for every one. What is the operator's is for no page.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        varies = (("Vary", "Origin"),)
        exposes = (("Access-Control-Expose-Headers", "*"),)
        self._of: dict[str, Headers] = {
            origin: (("Access-Control-Allow-Origin", origin), *exposes, *varies) for origin in allowed
        }
        self._of_others: Headers = varies if allowed else ()
        if ANY_ORIGIN in allowed:
            self._of_others = (("Access-Control-Allow-Origin", ANY_ORIGIN), *exposes)
        self._allows_any = ANY_ORIGIN in allowed
        self.is_off = not allowed

    def headers(self, origin: str | None, path: str) -> Headers:
        """What an answer carries, whatever its status. path: without escapes."""
        if not self.is_off and path.startswith("//"):
            path = "/" + path.lstrip("/")  # as it is routed
        if self.is_off or path == _ADMIN or path.startswith(f"{_ADMIN}/") or path in OPERATOR_PATHS:
            return ()
        return self._of.get(origin or "", self._of_others)

    def preflight(self, headers: Mapping[str, str], path: str) -> Headers | None:
        """What the answer to this OPTIONS request carries; None if it is no preflight of an allowed page."""
        origin = headers.get("origin")
        if origin is None or "access-control-request-method" not in headers or not self._allows(origin):
            return None
        found = self.headers(origin, path)
        if not found:
            return None
        asked = headers.get("access-control-request-headers", "")
        names = asked.lower().replace("\t", " ").replace(" ", "").split(",") if _NAMES.fullmatch(asked) else []
        return (
            *found,
            ("Access-Control-Allow-Methods", "GET, POST, DELETE"),
            ("Access-Control-Allow-Headers", ", ".join(name for name in names if name != _ADMIN_KEY)),
            ("Access-Control-Max-Age", str(KEPT_S)),
            ("Vary", "Access-Control-Request-Headers"),
        )

    def check_form(self, headers: Mapping[str, str]) -> None:
        """Forbidden for a form that a page of another host sends, which a browser does without a preflight.

        UnsupportedMediaType for a body that is neither a form nor JSON.
        """
        if not is_form(headers.get("content-type", "")):
            check_is_json(headers)
            return
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin) and origin.partition("://")[2] != headers.get("host"):
            raise Forbidden("forms from web pages of this origin are not allowed: cors_allow_origins", param="Origin")

    def _allows(self, origin: str) -> bool:
        return self._allows_any or origin in self._of
