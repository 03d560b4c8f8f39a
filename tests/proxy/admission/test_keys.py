"""What a key file may say, and whom a key stands for."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.admission.auth import check_admin, forced_route
from ppd.proxy.admission.keys import Client, KeyEntry, Keys, decode, encode, hash_of, new_key, scoped
from ppd.proxy.errors import ConfigError, Forbidden, Unauthorized
from ppd.proxy.laws.targets import GivenTargets
from ppd.proxy.policy import Route

ONE, TWO, THREE = (f"sha256:{digit * 64}" for digit in "123")
KEY = "ppd_" + "k" * 43


def text(*tables: str) -> bytes:
    return "\n".join(f"[[key]]\n{table}\n" for table in tables).encode()


def refusal(data: bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(data, "keys.toml")
    assert caught.value.param == "keys_file"
    return caught.value.message


def test_what_is_not_said_has_a_default() -> None:
    (entry,) = decode(text(f'name = "acme"\nhash = "{ONE}"'), "keys.toml").entries
    assert entry.digest == bytes.fromhex("1" * 64)
    assert entry.client == Client(
        name="acme", tenant="acme", priority=0, weight=1.0, requests_per_minute=0, tokens_per_minute=0, models=()
    )


def test_what_is_said_counts() -> None:
    said = f"""
        name = "acme-2"
        hash = "{ONE}"
        tenant = "acme"
        priority = -5
        weight = 3
        requests_per_minute = 60
        tokens_per_minute = 10_000
        models = ["llama", "org/qwen 2"]
        cache_group = "assistants"
        slo = "ttft=0.5,tpot=0.03"
        w_tpot = 3
    """
    (entry,) = decode(text(said), "keys.toml").entries
    assert entry.client == Client(
        name="acme-2",
        tenant="acme",
        priority=-5,
        weight=3.0,
        requests_per_minute=60,
        tokens_per_minute=10_000,
        models=("llama", "org/qwen 2"),
        cache_group="assistants",
        slo=GivenTargets(ttft=0.5, tpot=0.03),
        w_tpot=3.0,
    )


@pytest.mark.parametrize("data", [b"", b"# all keys are withdrawn\n"])
def test_a_file_without_keys_lets_nobody_in(data: bytes) -> None:
    assert decode(data, "keys.toml").find("") is None


def test_a_key_stands_for_its_own_client_wherever_it_is_in_the_file() -> None:
    keys = [new_key(secrets.token_urlsafe) for _ in range(3)]
    ring = decode(
        "".join(encode(Client(name=key[-9:], tenant="t"), hash_of(key)) for key in keys).encode(), "keys.toml"
    )
    for key in keys:
        found = ring.find(key)
        assert found is not None
        assert found.name == key[-9:]
        for wrong in ("", key[:-1], key + "k", key.upper(), " " + key, hash_of(key), "\u00e9"):
            assert ring.find(wrong) is None


def test_a_digest_that_is_nearly_the_same_is_another() -> None:
    digest = sha256(KEY.encode()).digest()
    near = [digest[:31] + bytes([digest[31] ^ 1]), bytes([digest[0] ^ 1]) + digest[1:], digest[:31]]
    entries = tuple(KeyEntry(digest, Client(name="near", tenant="t")) for digest in near)
    assert Keys(entries).find(KEY) is None


class Counted(tuple[KeyEntry, ...]):
    """Entries that count how often one of them is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[KeyEntry]:
        for entry in super().__iter__():
            Counted.looks += 1
            yield entry


@pytest.mark.parametrize("key", ["first", "last", "none"])
def test_every_entry_is_compared_wherever_the_key_is(key: str) -> None:
    Counted.looks = 0
    nobody = Client(name="", tenant="")
    Keys(Counted(KeyEntry(sha256(name).digest(), nobody) for name in (b"first", b"mid", b"last"))).find(key)
    assert Counted.looks == 3


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """What was compared in constant time; it finds nothing equal, so a key that is let in was compared otherwise."""
    pairs: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        pairs.append((one, other))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    return pairs


