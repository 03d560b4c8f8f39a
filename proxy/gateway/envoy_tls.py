"""TLS in Envoy's configuration: towards clients, towards the proxy's own port, and towards workers.

Files are the config's. Envoy reads them on its own machine, when it starts. A part is empty where nothing speaks TLS.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from typing import Any

from ..config import ProxyConfig
from ..discovery.static_workers import static_workers
from ..errors import ConfigError
from ..fleet.worker import ANSWERING, Worker

MATCH = "envoy.transport_socket_match"
"""Of an endpoint's metadata: how it is reached."""
BY_TLS = {"tls": True}
_CONTEXTS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_RAW = "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"
_OTHERS = (
    "{name: plain, match: {}, "
    f'transport_socket: {{name: envoy.transport_sockets.raw_buffer, typed_config: {{"@type": {_RAW}}}}}}}'
)
_VERSIONS = {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"}


def of_listener(config: ProxyConfig) -> str:
    """As the proxy's own port: with its certificate, and asking for clients' where the proxy does."""
    if not config.tls_cert_file:
        return ""
    common = _common(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    common["alpn_protocols"] = ["h2", "http/1.1"]
    return _socket("DownstreamTlsContext", common, require_client_certificate=bool(config.tls_client_ca_file))


def of_proxy(config: ProxyConfig) -> str:
    """Trusted is the very certificate of the config. ConfigError where the port asks for one that is not there."""
    if not config.tls_cert_file:
        return ""
    if config.tls_client_ca_file and not config.worker_cert_file:
        raise ConfigError(
            "tls_client_ca_file: the proxy's port asks Envoy for a certificate too: set worker_cert_file and "
            "worker_key_file, which Envoy shows there and to workers",
            param="tls_client_ca_file",
        )
    return _socket("UpstreamTlsContext", _common(config.worker_cert_file, config.worker_key_file, config.tls_cert_file))


def of_workers(config: ProxyConfig) -> str:
    """The workers that answer, of the config. ConfigError where only some of them speak TLS and no file says which."""
    answering = [worker for worker in static_workers(config) if worker.role in ANSWERING]
    secure = [worker for worker in answering if worker.tls]
    if not secure:
        return ""
    if not config.worker_ca_file:
        raise ConfigError(
            f"worker_ca_file: is needed, as {_told(secure)} speaks TLS and Envoy has no authorities of its own",
            param="worker_ca_file",
        )
    common = _common(config.worker_cert_file, config.worker_key_file, config.worker_ca_file)
    common["validation_context"]["match_typed_subject_alt_names"] = [_named(worker) for worker in secure]
    socket = _socket("UpstreamTlsContext", common)
    if config.picker_workers_file:
        return f"transport_socket_matches: [{{name: tls, match: {json.dumps(BY_TLS)}, {socket}}}, {_OTHERS}]"
    if len(secure) < len(answering):
        plain = [worker for worker in answering if not worker.tls]
        raise ConfigError(
            f"workers: {_told(secure)} with TLS, {_told(plain)} without: Envoy cannot tell them "
            "apart without picker_workers_file. Set that, or use tls=true for all D and R or for none",
            param="workers",
        )
    return socket


def _common(cert_file: str, key_file: str, ca_file: str) -> dict[str, Any]:
    common: dict[str, Any] = {"tls_params": _VERSIONS}
    if cert_file:
        chain, key = {"filename": cert_file}, {"filename": key_file}
        common["tls_certificates"] = [{"certificate_chain": chain, "private_key": key}]
    if ca_file:
        common["validation_context"] = {"trusted_ca": {"filename": ca_file}}
    return common


def _named(worker: Worker) -> dict[str, object]:
    """One of the names that a worker's certificate may have: its host."""
    host = worker.host
    try:
        return {"san_type": "IP_ADDRESS", "matcher": {"exact": str(ipaddress.ip_address(host))}}
    except ValueError:
        return {"san_type": "DNS", "matcher": {"exact": host}}


def _socket(context: str, common: dict[str, Any], **more: object) -> str:
    config = {"@type": f"{_CONTEXTS}.{context}", "common_tls_context": common, **more}
    return "transport_socket: " + json.dumps({"name": "envoy.transport_sockets.tls", "typed_config": config})


def _told(workers: Iterable[Worker]) -> str:
    return ", ".join(sorted(f"{worker.role}={worker.address}" for worker in workers))
