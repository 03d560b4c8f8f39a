"""Clients' API keys: what a key file may say, and which client a given key stands for.

A key file is TOML, one table a key; all but `hash` and `name` may be left out:

    [[key]]
    name = "acme-agents"           # unique; what receipts and logs show
    hash = "sha256:9f86d081..."    # of the key, in UTF-8
    tenant = "acme"                # keys of a tenant share conversations and a fair share; default: the name
    priority = 0                   # lower is served earlier, as in vLLM
    weight = 1                     # of the tenant's fair share
    requests_per_minute = 60       # 0: no limit
    tokens_per_minute = 100000
    models = ["llama"]             # empty: all
    cache_group = "assistants"     # keys of one group share cached prompts; default: the tenant's keys do
    slo = "ttft=0.5,tpot=0.03"     # targets of its turns, as in the header X-PPD-SLO; default: its class's
    w_ttft = 1                     # weights of its turns in mode `weights`; default: their model's
    w_tpot = 3

What keeps a tenant's prompts and stored responses apart on the workers is made from the hash of its first key in the
file (`tenant_scope`). It outlives restarts and is the same in all processes; if that key is removed, the
tenant's cached prompts count as new once.

A file without any key says so: `key = []`.

A plain hash is enough, because a key is 256 random bits: a slow, salted hash protects only what can be guessed, and
every request would pay for it. So a key is made by `new_key`, never invented. Errors repeat nothing of the file but
checked names and numbers, because somebody may have put a key there.
"""

from __future__ import annotations

import hmac
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from ..decision_table.score import LARGEST_WEIGHT, MOST_WEIGHTS, TurnWeights
from ..errors import ConfigError
from ..laws.targets import ALLOWED_TARGETS, GivenTargets, given_targets
from .tenant_scope import TenantScope