def test_a_clients_key_is_compared_in_constant_time(compared: list[tuple[bytes, bytes]]) -> None:
    given, other = sha256(KEY.encode()).digest(), sha256(b"other").digest()
    nobody = Client(name="", tenant="")
    assert Keys((KeyEntry(given, nobody), KeyEntry(other, nobody))).find(KEY) is None
    assert compared == [(given, given), (other, given)]


def test_the_admin_key_is_compared_in_constant_time(compared: list[tuple[bytes, bytes]]) -> None:
    headers = {"x-admin-key": "operator", "x-ppd-force-route": Route.LOCAL.value}
    with pytest.raises(Unauthorized):
        check_admin(headers, "operator")
    with pytest.raises(Forbidden):
        forced_route(headers, "operator")
    assert compared == [(b"operator", b"operator")] * 2


def test_the_hash_is_what_sha256sum_makes_of_the_key() -> None:
    assert hash_of("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_keys_are_256_bits_of_the_given_source() -> None:
    asked: list[int] = []

    def source(count: int) -> str:
        asked.append(count)
        return "random"

    assert new_key(source) == "ppd_random"
    assert asked == [32]
    assert len({new_key(secrets.token_urlsafe) for _ in range(100)}) == 100


NAMES = st.from_regex(r"[A-Za-z0-9._@-]{1,40}", fullmatch=True)
MODELS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.isprintable)


SECONDS = st.integers(1, 60 * 10**6).map(lambda microseconds: microseconds / 1e6)


@given(
    st.builds(
        Client,
        name=NAMES,
        tenant=NAMES,
        priority=st.integers(-1000, 1000),
        weight=st.floats(0.001, 1000),
        requests_per_minute=st.integers(0, 10**12),
        tokens_per_minute=st.integers(0, 10**12),
        models=st.lists(MODELS, max_size=3).map(tuple),
        slo=st.none() | st.builds(GivenTargets, ttft=SECONDS, tpot=SECONDS),
        w_ttft=st.none() | st.floats(0.001, 1e6),
        w_tpot=st.none() | st.floats(0, 1e6),
    )
)
def test_an_entry_reads_back_as_it_was_written(client: Client) -> None:
    (entry,) = decode(encode(client, TWO).encode(), "keys.toml").entries
    assert entry.client == client
    assert entry.digest == bytes.fromhex("2" * 64)


