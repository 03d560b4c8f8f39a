"""The HTTP surface as an OpenAPI 3.1 document: precise where the proxy checks a value, open where the worker does.

It is built from the same tables as the routes, and a test compares the two. Workers' answers are passed on, so they
are described only as far as the proxy reads or edits them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..openai.request import Endpoint
from ..passthrough.passthrough import ENDPOINTS
from ..policy import Route
from .openapi_schemas import SCHEMAS, ref

Json = dict[str, Any]

PATH = "/openapi.json"
VERSION = "1"  # of the HTTP surface, not of the package

# The config decides which keys are needed: {} says that none may be.
_CLIENT: list[Json] = [{}, {"bearer": []}, {"apiKey": []}, {"azureKey": []}]
_OPERATOR: list[Json] = [{"adminKey": []}, {"bearer": []}]

_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A client's API key; under /admin the admin key."},
    "apiKey": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "The same, as Anthropic sends it.",
    },
    "azureKey": {
        "type": "apiKey",
        "in": "header",
        "name": "Api-Key",
        "description": "The same, as Azure's clients do.",
    },
    "adminKey": {"type": "apiKey", "in": "header", "name": "X-Admin-Key"},
}

# Every error status that the proxy itself returns, and its causes.
STATUSES: dict[int, str] = {
    400: "The request can't be used: `param` names the member or header at fault; also a body that is not JSON or "
    "nested deeper than json_depth_limit, and a request that is not HTTP.",
    401: "A key is missing or wrong.",
    403: "The key is valid but does not allow this; X-PPD-Force-Route without the admin key.",
    404: "No such path, model, worker, session or receipt; under /admin also: the admin API is off.",
    405: "This path has other methods.",
    408: "The body did not arrive in time.",
    413: "The body is larger than body_limit_bytes.",
    415: "The body's Content-Type is not JSON, or its Content-Encoding is neither gzip nor identity.",
    429: "The key's rate limit: X-PPD-Refused names which. Or all workers that were asked said 429.",
    431: "The request's head is too large, or has too many lines.",
    502: "The workers asked could not be reached, closed the connection early, or gave an unusable answer.",
    503: "No worker can serve this now, or the proxy takes no more: X-PPD-Refused says why.",
    504: "The workers asked did not answer in time.",
    508: "The request goes round: a worker is a proxy, perhaps this one.",
}
_REFUSALS = (429, 503)

# Statuses of paths that ask no worker, without and with a body.
_HEAD_ONLY = (400, 401, 403, 404, 431, 503)
_WITH_BODY = (400, 401, 403, 404, 408, 413, 415, 431, 503)


def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PPD",
            "version": VERSION,
            "description": "A session-aware, OpenAI-compatible proxy for disaggregated vLLM fleets. Every error of "
            "the proxy's own has OpenAI's shape, under /v1/messages Anthropic's.",
        },
        "paths": {**_turns(), **_passed_through(), **_operators(), **_admin()},
        "components": {
            "schemas": SCHEMAS,
            "responses": _errors(),
            "headers": _HEADERS,
            "securitySchemes": _SCHEMES,
        },
    }


def render() -> bytes:
    return msgspec.json.encode(document())


# -- headers


def _header(text: str, **schema: Any) -> Json:
    return {"description": text, "schema": {"type": "string", **schema}}


_DECISION = ("X-Request-Id", "X-PPD-Route", "X-PPD-Reason", "X-PPD-Decode", "X-PPD-Prefill", "X-PPD-Evidence")
_REFUSAL = ("Retry-After", "X-PPD-Refused")
_LIMITS = tuple(f"X-RateLimit-{what}-{of}" for what in ("Limit", "Remaining", "Reset") for of in ("Requests", "Tokens"))
_HEADERS: Json = {
    "X-Request-Id": _header("The turn's id, the client's own if that is valid; the receipt shows it."),
    "X-PPD-Route": _header("Where the turn is computed.", enum=[*Route]),
    "X-PPD-Reason": _header("Why."),
    "X-PPD-Decode": _header("The worker that answers, by name."),
    "X-PPD-Prefill": _header("The worker that computed the prompt, by name."),
    "X-PPD-Evidence": _header("How close the table's measurements are to this turn."),
    "Retry-After": _header("Seconds until it is worth another try.", pattern=r"^[0-9]+$"),
    "X-PPD-Refused": _header("Why the proxy takes no more now."),
    **{name: _header("Of the key's allowance a minute, where it has one.") for name in _LIMITS},
}


def _headers(names: tuple[str, ...]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _parameter(name: str, where: str, text: str, **schema: Any) -> Json:
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "description": text,
        "schema": {"type": "string", **schema},
    }


_TURN_HEADERS: list[Json] = [
    _parameter("X-Session-ID", "header", "Pins the conversation; counts before the body's ids."),
    _parameter("X-Session-Affinity", "header", "Used if X-Session-ID is absent."),
    _parameter("X-Correlation-ID", "header", "Used if both are absent."),
    _parameter("X-Request-Id", "header", "Kept where it matches ^[A-Za-z0-9_.:-]{1,128}$."),
    _parameter("X-PPD-SLO", "header", "This turn's targets, as `ttft=0.5,tpot=0.03`: seconds; also `ttft_factor`."),
    _parameter("X-PPD-Force-Route", "header", "With X-Admin-Key: this turn's route.", enum=[*Route]),
]


# -- answers


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _answers(found: Json, statuses: tuple[int, ...], error: str = "Error") -> Json:
    return found | {str(status): {"$ref": f"#/components/responses/{error}{status}"} for status in statuses}


def _worker_errors(error: str) -> Json:
    words = {"$ref": f"#/components/responses/{error}"}
    return {"4XX": words, "5XX": words}


def _errors() -> Json:
    """Errors by schema of the body and status, such as `Error404`; a worker's own error by the schema alone."""
    found: Json = {}
    schemas = (
        ("Error", ()),
        ("TurnError", _DECISION + _LIMITS),
        ("MessagesError", _DECISION + _LIMITS),
        ("WorkerError", ()),
    )
    for schema, headers in schemas:
        found[schema] = _ok("The worker's own error, unchanged.", _json(ref(schema)), headers)
        for status, text in STATUSES.items():
            refusal = _REFUSAL if status in _REFUSALS else ()
            found[f"{schema}{status}"] = _ok(text, _json(ref(schema)), headers + refusal)
    return found