KEY_BYTES = 32
_KEY_START = "ppd_"
_KEY = re.compile(rb"ppd_[A-Za-z0-9_-]{43}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_MEMBER = re.compile(r"[a-z_]{1,32}")
_TOML_POSITION = re.compile(r"\(at [^()]*\)$")
_LARGEST_LIMIT = 10**12  # a minute
_SCOPE_CONTEXT = "ppd-router 2026-11-22 admission.keys: scope of"  # a change makes all cached prompts count as new


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a key, and what it may use."""

    name: str  # of the key; empty where no key is asked for
    tenant: str
    priority: int = 0
    weight: float = 1.0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    models: tuple[str, ...] = ()
    cache_group: str = ""
    slo: GivenTargets | None = None
    w_ttft: float | None = None
    w_tpot: float | None = None
    scope: TenantScope | None = None  # None: nothing keeps it apart, as no keys are in force

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)

    @property
    def weights(self) -> TurnWeights | None:
        if self.w_ttft is None and self.w_tpot is None:
            return None
        return TurnWeights(w_ttft=self.w_ttft, w_tpot=self.w_tpot)

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key of the file."""

    digest: bytes  # SHA-256 of the key
    client: Client


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of one file."""

    entries: tuple[KeyEntry, ...] = ()
    is_blank: bool = False  # the file says nothing, not even that there is no key: `key = []`

    def find(self, key: str) -> Client | None:
        """The client with this key.

        Every entry is compared, each in constant time, so the response time tells neither which key was near nor how
        many come before it. A dict of digests would tell hardly more, as nobody can choose a digest, but that rests on
        how dicts compare. 1000 keys are compared in about 0.1 ms.
        """
        digest, found = sha256(key.encode()).digest(), None
        for entry in self.entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.client
        return found


def new_key(random_text: Callable[[int], str]) -> str:
    """256 random bits, from `secrets.token_urlsafe`; the fixed start lets a leaked key be searched for."""
    return _KEY_START + random_text(KEY_BYTES)


def hash_of(key: str) -> str:
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def encode(client: Client, key_hash: str) -> str:
    plain = Client(name=client.name, tenant=client.name)
    members: dict[str, object] = {"name": client.name, "hash": key_hash}
    for member in _MEMBERS:
        if member != "hash" and getattr(client, member) != getattr(plain, member):
            members[member] = getattr(client, member)
    return "[[key]]\n" + "".join(f"{member} = {_toml(value)}\n" for member, value in members.items())


def _toml(value: object) -> str:
    # TOML writes strings, whole numbers and lists as JSON does, but not inf and nan.
    if isinstance(value, float):
        return str(value)
    return json.dumps(str(value) if isinstance(value, GivenTargets) else value, ensure_ascii=False)


def decode(data: bytes, file: str) -> Keys:
    """ConfigError names the file, the key and what is allowed."""
    tables = _tables(data, file)
    entries = [_entry(table, number, file) for number, table in enumerate(tables or (), start=1)]
    _check_together(entries, file)
    return Keys(tuple(entries), is_blank=tables is None)


def scoped(keys: Keys, share_prefixes: Collection[str] = ()) -> Keys:
    """The keys with their clients' scopes, whose secrets are made from the first key of each tenant or group.

    share_prefixes: tenants that share cached prompts.
    """
    return Keys(tuple(_scoped(keys.entries, share_prefixes)))


def _scoped(entries: Sequence[KeyEntry], sharing: Collection[str]) -> Iterator[KeyEntry]:
    first: dict[tuple[str, str], bytes] = {}
    for entry in entries:
        client = entry.client
        tenant = ("tenant", client.tenant)
        group = ("group", client.cache_group) if client.cache_group else tenant
        if group is tenant and client.tenant in sharing:
            group = ("shared", "")
        secrets = [first.setdefault(name, _secret(entry.digest, *name)) for name in (group, tenant)]
        yield KeyEntry(entry.digest, replace(client, scope=TenantScope(*secrets)))


def _secret(digest: bytes, kind: str, name: str) -> bytes:
    return hmac.digest(digest, f"{_SCOPE_CONTEXT} {kind} {name}".encode(), "sha256")


def _tables(data: bytes, file: str) -> Sequence[object] | None:
    if plain := _KEY.search(data):
        line = data.count(b"\n", 0, plain.start()) + 1
        raise _refused(f"{file}: line {line} holds a key in plain text: only hashes may be here; make another key")
    try:
        raw = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as exc:  # also of bytes that are no text, and of endless numbers
        position = _TOML_POSITION.search(str(exc))
        raise _refused(f"{file}: must be TOML in UTF-8 {position.group() if position else ''}".rstrip()) from None
    tables = raw.pop("key", None)
    if raw or not isinstance(tables, list | None):
        raise _refused(f"{file}: must hold [[key]] tables and nothing else")
    return tables


def _entry(table: object, number: int, file: str) -> KeyEntry:
    if not isinstance(table, dict):
        raise _refused(f"{file}: key {number}: must be a [[key]] table")
    where = f"{file}: key {table['name']!r}" if _is_name(table.get("name")) else f"{file}: key {number}"
    for member in table:
        if member not in _MEMBERS:
            shown = member if _MEMBER.fullmatch(member) else "a member"
            raise _refused(f"{where}: {shown} is not known; known are {', '.join(_MEMBERS)}, and never the key itself")
    for member, (is_allowed, allowed) in _MEMBERS.items():
        value = table.get(member)
        if not is_allowed(value) and (member in table or member in ("hash", "name")):
            is_short = isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**18)
            shown = f"{member} = {value}" if is_short else member
            raise _refused(f"{where}: {shown}: must be {allowed}")
    if table.get("w_ttft") == table.get("w_tpot") == 0:
        raise _refused(f"{where}: w_ttft = {table['w_ttft']}: must be above 0 where w_tpot is 0")
    name: str = table["name"]
    client = Client(
        name=name,
        tenant=table.get("tenant", name),
        priority=table.get("priority", 0),
        weight=float(table.get("weight", 1.0)),
        requests_per_minute=table.get("requests_per_minute", 0),
        tokens_per_minute=table.get("tokens_per_minute", 0),
        models=tuple(table.get("models", ())),
        cache_group=table.get("cache_group", ""),
        slo=given_targets(table["slo"]) if "slo" in table else None,
        w_ttft=_float(table.get("w_ttft")),
        w_tpot=_float(table.get("w_tpot")),
    )
    return KeyEntry(bytes.fromhex(table["hash"].removeprefix("sha256:")), client)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _check_together(entries: Sequence[KeyEntry], file: str) -> None:
    names: set[str] = set()
    by_digest: dict[bytes, Client] = {}
    by_tenant: dict[str, Client] = {}
    for entry in entries:
        client = entry.client
        where = f"{file}: key {client.name!r}"
        if client.name in names:
            raise _refused(f"{where}: name: must be unique")
        other = by_digest.setdefault(entry.digest, client)
        if other is not client:
            raise _refused(f"{where}: hash: must be unique, and key {other.name!r} has the same")
        other = by_tenant.setdefault(client.tenant, client)
        if other.weight != client.weight:
            same = f"{other.weight:g} as key {other.name!r} says, for a tenant has one share"
            raise _refused(f"{where}: weight = {client.weight:g}: must be {same}")
        names.add(client.name)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most  # not a bool


def _is_model(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.001 <= value <= 1000


def _is_turn_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST_WEIGHT


def _are_targets(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(given_targets(value))
    except ValueError:
        return False


_NAMES = "1 to 64 letters, digits and . _ @ -"
_LIMITS = f"a whole number from 0 (no limit) to {_LARGEST_LIMIT}"
# Of each member: whether a value is allowed, and what an error says is allowed.
_MEMBERS: dict[str, tuple[Callable[[object], bool], str]] = {
    "hash": (
        lambda value: isinstance(value, str) and _HASH.fullmatch(value) is not None,
        '"sha256:" and 64 hex digits in lower case, as `ppd keys new` makes it, and not the key itself',
    ),
    "name": (_is_name, _NAMES),
    "tenant": (_is_name, _NAMES),
    "priority": (lambda value: _is_whole(value, -1000, 1000), "a whole number from -1000 to 1000"),
    "weight": (_is_weight, "a number from 0.001 to 1000"),
    "requests_per_minute": (lambda value: _is_whole(value, 0, _LARGEST_LIMIT), _LIMITS),
    "tokens_per_minute": (lambda value: _is_whole(value, 0, _LARGEST_LIMIT), _LIMITS),
    "models": (
        lambda value: isinstance(value, list) and all(map(_is_model, value)),
        "a list of models' names, of 1 to 256 printable characters each",
    ),
    "cache_group": (_is_name, _NAMES),
    "slo": (_are_targets, ALLOWED_TARGETS),
    **dict.fromkeys(MOST_WEIGHTS, (_is_turn_weight, f"a number from 0 to {LARGEST_WEIGHT:.0f}")),
}


def _refused(message: str) -> ConfigError:
    return ConfigError(message, param="keys_file")
