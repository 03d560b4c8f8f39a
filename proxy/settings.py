"""The settings in force: the config, changed while the proxy runs by its file or by the admin API."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from .config import KEYS, LIVE, Draft, Mode, ProxyConfig, with_changes
from .config.yaml_document import read_yaml
from .decision_table.score import Weights, weight_rules
from .decision_table.table import DecisionTable, find
from .discovery.endpoints_file import EndpointsOfFile
from .discovery.static_workers import static_workers
from .errors import ConfigError, PPDError
from .fleet.worker import Worker, WorkerId
from .laws.prediction import Laws
from .laws.profiles import Profiles
from .laws.targets import target_rules
from .laws.worker_laws import WorkerLaws
from .policy import Limits, Rules
from .policy.modes import PREDICTING
from .policy.profiles.deciders import OwnRule
from .policy.profiles.endpoint_config import schedule_of
from .policy.profiles.schedule import Schedule
from .policy.returns import Returns
from .policy.stage_order import order_rules
from .runtime.watched_files import WatchedFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where the config comes from, to reread it; made before it is first read. Flags win over the file."""

    path: Path
    flags: Mapping[str, object]
    watched: WatchedFiles = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "watched", WatchedFiles(self.path))

    def read(self) -> Draft:
        return Draft.read(self.path, self.flags)


class Settings:
    """Holds the config. A change is applied only if all of it is valid."""

    def __init__(self, config: ProxyConfig, source: ConfigSource | None = None) -> None:
        self.config = config
        self.schedule = schedule(config)
        self._endpoints = endpoints(self.schedule)
        self.static_workers = _all_workers(config, self._endpoints)
        self.laws = WorkerLaws(profiles(config, self.static_workers))
        self.added: set[WorkerId] = set()  # static workers added by the admin API, and not named by the file since
        self.overruled: set[WorkerId] = set()  # those of the file of which the admin API has said something else since
        self._source = source
        self._in_file = config  # as last read: only keys that change in the file override the admin API's
        self._rules = _rules(config, self.laws, self.schedule)
        self.returns: Returns | None = None  # what decisions may go by, once it is there

    def rules(self) -> Rules:
        if self.returns is None:
            return self._rules
        self.returns.prefills_answer = self._rules.prefills_answer
        return msgspec.structs.replace(self._rules, returns=self.returns)

    def change(self, **live: object) -> None:
        """Sets live keys; ConfigError, with nothing changed, if a value is not allowed."""
        self._take(replace(self.config, **live))  # type: ignore[arg-type]

    def overrule(self, worker: WorkerId) -> None:
        """What an operator does to a worker of the file holds until the file says something else of that worker."""
        if any(known.id == worker for known in self.static_workers):
            self.overruled.add(worker)

    def _name_workers(self, workers: tuple[Worker, ...]) -> None:
        before, after = ({worker.id: worker for worker in named} for named in (self.static_workers, workers))
        self.added -= {worker for worker, named in after.items() if named != before.get(worker)}
        self.overruled = {worker for worker in self.overruled if before.get(worker) == after.get(worker)}
        self.static_workers = workers

    def live(self) -> tuple[dict[str, object], dict[str, object]]:
        """The live keys as they are in force, and as the file said them last."""
        in_force, in_file = ({name: getattr(config, name) for name in LIVE} for config in (self.config, self._in_file))
        return in_force, in_file

    def adopt(self, in_force: Mapping[str, object], in_file: Mapping[str, object]) -> None:
        """Takes what `live` says in another process, which may have read the file before or after this one."""
        self.change(**in_force)
        self._in_file = replace(self._in_file, **in_file)  # type: ignore[arg-type]
        if self._source is not None:
            self._source.watched.look_again()

    def look(self) -> bool | None:
        """Rereads a file that has changed and is no longer being written; None if there is none."""
        if self._source is not None and self._source.watched.are_new():
            return self.reload()
        return self.look_at_endpoints()

    def look_at_endpoints(self) -> bool | None:
        """As `look`, of a file of endpoints alone; None also where there is none, or workers in it may still come."""
        found = self._endpoints
        if found is None or not found.are_new():
            return None
        try:
            if not found.reread(may_be_empty=self.config.allow_empty):
                return None
        except PPDError as exc:
            log.error("the changed file of endpoints is not used: %s", exc)
            return False
        self._name_workers(_all_workers(self.config, found))
        log.info("%s: names %d endpoints now", found.path, len(found.workers))
        return True

    def reload(self) -> bool:
        """Applies the file's live keys. If it can't be used: logs, changes nothing and returns False."""
        assert self._source is not None, "only a file is watched"
        try:
            draft = self._source.read()
            wanted = draft.checked()
            self._refuse_emptied(wanted, draft.is_empty)
            config, waiting = with_changes(self.config, self._in_file, wanted)
            if config.table != self.config.table:
                check_table(config.table)
            self._take(config)
            self._in_file = wanted
        except PPDError as exc:
            log.error("the changed config is not used: %s", exc)
            return False
        if waiting:
            log.warning("these keys take effect at the next start: %s", ", ".join(waiting))
        return True

    def _refuse_emptied(self, wanted: ProxyConfig, is_empty: bool) -> None:
        """An editor, a full disk or a template without its values may leave half a file that is good TOML."""
        if wanted.allow_empty or wanted == self._in_file:
            return
        if is_empty:
            raise ConfigError("the file holds no key; start with --allow-empty if that is meant", param="config")
        if self._in_file.workers and not wanted.workers:
            raise ConfigError(
                f"workers: none is left of {len(self._in_file.workers)}; set allow_empty = true if that is meant",
                param="workers",
            )

    def _take(self, config: ProxyConfig) -> None:
        plugins = schedule(config, self.schedule)
        found = endpoints(plugins, self._endpoints)
        workers, rules = _all_workers(config, found), _rules(config, self.laws, plugins)
        own = profiles(config, workers)
        changed = [name for name in sorted(LIVE) if getattr(config, name) != getattr(self.config, name)]
        if changed:
            told = [f"{name} = {KEYS[name].shown(getattr(config, name))}" for name in changed]
            log.info("changed: %s", ", ".join(told))
        self._name_workers(workers)
        self.config, self._rules = config, rules
        self.schedule, self._endpoints = plugins, found
        self.laws.use(own)