def _ok(text: str, content: Json, headers: tuple[str, ...] = ()) -> Json:
    answer: Json = {"description": text, "content": content}
    if headers:
        answer["headers"] = _headers(headers)
    return answer


# -- paths


def _turn_error(endpoint: Endpoint) -> str:
    return "MessagesError" if endpoint is Endpoint.MESSAGES else "TurnError"


def _turns() -> Json:
    content = _json(ref("TurnAnswer")) | {"text/event-stream": {"schema": {"type": "string"}}}
    statuses = tuple(status for status in STATUSES if status != 405)
    return {
        endpoint.value: {
            "post": {
                "operationId": endpoint.name.lower(),
                "summary": "One turn of a conversation, routed.",
                "tags": ["turns"],
                "security": _CLIENT,
                "parameters": _TURN_HEADERS,
                "requestBody": {"required": True, "content": _json(ref(endpoint.name.title()))},
                "responses": {
                    "200": _ok(
                        "The answer, whole or as server-sent events, as the worker sends it.",
                        content,
                        _DECISION + _LIMITS,
                    ),
                    **_answers({}, statuses, _turn_error(endpoint)),
                    **_worker_errors(_turn_error(endpoint)),
                },
            }
        }
        for endpoint in Endpoint
    }


def _passed_through() -> Json:
    statuses = (*_WITH_BODY, 415, 429, 502, 504, 508)
    responses = {
        "2XX": _ok("The worker's answer, unchanged.", {"*/*": {}}),
        **_answers({}, statuses, "WorkerError"),
        **_worker_errors("WorkerError"),
    }
    body = {"required": True, "content": _json(ref("PassedThrough"))}
    form = {"required": True, "content": _json(ref("PassedThrough")) | {"multipart/form-data": {}}}
    shared = {"tags": ["pass-through"], "security": _CLIENT, "responses": responses}

    def post(path: str, body: Json = body) -> Json:
        return {"summary": "Passed to a worker.", "operationId": f"post{path}", "requestBody": body, **shared}

    audio = "/v1/audio/{name}"
    name = _parameter("name", "path", "Names separated by /.", pattern="^[A-Za-z0-9_-]+$")
    return {
        **{path: {"post": post(path)} for path in ENDPOINTS},
        audio: {
            "parameters": [name],
            "get": {"summary": "Passed to a worker.", "operationId": f"get{audio}", **shared},
            "post": post(audio, form),
        },
        **_stored(shared),
        "/version": {"get": _get("version", "The oldest engine's version.", "Version", "engines", _CLIENT, _HEAD_ONLY)},
        "/load": {"get": _get("load", "Requests that are served or wait.", "Load", "engines", _CLIENT, _HEAD_ONLY)},
        "/v1/models": {
            "get": _get("models", "The fleet's models, each once.", "Models", "pass-through", _CLIENT, _HEAD_ONLY)
        },
    }


