"""TLS contexts for clients and for workers, from the config's PEM files.

A file that can't be used is a ConfigError that names its key, raised before anything is served. Files that change while
the proxy runs are read again; a side's new files are used together or not at all. A certificate that has expired is
served at the start, as some clients may take it, but is never put in the place of another.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ..config import ProxyConfig
from ..errors import ConfigError
from .watched_files import WatchedFiles

log = logging.getLogger(__name__)

# What HTTP/2 allows under TLS 1.2 (RFC 9113, 9.2.2). TLS 1.3 has its own list.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

NEVER_S = 86_400.0
"""As the event loop's own limit on a handshake: ours is a `time_limit`, which allows for a process that stood still."""


class Tls:
    """One side's current context, for new connections; existing ones keep theirs."""

    def __init__(
        self, make: Callable[[], ssl.SSLContext], *files: str, check_dates: Callable[[], None] = lambda: None
    ) -> None:
        """files: what `make` reads; it raises ConfigError if it can't use them, `check_dates` if they have expired."""
        named = [Path(file) for file in files if file]
        self._make, self._check_dates = make, check_dates
        self._watched = WatchedFiles(*named)
        # Without files nothing can be wrong, and few fleets need it: the system's authorities take 40 ms to read.
        self._context = make() if named else None
        try:
            check_dates()
        except ConfigError as exc:
            log.warning("%s; it is used all the same", exc)

    @property
    def context(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = self._make()
        return self._context

    def look(self) -> bool | None:
        """Replaces the context if files have changed: whether they could be used. None where none has changed, or one
        may still be being written."""
        if not self._watched.are_new():
            return None
        try:
            made = self._make()
            self._check_dates()
        except ConfigError as exc:
            log.error("changed certificates are not used: %s", exc)
            return False
        if _authorities(self._context) - _authorities(made) and not self._watched.have_rested():
            return None  # the file may be cut between two certificates, and the rest still come
        self._context = made
        log.info("changed certificates are in force")
        return True


def _authorities(context: ssl.SSLContext | None) -> set[bytes]:
    return set() if context is None else set(context.get_ca_certs(binary_form=True))


def client_tls(config: ProxyConfig, now: Callable[[], float] = time.time) -> Tls | None:
    """For clients: HTTP/2 or 1.1 by ALPN; they must show a certificate if `tls_client_ca_file` is set.

    None where the config names no certificate: clients then speak plain HTTP.
    """
    if not config.tls_cert_file:
        return None

    def context() -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        made.set_ciphers(CIPHERS)
        made.set_alpn_protocols(["h2", "http/1.1"])
        _load_own(made, config, "tls_cert_file", "tls_key_file")
        if config.tls_client_ca_file:
            _load_authority(made, config, "tls_client_ca_file")
            made.verify_mode = ssl.CERT_REQUIRED
        return made

    files = config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file
    return Tls(context, *files, check_dates=partial(_check_dates, config, "tls_cert_file", now))


def worker_tls(config: ProxyConfig, now: Callable[[], float] = time.time) -> Tls:
    """For workers: their certificate must name their host and be signed by `worker_ca_file`, or by an authority that
    the system trusts; `worker_cert_file` is shown to workers that ask."""

    def context() -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_COMPRESSION
        made.set_alpn_protocols(["http/1.1"])
        if config.worker_ca_file:
            _load_authority(made, config, "worker_ca_file")
        else:
            made.load_default_certs()
        if config.worker_cert_file:
            _load_own(made, config, "worker_cert_file", "worker_key_file")
        return made

    files = config.worker_ca_file, config.worker_cert_file, config.worker_key_file
    return Tls(context, *files, check_dates=partial(_check_dates, config, "worker_cert_file", now))


def _load_own(context: ssl.SSLContext, config: ProxyConfig, cert_key: str, key_key: str) -> None:
    """Loads a certificate chain and its private key; the error names which of the two is at fault."""
    cert_file, key_file = getattr(config, cert_key), getattr(config, key_key)
    with _naming(config, cert_key, "a PEM certificate chain"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert_file)
    with _naming(config, key_key, f"the unencrypted PEM private key of {cert_key}"):
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert_file, key_file, password="")


def _check_dates(config: ProxyConfig, key: str, now: Callable[[], float]) -> None:
    """One that is not valid yet is taken: clocks differ, and the file would not be looked at again."""
    file, expires_s = getattr(config, key), None
    if file:
        with _naming(config, key, "a PEM certificate chain"):
            expires_s = _expiry_s(Path(file).read_text(errors="replace"))
    if expires_s is not None and expires_s < now():
        when = datetime.fromtimestamp(expires_s, UTC).isoformat()
        raise ConfigError(f"{key} = {file!r}: must be a certificate that has not expired ({when})", param=key)


def _expiry_s(pem: str) -> float | None:
    """Of its first certificate, since 1970; None where that is not written as RFC 5280 has it."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        der = ssl.PEM_cert_to_DER_cert(begin + pem.split(begin)[1].split(end, maxsplit=1)[0] + end)
        at = _element(der, _element(der, 0)[1])[1]  # in the certificate's part that is signed
        tag, _, after = _element(der, at)
        at = after if tag == 0xA0 else at  # its version
        for _ in range(3):  # serial number, kind of signature, issuer
            at = _element(der, at)[2]
        _, _, at = _element(der, _element(der, at)[1])  # in the validity, after its first date
        tag, at, after = _element(der, at)
        text = der[at:after].decode()
        if tag == 0x17:  # with two digits of the year
            text = ("20" if text < "50" else "19") + text
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (ValueError, IndexError):
        return None


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Its tag, and where its contents begin and end."""
    tag, length, at = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(der[at : at + size]), at + size
    return tag, at, at + length


def _load_authority(context: ssl.SSLContext, config: ProxyConfig, key: str) -> None:
    with _naming(config, key, "a file of PEM certificates"):
        context.load_verify_locations(getattr(config, key))


@contextmanager
def _naming(config: ProxyConfig, key: str, allowed: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        why = exc.reason if isinstance(exc, ssl.SSLError) else getattr(exc, "strerror", None)
        raise ConfigError(
            f"{key} = {getattr(config, key)!r}: must be {allowed}" + (f" ({why})" if why else ""), param=key
        ) from exc
