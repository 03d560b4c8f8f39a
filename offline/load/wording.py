"""A server's error as a record may hold it: short, on one line, without a key and without text of a prompt."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 200  # characters
_WINDOW = 16  # characters of a prompt that are taken for a quotation
_SHORTEST = 6  # a prompt of fewer characters is found in any sentence
_CUT = "[...]"


def short(message: str, *, secrets: Iterable[str], prompt: str) -> str:
    """`message` up to where it begins to quote `prompt`, with each secret replaced."""
    for secret in secrets:
        if secret:
            message = message.replace(secret, _CUT)
    line = " ".join(message[: 4 * LIMIT].split())
    quoted = _quotation(line, prompt)
    if quoted is not None:
        line = f"{line[:quoted]}{_CUT}"
    return line if len(line) <= LIMIT else f"{line[: LIMIT - 3]}..."


def _quotation(line: str, prompt: str) -> int | None:
    """Where the first run of characters stands that the prompt has too; blanks count as one."""
    text = " ".join(prompt.split())
    window = min(_WINDOW, len(text))
    if window < _SHORTEST:
        return None
    return next((at for at in range(len(line) - window + 1) if line[at : at + window] in text), None)
