"""TLS on both sides: contexts for clients and for workers, from the config's PEM files.

A file that can't be used is a ConfigError that names its key, raised before anything is served.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from ..config import ProxyConfig
from ..errors import ConfigError

# What HTTP/2 allows under TLS 1.2 (RFC 9113, 9.2.2); those of TLS 1.3 are not chosen here.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def server_context(config: ProxyConfig) -> ssl.SSLContext | None:
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
    _load_own(context, config, "tls_cert_file", "tls_key_file")
    if config.tls_client_ca_file:
        _load_authority(context, config, "tls_client_ca_file")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def worker_context(config: ProxyConfig) -> ssl.SSLContext:
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
    if config.worker_cert_file:
        _load_own(context, config, "worker_cert_file", "worker_key_file")
    return context


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
