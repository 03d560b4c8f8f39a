"""TLS on both sides: contexts for clients and for workers, from the config's PEM files.

A file that can't be used is a ConfigError that names its key, raised before anything is served. The proxy's own
certificates are read again when their files change; authorities are not.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..config import ProxyConfig
from ..errors import ConfigError
from ..settings import WATCH_EVERY_S
from ..watched_files import WatchedFiles

log = logging.getLogger(__name__)

# What HTTP/2 allows under TLS 1.2 (RFC 9113, 9.2.2); those of TLS 1.3 are not chosen here.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class OwnCertificate:
    """What the proxy shows, in one context: connections that stand keep what they were given."""

    def __init__(self, context: ssl.SSLContext, config: ProxyConfig, cert_key: str, key_key: str) -> None:
        """The config's keys that name the files."""
        self._context = context
        self._config = config
        self._keys = cert_key, key_key
        self._watched = WatchedFiles(Path(getattr(config, cert_key)), Path(getattr(config, key_key)))
        _load_own(context, config, cert_key, key_key)

    async def watch(self, every_s: float = WATCH_EVERY_S) -> None:
        """Shows a renewed one, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.look()

    def look(self) -> bool | None:
        """Whether files that have changed, and are at rest, could be taken; None where they have not."""
        if not self._watched.are_new():
            return None
        try:
            # Not in the context itself: a new certificate with another's key would stay there, and end all handshakes.
            _load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self._config, *self._keys)
            _load_own(self._context, self._config, *self._keys)
        except ConfigError as exc:
            log.error("the changed certificate is not used: %s", exc)
            return False
        log.info("%s was read again", self._keys[0])
        return True


@dataclass(frozen=True, slots=True)
class Tls:
    """One side's; `own` is None where the proxy shows nothing."""

    context: ssl.SSLContext
    own: OwnCertificate | None


def client_tls(config: ProxyConfig) -> Tls | None:
    """For clients: HTTP/2 or 1.1 by ALPN, with a certificate asked of them if `tls_client_ca_file` is set.

    None where the config names no certificate: clients then speak plain HTTP.
    """
    if not config.tls_cert_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["h2", "http/1.1"])
    own = OwnCertificate(context, config, "tls_cert_file", "tls_key_file")
    if config.tls_client_ca_file:
        _load_authority(context, config, "tls_client_ca_file")
        context.verify_mode = ssl.CERT_REQUIRED
    return Tls(context, own)


def worker_tls(config: ProxyConfig) -> Tls:
    """Towards workers: their certificate must be of `worker_ca_file`, or of the system's authorities, and name their
    host; `worker_cert_file` is shown to those that ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    if config.worker_ca_file:
        _load_authority(context, config, "worker_ca_file")
    else:
        context.load_default_certs()
    shows = bool(config.worker_cert_file)
    return Tls(context, OwnCertificate(context, config, "worker_cert_file", "worker_key_file") if shows else None)


def _load_own(context: ssl.SSLContext, config: ProxyConfig, cert_key: str, key_key: str) -> None:
    """A certificate chain and its private key; the error names the one of the two that is at fault."""
    cert_file, key_file = getattr(config, cert_key), getattr(config, key_key)
    with _naming(config, cert_key, "a PEM certificate chain"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert_file)
    with _naming(config, key_key, f"the unencrypted PEM private key of {cert_key}"):
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert_file, key_file, password="")


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
