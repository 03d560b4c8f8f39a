"""Envoy's configuration for a fleet whose turns this picker decides.

Turns go where the picker says: to any address (ORIGINAL_DST), or where the picker keeps `picker_workers_file`, to the
workers in it, which Envoy asks in the order that the picker names. Everything else goes to the proxy's own port. Errors
of Envoy's own have OpenAI's shape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from string import Template

from ..config import ProxyConfig
from ..openai.request import Endpoint
from . import envoy_tls
from .headers import ANSWERED, DESTINATION, LB_NAMESPACE, OWN_NAMESPACE, SERVED

MESSAGE_MARGIN_S = 5.0  # above the longest that a turn waits in the queue: then the picker itself refuses it
_STREAM_IDLE_S = 300.0
_BUFFER_MARGIN_BYTES = 1024 * 1024
_CONNECT_S = 1.0

Address = tuple[str, int]


def envoy_config(
    config: ProxyConfig,
    listen: Address,
    pickers: Sequence[Address],
    *,
    shadow: Address | None = None,
    admin_port: int = 0,
    sees_answers: bool = False,
    streams_bodies: bool = False,
) -> str:
    """YAML. pickers: where each of them is asked; the first one's proxy serves what is no turn. shadow: only watches.

    sees_answers: the picker is shown each piece of an answer. Without, it knows of it what a sidecar reports, or
    estimates. streams_bodies: a request's body goes to the picker as it comes, and from there to the worker; else Envoy
    holds it.
    """
    host, port = listen
    return _TEMPLATE.substitute(
        count=len(pickers),
        admin=_admin(admin_port),
        listen=_address(host, port),
        buffer_bytes=config.body_limit_bytes + _BUFFER_MARGIN_BYTES,
        tells_attempts=json.dumps(config.picker_fallbacks > 0),
        idle_s=f"{_STREAM_IDLE_S:g}",
        turns="".join(_turn_route(endpoint, config.picker_fallbacks) for endpoint in Endpoint),
        timeout_s=f"{config.queue_timeout_s + MESSAGE_MARGIN_S:g}",
        bodies="FULL_DUPLEX_STREAMED" if streams_bodies else "BUFFERED",
        answers="STREAMED" if sees_answers else "NONE",
        connect_s=f"{_CONNECT_S:g}",
        picked=_picked(config.picker_workers_file),
        no_limits=_NO_LIMITS,
        errors=_local_replies(),
        own=OWN_NAMESPACE,
        pickers=_pickers("picker", pickers) + ("" if shadow is None else _pickers("shadow", [shadow])),
        watches="" if shadow is None else _WATCHES,
        unwatched="" if shadow is None else "                  shadow: *unasked\n",
        listener_tls=_if_any("", envoy_tls.of_listener(config), "\n      "),
        workers_tls=_if_any("    ", envoy_tls.of_workers(config), "\n"),
        proxy_tls=_if_any("    ", envoy_tls.of_proxy(config), "\n"),
        proxy=_endpoint(_reachable(config.host), config.port),
    )


_TEMPLATE = Template("""\
# Written by `ppd envoy-config`. Envoy relays; $count endpoint picker(s) decide where each turn goes.
node: {id: envoy, cluster: ppd}
${admin}static_resources:
  listeners:
  - name: clients
    address: $listen
    per_connection_buffer_limit_bytes: $buffer_bytes # longer bodies are 413
    filter_chains:
    - ${listener_tls}filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          stream_idle_timeout: ${idle_s}s
          request_timeout: 0s
          local_reply_config:
            mappers: # Envoy's own errors in OpenAI's shape; what the picker answers goes out as it is
$errors          route_config:
            name: all
            virtual_hosts:
            - name: all
              domains: ["*"]
              include_attempt_count_in_response: $tells_attempts
              routes:
$turns              - match: {prefix: "/"} # models, health, tokenizing: the proxy's own
                route: {cluster: ppd, timeout: 0s}
                typed_per_filter_config:
                  envoy.filters.http.ext_proc: &unasked
                    "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute
                    disabled: true
$unwatched          http_filters:
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service:
                envoy_grpc: {cluster_name: picker}
                retry_policy: {retry_on: connect-failure, num_retries: 3} # of two pickers one may have died just now
              failure_mode_allow: false
              status_on_error: {code: ServiceUnavailable}
              message_timeout: ${timeout_s}s # above queue_timeout_s: a turn waits in the picker's queue
              processing_mode:
                request_header_mode: SEND
                request_body_mode: $bodies
                request_trailer_mode: SEND # a request without a body may end so
                response_header_mode: SEND
                response_body_mode: $answers
                response_trailer_mode: SEND
              mutation_rules: {allow_all_routing: true, allow_envoy: true}
              metadata_options:
                forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}
                receiving_namespaces: {untyped: [$own]}
$watches          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: picked # the worker that the picker names
    connect_timeout: ${connect_s}s
    circuit_breakers: $no_limits
${workers_tls}$picked$pickers  - name: ppd
    type: STRICT_DNS
    connect_timeout: ${connect_s}s
${proxy_tls}    load_assignment:
      cluster_name: ppd
      endpoints:
      - lb_endpoints:
