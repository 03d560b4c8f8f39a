"""Workers that the config or the admin API names: "ROLE=host:port", and what else is known of them."""

from __future__ import annotations

from collections import Counter

from ..config import ProxyConfig, all_of, refused
from ..connectors import CONNECTORS, usual_connector, usual_engine
from ..errors import ConfigError, FormatError
from ..fleet.worker import ENGINES, UNHEARD, EventSource, Role, Source, Worker
from .heartbeat import (
    check_address,
    check_coordinates,
    check_events,
    check_labels,
    check_models,
    check_sidecar,
    check_x,
)

LABEL = "label."
_COORDINATES = {name: known.allowed for each in CONNECTORS.values() for name, known in each.coordinates.items()}
WORKER_OPTIONS = ", ".join(
    (
        f'",connector={"|".join(CONNECTORS)}"',
        f'",engine={"|".join(ENGINES)}"',
        '",model=NAME"',
        '",engine_version=V"',
        '",tls=true"',
        '",events=tcp://host:port|none"',
        '",replay=tcp://host:port"',
        '",ranks=N"',
        '",x=SHARE" of a D',
        '",profile=NAME"',
        '",label.NAME=VALUE"',
        '",sidecar=true" of a D or R',
        *(f'",{name}={allowed}"' for name, allowed in sorted(_COORDINATES.items())),
    )
)


def static_workers(config: ProxyConfig) -> tuple[Worker, ...]:
    """The config's workers; ConfigError tells each that is misspelt, or named twice."""
    workers: list[Worker] = []
    errors: list[ConfigError] = []
    for text in config.workers:
        try:
            workers.append(parse_worker(text))
        except ConfigError as exc:
            errors.append(exc)
    times = Counter(worker.address.lower() for worker in workers)  # names of hosts have no case
    errors += [refused("workers", address, "named once") for address, named in times.items() if named > 1]
    if errors:
        raise all_of(errors)
    return tuple(workers)


def parse_worker(text: str) -> Worker:
    """A static worker from "ROLE=host:port", then ",name=value" of WORKER_OPTIONS."""
    allowed = "ROLE=host:port with ROLE P, D, R or E"
    first, *rest = text.split(",")
    role, _, address = first.partition("=")
    try:
        Role(role)
        check_address(address, "workers")
        allowed += ", then any of " + WORKER_OPTIONS  # told only where it is one of these that is wrong
        options = dict(part.split("=", 1) for part in rest)
        if len(options) < len(rest):  # one is named twice, as a second model would be
            raise ValueError(text)
        named, model = options.pop("engine", ""), options.pop("model", "")
        models = (model,) if model else ()
        check_models(models)
        connector = options.pop("connector", usual_connector(role, named))
        engine = named or usual_engine(connector)
        version, tls = options.pop("engine_version", ""), options.pop("tls", "false")
        profile, sidecar = options.pop("profile", ""), options.pop("sidecar", "false")
        ranks = int(options.pop("ranks", "1"))
        events = EventSource(options.pop("events", ""), options.pop("replay", ""), ranks)
        events = UNHEARD if events == EventSource("none") else check_events(events)
        labels = {name.removeprefix(LABEL): options.pop(name) for name in list(options) if name.startswith(LABEL)}
        x = check_x(float(options.pop("x")) if "x" in options else None, Role(role))
        if not {tls, sidecar} <= {"true", "false"}:
            raise ValueError(text)
        if (
            engine not in ENGINES
            or connector not in CONNECTORS
            or not options.keys() <= CONNECTORS[connector].coordinates.keys()
        ):
            raise ValueError(text)
        return Worker(
            role=Role(role),
            address=address,
            models=models,
            connector=connector,
            engine=engine,
            engine_version=version,
            coordinates=check_coordinates(options, connector),
            source=Source.STATIC,
            tls=tls == "true",
            kv_events=events,
            x=x,
            profile=profile,
            labels=check_labels(labels),
            has_sidecar=check_sidecar(Role(role), connector, has_one=sidecar == "true"),
        )
    except (ValueError, FormatError):
        raise refused("workers", text, allowed) from None