def _stored(shared: Json) -> Json:
    """Stored responses, read and cancelled on the worker that has them."""
    path = "/v1/responses/{response_id}"
    named = [_parameter("response_id", "path", "As the response says.", minLength=1)]
    get = {"summary": "A stored response.", "operationId": f"get{path}", **shared}
    cancel = {"summary": "Cancels a response in the background.", "operationId": f"post{path}/cancel", **shared}
    return {path: {"parameters": named, "get": get}, f"{path}/cancel": {"parameters": named, "post": cancel}}


def _get(id: str, text: str, schema: str, tag: str, security: list[Json], statuses: tuple[int, ...]) -> Json:
    return {
        "summary": text,
        "operationId": id,
        "tags": [tag],
        "security": security,
        "responses": _answers({"200": _ok(text, _json(ref(schema)))}, statuses),
    }


def _operators() -> Json:
    """The paths for monitoring; the config decides which of them need the admin key."""
    security = [{}, *_OPERATOR]
    ready = _get("ready", "Which routes can be served now.", "Ways", "operation", security, (400, 401, 404, 431))
    ready["responses"]["503"] = _ok("No route can be served, or the proxy has just stood still.", _json(ref("Ways")))
    metrics = _get("metrics", "Prometheus.", "Ways", "operation", security, (400, 401, 404, 431))
    metrics["responses"]["200"] = _ok("Prometheus' text format.", {"text/plain": {"schema": {"type": "string"}}})
    health = _get("health", "The process is alive.", "Alive", "operation", security, (400, 401, 404, 431))
    ping = {
        method: {**health, "operationId": f"ping_{method}", "summary": "As /health, by SageMaker's name."}
        for method in ("get", "post")
    }
    for operation in ping.values():
        operation["responses"] = {**health["responses"], "200": {"description": "Alive; the body is empty."}}
    own = _get("openapi", "This document.", "Object", "operation", [{}, *_CLIENT[1:]], (400, 401, 404, 431))
    return {
        "/health": {"get": health},
        "/ready": {"get": ready},
        "/metrics": {"get": metrics},
        "/ping": ping,
        PATH: {"get": own},
    }


def _admin() -> Json:
    def get(id: str, text: str, schema: str) -> Json:
        return _get(id, text, schema, "admin", _OPERATOR, _HEAD_ONLY)

    def change(id: str, text: str, schema: str, body: str, status: str = "200") -> Json:
        operation = _get(id, text, schema, "admin", _OPERATOR, _WITH_BODY)
        operation["requestBody"] = {"required": True, "content": _json(ref(body))}
        operation["responses"][status] = operation["responses"].pop("200")
        return operation

    limit = _parameter("limit", "query", "How many of the newest.", type="integer", minimum=1, maximum=1000, default=50)

    def named(name: str) -> list[Json]:
        return [_parameter(name, "path", "As shown in the list.", minLength=1)]

    listed = {"parameters": [limit]}
    return {
        "/admin/workers": {
            "get": get("workers", "All workers.", "Workers"),
            "post": change("add_worker", "Adds a static worker.", "Named", "WorkerCall", "201"),
        },
        "/admin/workers/{worker_id}": {
            "parameters": named("worker_id"),
            "patch": change("drain_worker", "Drains a worker, or ends its draining.", "Worker", "DrainCall"),
            "delete": get("remove_worker", "Removes a static worker.", "Named"),
        },
        "/admin/sessions": {"get": {**get("sessions", "The newest sessions.", "Sessions"), **listed}},
        "/admin/sessions/{session_id}": {
            "parameters": named("session_id"),
            "get": get("session", "One session.", "Session"),
            "delete": get("forget_session", "Forgets a session.", "Named"),
        },
        "/admin/requests": {"get": {**get("receipts", "The newest receipts.", "Receipts"), **listed}},
        "/admin/requests/{request_id}": {
            "parameters": named("request_id"),
            "get": get("receipt", "One receipt.", "Receipt"),
        },
        "/admin/laws": {"get": get("laws", "The laws' corrections, and how well predictions hold.", "Laws")},
        "/admin/laws/reset": {"post": get("reset_laws", "Forgets what turns have taught of the laws.", "Laws")},
        "/admin/weights": {
            "get": get("weights", "The routing settings.", "Weights"),
            "put": change("change_weights", "Changes routing settings.", "Weights", "WeightsCall"),
        },
    }
