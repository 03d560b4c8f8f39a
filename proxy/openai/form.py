"""Reads one field of a multipart form: the model that an upload is for.

The worker reads the form again with another parser, and no client may show the two parsers different fields: a part
hidden in a file, a second field of the same name, an end that only one parser sees. So everything in which parsers are
known to differ is refused: a boundary anywhere but between parts, bytes before the first part or after the last,
unusual headers, parameters and charsets. What curl, browsers and HTTP libraries send passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import RequestError

FORM = "multipart/form-data"

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_NEXT = r"[ \t]*;[ \t]*"
_CHARSET = rf'(?:{_NEXT}charset="?utf-8"?)?'
_TYPE = re.compile(
    rf'multipart/form-data{_CHARSET}{_NEXT}boundary=(?:"([^"\\\r\n]{{1,70}})"|({_TOKEN}{{1,70}})){_CHARSET}[ \t]*', re.I
)
_DISPOSITION = re.compile(
    rf'form-data{_NEXT}name=(?:"([^"\\]*)"|({_TOKEN}+))'
    rf'({_NEXT}filename=(?:"[^"\\]*"|{_TOKEN}+))?({_NEXT}filename\*={_TOKEN}+)?[ \t]*',
    re.I,
)
_HEADER = re.compile(r"([A-Za-z0-9-]{1,64}):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_PLAIN = frozenset({"7bit", "8bit", "binary"})  # transfer encodings that leave the bytes as they are
PARTS_LIMIT = 1000
_HEAD_LIMIT_BYTES = 8 * 1024


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == FORM


def field(content_type: str, body: bytes, name: str) -> str | None:
    """The text of a plain field; None if the form has no such field; RequestError if the form is ambiguous."""
    kind = _TYPE.fullmatch(content_type)
    if kind is None:
        raise _refused("Content-Type must be multipart/form-data with a boundary, and no charset other than utf-8")
    found: bytes | None = None
    for head, content in _parts(body, (kind[1] or kind[2]).encode("latin1", "replace")):
        part_name, is_file = _name_and_is_file(head)
        if part_name != name:
            continue
        if found is not None or is_file:
            raise _refused(f"{name} must occur once, as a field and not as a file", param=name)
        found = content
    try:
        return None if found is None else found.decode()
    except UnicodeDecodeError:
        raise _refused(f"{name} must be UTF-8", param=name) from None


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, bytes]]:
    delimiter = b"--" + boundary
    if body.count(delimiter) > PARTS_LIMIT:
        raise _refused(f"it has more than {PARTS_LIMIT} parts")
    start = body.find(delimiter) + len(delimiter)
    if body[:start] not in (delimiter, b"\r\n" + delimiter):
        raise _refused("the body must begin with the boundary")
    while body[start : start + 2] != b"--":
        end = body.find(delimiter, start)
        if end < 0 or body[start : start + 2] != b"\r\n" or body[end - 2 : end] != b"\r\n" or end < start + 4:
            raise _refused("each boundary must be on a line of its own, and the last one must end the form")
        middle = body.find(b"\r\n\r\n", start, min(end, start + _HEAD_LIMIT_BYTES))
        if middle < 0 or middle + 4 > end - 2:
            raise _refused("each part needs headers, an empty line and its content")
        yield body[start + 2 : middle], body[middle + 4 : end - 2]
        start = end + len(delimiter)
    if body[start + 2 :] not in (b"", b"\r\n"):
        raise _refused("nothing may follow the last boundary")


def _name_and_is_file(head: bytes) -> tuple[str, bool]:
    headers: dict[str, str] = {}
    for line in head.decode("latin1").split("\r\n"):
        header = _HEADER.fullmatch(line)
        if header is None or header[1].lower() in headers:
            raise _refused("each header of a part must be on a line of its own and occur once")
        headers[header[1].lower()] = header[2]
    disposition = _DISPOSITION.fullmatch(headers.get("content-disposition", ""))
    if disposition is None:
        raise _refused(
            'each part needs Content-Disposition: form-data; name="...", and nothing but a filename after it'
        )
    if headers.get("content-transfer-encoding", "binary").strip().lower() not in _PLAIN:
        raise _refused("no part may have a Content-Transfer-Encoding")
    return disposition[1] or disposition[2] or "", disposition[3] is not None or disposition[4] is not None


def _refused(message: str, param: str | None = None) -> RequestError:
    return RequestError(f"the form can't be read: {message}", param=param)