$proxy""")

_ERRORS = {
    503: "no picker can be reached, or not the worker that it has named",
    504: "no picker, or no worker, has answered in time",
}


def _if_any(before: str, text: str, after: str) -> str:
    return f"{before}{text}{after}" if text else ""


def _local_replies() -> str:
    """The first that applies is used. The last one is for all others, with Envoy's words."""
    is_own = f"{{metadata_filter: {{matcher: {{filter: {OWN_NAMESPACE}, {_NOT_ANSWERED}}}}}}}"
    replies = []
    for status, text in _ERRORS.items():
        value = f"{{default_value: {status}, runtime_key: ppd.none}}"
        has_status = f"{{status_code_filter: {{comparison: {{op: EQ, value: {value}}}}}}}"
        both = f"{{and_filter: {{filters: [{is_own}, {has_status}]}}}}"
        replies.append(f"{both}\n              body: {{inline_string: {json.dumps(text)}}}")
    return "".join(f"            - filter: {each}\n{_OPENAI_SHAPE}" for each in (*replies, is_own))


_NOT_ANSWERED = f"path: [{{key: {ANSWERED}}}], value: {{bool_match: false}}"  # also where nothing says so
_OPENAI_SHAPE = """\
              body_format_override:
                json_format:
                  error: {message: "%LOCAL_REPLY_BODY%", type: gateway_error, param: null, code: "%RESPONSE_CODE%"}
"""
_LIMITS = "{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000, max_retries: 100000}"
_NO_LIMITS = f"{{thresholds: [{_LIMITS}]}} # the picker's queue is the limit"


# Behind the picker that rules, so that it sees what that has named. Envoy takes no answer of it and waits for none.
_WATCHES = """\
          - name: shadow
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: shadow}}
              observability_mode: true
              failure_mode_allow: true
              deferred_close_timeout: 1s
              processing_mode:
                request_header_mode: SEND
                request_body_mode: STREAMED
                request_trailer_mode: SEND
                response_header_mode: SEND
                response_body_mode: STREAMED
                response_trailer_mode: SEND
              metadata_options: {forwarding_namespaces: {untyped: [envoy.lb]}}
"""


def _pickers(name: str, addresses: Sequence[Address]) -> str:
    return f"""\
  - name: {name}
    type: STRICT_DNS
    connect_timeout: {_CONNECT_S:g}s
    circuit_breakers: {_NO_LIMITS}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    health_checks:
    - timeout: 1s
      interval: 1s
      unhealthy_threshold: 2
      healthy_threshold: 1
      grpc_health_check: {{service_name: readiness}}
    load_assignment:
      cluster_name: {name}
      endpoints:
      - lb_endpoints:
{"".join(_endpoint(*each) for each in addresses)}"""


def _reachable(host: str) -> str:
    """On this machine, of a host that a server listens on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _admin(port: int) -> str:
    return f"admin: {{address: {_address('127.0.0.1', port)}}}\n" if port else ""


def _address(host: str, port: int) -> str:
    return f"{{socket_address: {{address: {json.dumps(host)}, port_value: {port}}}}}"


def _endpoint(host: str, port: int) -> str:
    return f"        - {{endpoint: {{address: {_address(host, port)}}}}}\n"


def _turn_route(endpoint: Endpoint, fallbacks: int) -> str:
    idle = f"idle_timeout: {_STREAM_IDLE_S:g}s"
    retries = f", retry_policy: {{num_retries: {fallbacks}, {_RETRIED}}}" if fallbacks else ""
    return f"""\
              - match: {{path: {endpoint}}}
                route: {{cluster: picked, timeout: 0s, {idle}{retries}}}
"""


# Where a worker has not begun: it was not reached, or its sidecar says that the engine was not.
_RETRIED = (
    "retry_on: 'connect-failure,retriable-headers', "
    "retriable_headers: [{name: x-ppd-refused, string_match: {exact: no_worker}}]"
)
_POLICIES = "type.googleapis.com/envoy.extensions.load_balancing_policies"


def _picked(workers_file: str) -> str:
    if not workers_file:
        return f"""\
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    original_dst_lb_config: {{use_http_header: true, http_header_name: {DESTINATION}}}
"""
    # A worker that is not in the file is passed over; with none of those named left, the turn gets 503.
    return f"""\
    type: EDS
    eds_cluster_config: {{eds_config: {{path_config_source: {{path: {json.dumps(workers_file)}}}}}}}
    load_balancing_policy:
      policies:
      - typed_extension_config:
          name: envoy.load_balancing_policies.override_host
          typed_config:
            "@type": {_POLICIES}.override_host.v3.OverrideHost
            override_host_sources: [{{header: {DESTINATION}}}]
            selected_host_key: {{key: {LB_NAMESPACE}, path: [{{key: {SERVED}}}]}}
            fallback_policy:
              policies:
              - typed_extension_config:
                  name: envoy.load_balancing_policies.subset
                  typed_config:
                    "@type": {_POLICIES}.subset.v3.Subset
                    fallback_policy: NO_FALLBACK
                    subset_lb_policy:
                      policies:
                      - typed_extension_config:
                          name: envoy.load_balancing_policies.round_robin
                          typed_config: {{"@type": {_POLICIES}.round_robin.v3.RoundRobin}}
"""