def profiles(config: ProxyConfig, workers: Iterable[Worker]) -> Profiles:
    """ConfigError names the key of each engine profile that cannot be loaded."""
    named = {worker.profile for worker in workers}
    return Profiles(config.profile, named, long_prefill_tokens=config.long_prefill_tokens)


def check_table(name: str) -> None:
    """PPDError if no table of this name can be loaded."""
    DecisionTable.load(find(name))


def schedule(config: ProxyConfig, known: Schedule | None = None) -> Schedule | None:
    """What `epp_config` says; `known`, with what its plugins remember, if it still says the same."""
    if not config.epp_config:
        return None
    document, text = read_yaml("epp_config", Path(config.epp_config))
    found = schedule_of(document, text, config.zero_means)
    is_same = known is not None and (known.source, known.zero_means) == (found.source, found.zero_means)
    return known if is_same else found


def endpoints(plugins: Schedule | None, known: EndpointsOfFile | None = None) -> EndpointsOfFile | None:
    """What the file of `file-discovery` names; `known`, if it is of the same file."""
    file = None if plugins is None else plugins.endpoints
    if file is None:
        return None
    if known is not None and (known.path, known.is_watched) == (file.path, file.is_watched):
        return known
    return EndpointsOfFile(file.path, file.is_watched)


def workers_of(config: ProxyConfig) -> tuple[Worker, ...]:
    """All that the config and its files name."""
    return _all_workers(config, endpoints(schedule(config)))


def _all_workers(config: ProxyConfig, found: EndpointsOfFile | None) -> tuple[Worker, ...]:
    """Those of the config, and those of a file of endpoints that the config does not name."""
    workers = static_workers(config)
    named = {worker.id for worker in workers}
    others = () if found is None else found.workers
    return (*workers, *(worker for worker in others if worker.id not in named))


def check_mode(config: ProxyConfig, plugins: Schedule | None = None) -> None:
    """ConfigError where the mode needs plugins and there are none, or predicts and it is not said by which profile.

    plugins: of `epp_config`; None: they are read.
    """
    if config.mode is Mode.PROFILES and not config.epp_config:
        raise ConfigError(
            "epp_config: mode = 'profiles' goes by llm-d's plugins, so it must name their file", param="epp_config"
        )
    if not _predicts(config, plugins) or config.profile:
        return
    workers = static_workers(config)
    if not workers or not all(worker.profile for worker in workers):
        raise ConfigError(
            f"profile: mode = {config.mode.value!r} predicts what turns will take, so it must name an engine profile; "
            "or each of `workers` its own",
            param="profile",
        )


def _predicts(config: ProxyConfig, plugins: Schedule | None) -> bool:
    if config.mode is not Mode.PROFILES:
        return config.mode in PREDICTING
    decider = None if (known := plugins or schedule(config)) is None else known.decider
    return isinstance(decider, OwnRule) and decider.mode in PREDICTING


def _rules(config: ProxyConfig, laws: Laws, plugins: Schedule | None) -> Rules:
    check_mode(config, plugins)
    plugins = plugins if config.mode is Mode.PROFILES else None
    scored = None
    if config.mode is Mode.TABLE or (plugins is not None and isinstance(plugins.decider, OwnRule)):
        table, weights = DecisionTable.load(find(config.table)), Weights(config.w_ttft, config.w_tpot)
        scored = table.scored(weights, config.lookup)
    return Rules(
        mode=config.mode,
        scored=scored,
        uncovered=config.uncovered,
        x=config.x,
        limits=Limits(**{name: getattr(config, name) for name in Limits.__struct_fields__}),
        worker_limit=config.max_worker_inflight,
        warm_up_s=config.warm_up_s,
        laws=laws,
        moves_kv=config.moves_kv,
        prefills_answer=config.prefills_answer,
        explore_share=config.explore_share,
        orders=order_rules(config),
        targets=target_rules(config),
        weighing=weight_rules(config),
        weights=Weights(config.w_ttft, config.w_tpot),
        schedule=plugins,
    )