@pytest.mark.parametrize(
    ("member", "allowed"),
    [
        ("priority = 1.5", "priority = 1.5: must be a whole number from -1000 to 1000"),
        ("priority = true", "priority = True: must be a whole number from -1000 to 1000"),
        ("priority = 1001", "priority = 1001: must be a whole number from -1000 to 1000"),
        ("weight = 0", "weight = 0: must be a number from 0.001 to 1000"),
        ("weight = -1", "weight = -1: must be a number from 0.001 to 1000"),
        ("weight = nan", "weight = nan: must be a number from 0.001 to 1000"),
        ("weight = inf", "weight = inf: must be a number from 0.001 to 1000"),
        ("weight = true", "weight = True: must be a number from 0.001 to 1000"),
        ('weight = "1"', "weight: must be a number from 0.001 to 1000"),
        ("requests_per_minute = -1", "requests_per_minute = -1: must be a whole number from 0 (no limit) to 10000"),
        ("tokens_per_minute = 1e3", "tokens_per_minute = 1000.0: must be a whole number from 0 (no limit) to 10000"),
        ('tenant = ""', "tenant: must be 1 to 64 letters, digits and . _ @ -"),
        ("tenant = 1", "tenant = 1: must be 1 to 64 letters, digits and . _ @ -"),
        ('models = "llama"', "models: must be a list of models' names"),
        ('models = [""]', "models: must be a list of models' names"),
        ('models = ["a\\nb"]', "models: must be a list of models' names"),
        ("models = [1]", "models: must be a list of models' names"),
        ("w_tpot = -1", "w_tpot = -1: must be a number from 0 to 1000000"),
        ("w_ttft = nan", "w_ttft = nan: must be a number from 0 to 1000000"),
        ("w_ttft = true", "w_ttft = True: must be a number from 0 to 1000000"),
        ("w_ttft = 0\nw_tpot = 0.0", "w_ttft = 0: must be above 0 where w_tpot is 0"),
        ("slo = 0.5", "slo = 0.5: must be like ttft=0.5,tpot=0.03"),
        ('slo = "ttft=0"', "slo: must be like ttft=0.5,tpot=0.03"),
        ("rpm = 60", "rpm is not known; known are hash, name, tenant, priority, weight, requests_per_minute, tokens_"),
    ],
)
def test_a_value_that_can_not_be_used_is_named_with_what_can(member: str, allowed: str) -> None:
    said = refusal(text(f'name = "first"\nhash = "{ONE}"', f'name = "acme"\nhash = "{TWO}"\n{member}'))
    assert said.startswith(f"keys.toml: key 'acme': {allowed}")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (f'hash = "{ONE}"', "key 2: name: must be 1 to 64 letters"),
        (f'hash = "{ONE}"\nname = "a b"', "key 2: name: must be 1 to 64 letters"),
        (f'hash = "{ONE}"\nname = "{"n" * 65}"', "key 2: name: must be 1 to 64 letters"),
        ('name = "acme"', "key 'acme': hash: must be \"sha256:\" and 64 hex digits"),
        (f'name = "acme"\nhash = "{ONE[:-1]}"', "key 'acme': hash: must be"),
        (f'name = "acme"\nhash = "{ONE}1"', "key 'acme': hash: must be"),
        (f'name = "acme"\nhash = "{ONE}\\n"', "key 'acme': hash: must be"),
        (f'name = "acme"\nhash = "md5:{"1" * 32}"', "key 'acme': hash: must be"),
        (f'name = "acme"\nhash = "{ONE}"\npriority = 0x{"f" * 5000}', "key 'acme': priority: must be"),
        (f'name = "first"\nhash = "{TWO}"', "key 'first': name: must be unique"),
        (f'name = "acme"\nhash = "{THREE}"', "key 'acme': hash: must be unique, and key 'first' has the same"),
        (
            f'name = "acme"\nhash = "{ONE}"\ntenant = "first"\nweight = 2',
            "key 'acme': weight = 2: must be 1 as key 'first' says",
        ),
    ],
)
def test_an_entry_is_refused_by_name_or_place(table: str, expected: str) -> None:
    assert refusal(text(f'name = "first"\nhash = "{THREE}"', table)).startswith(f"keys.toml: {expected}")


def test_keys_of_one_tenant_may_share_its_weight() -> None:
    shared = 'tenant = "acme"\nweight = 2'
    keys = decode(text(f'name = "a"\nhash = "{ONE}"\n{shared}', f'name = "b"\nhash = "{TWO}"\n{shared}'), "keys.toml")
    assert [(entry.client.tenant, entry.client.weight) for entry in keys.entries] == [("acme", 2.0)] * 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[[key]]\nname = \n", "must be TOML in UTF-8 (at line 2, column 8)"),
        (b"\xff", "must be TOML in UTF-8"),
        (b"k = " + b"9" * 5000, "must be TOML in UTF-8"),
        (b"k = " + b"[" * 5000, "must be TOML in UTF-8"),
        (b"keys = []", "must hold [[key]] tables and nothing else"),
        (b'[key]\nname = "a"', "must hold [[key]] tables and nothing else"),
        (b'key = "a"', "must hold [[key]] tables and nothing else"),
        (b'key = ["a"]', "key 1: must be a [[key]] table"),
    ],
)
def test_a_file_of_another_shape_is_refused(data: bytes, expected: str) -> None:
    assert refusal(data) == f"keys.toml: {expected}"


SECRET = "Sk-Live-0123456789"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (f'# for tests: {KEY}\n[[key]]\nname = "a"\nhash = "{ONE}"\n'.encode(), "line 1 holds a key in plain text"),
        (text(f'name = "a"\nhash = "{KEY}"'), "line 3 holds a key in plain text"),
        (text(f'name = "{KEY}"\nhash = "{ONE}"'), "line 2 holds a key in plain text"),
        (text(f'name = "a"\nhash = "{SECRET}"'), "key 'a': hash: must be \"sha256:\" and 64 hex digits"),
        (text(f'name = "a"\nhash = "{ONE}"\nkey = "{SECRET}"'), "key 'a': key is not known"),
        (text(f'name = "a"\nhash = "{ONE}"\n"{SECRET}" = true'), "key 'a': a member is not known"),
        (text(f'name = "a {SECRET}"\nhash = "{ONE}"'), "key 1: name: must be"),
        (f'"{SECRET}" = "acme"\n'.encode(), "must hold [[key]] tables"),
        (f'["{SECRET}"]\n["{SECRET}"]\n'.encode(), "must be TOML in UTF-8"),
    ],
)
def test_a_key_in_plain_text_is_refused_and_not_repeated(data: bytes, expected: str) -> None:
    said = refusal(data)
    assert said.startswith(f"keys.toml: {expected}")
    assert KEY not in said
    assert SECRET not in said


@pytest.mark.parametrize(
    ("models", "model", "may"),
    [
        ((), "llama", True),
        ((), "", True),
        (("llama",), "llama", True),
        (("llama",), "qwen", False),
        (("a",), "", False),
    ],
)
def test_a_key_is_for_all_models_or_those_it_names(models: tuple[str, ...], model: str, may: bool) -> None:
    assert Client(name="a", tenant="a", models=models).may_use(model) is may


# -- what keeps tenants apart on the workers


def entries(*members: str) -> bytes:
    """Keys 0, 1, ... of the tenants and groups that the members name."""
    return text(*(f'name = "{at}"\nhash = "sha256:{at:064x}"\n{more}' for at, more in enumerate(members)))


def salts(data: bytes, *share_prefixes: str) -> list[str]:
    found = [entry.client.scope for entry in scoped(decode(data, "keys.toml"), share_prefixes).entries]
    assert all(found)
    return [scope.salt() for scope in found if scope is not None]


@pytest.mark.parametrize(
    ("members", "share_prefixes", "same"),
    [
        (["tenant='a'", "tenant='b'"], [], "01"),
        (["tenant='a'", "tenant='a'"], [], "00"),
        (["tenant='a'", "tenant='b'", "tenant='c'"], ["a", "c"], "010"),
        (["tenant='a'\ncache_group='g'", "tenant='b'\ncache_group='g'", "tenant='a'"], [], "001"),
        (["tenant='a'\ncache_group='g'", "tenant='b'", "tenant='a'"], ["a", "b"], "011"),
        (["tenant='a'\ncache_group='b'", "tenant='b'"], [], "01"),
        (["tenant='a'", "tenant='b'"], ["a", "nobody"], "01"),
    ],
)
def test_who_shares_cached_prompts(members: list[str], share_prefixes: list[str], same: str) -> None:
    found = salts(entries(*members), *share_prefixes)
    assert "".join(str(found.index(salt)) for salt in found) == "".join(str(same.index(one)) for one in same)


def test_a_tenants_salt_stays_while_its_first_key_does() -> None:
    before = entries("tenant='a'", "tenant='b'")
    assert salts(before) == salts(before)
    assert salts(before + entries("tenant='a'").replace(b'"0"', b'"2"').replace(b"0" * 64, b"f" * 64))[:2] == salts(
        before
    )
    assert salts(entries("tenant='a'").replace(b"0" * 64, b"f" * 64)) != salts(before)[:1]


def test_keys_of_one_group_still_have_ids_and_responses_of_their_own() -> None:
    one, two = scoped(decode(entries("cache_group='g'", "cache_group='g'"), "keys.toml")).entries
    assert one.client.scope is not None and two.client.scope is not None
    assert one.client.scope.salt() == two.client.scope.salt()
    assert one.client.scope.id("s") != two.client.scope.id("s")
    assert not two.client.scope.owns(one.client.scope.new_response_id())
