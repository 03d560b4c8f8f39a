"""Which files make a TLS context, and what a wrong one is called."""

from __future__ import annotations

import ssl

import pytest

from certificates import Authority
from ppd.proxy.config import ProxyConfig
from ppd.proxy.edge.tls import server_context, worker_context
from ppd.proxy.errors import ConfigError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    one, two, locked = authority.issue("one"), authority.issue("two"), authority.issue("locked", password="secret")
    (folder / "text").write_text("no certificate")
    return {
        "": "",
        "ca": authority.ca,
        "cert": one.cert,
        "key": one.key,
        "other key": two.key,
        "locked cert": locked.cert,
        "locked key": locked.key,
        "text": str(folder / "text"),
        "missing": str(folder / "missing"),
        "folder": str(folder),
    }


@pytest.mark.parametrize(
    ("cert", "key", "ca", "blamed"),
    [
        ("missing", "key", "", "cert"),
        ("text", "key", "", "cert"),
        ("folder", "key", "", "cert"),
        ("key", "key", "", "cert"),
        ("cert", "missing", "", "key"),
        ("cert", "text", "", "key"),
        ("cert", "other key", "", "key"),
        ("cert", "cert", "", "key"),
        ("locked cert", "locked key", "", "key"),
        ("cert", "key", "missing", "ca"),
        ("cert", "key", "text", "ca"),
    ],
)
@pytest.mark.parametrize("side", ["clients", "workers"])
def test_a_file_that_cannot_be_used_is_named(
    files: dict[str, str], side: str, cert: str, key: str, ca: str, blamed: str
) -> None:
    names = {"cert": "tls_cert_file", "key": "tls_key_file", "ca": "tls_client_ca_file"}
    if side == "workers":
        names = {"cert": "worker_cert_file", "key": "worker_key_file", "ca": "worker_ca_file"}
    config = ProxyConfig(**{names["cert"]: files[cert], names["key"]: files[key], names["ca"]: files[ca]})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        server_context(config) if side == "clients" else worker_context(config)
    assert refused.value.param == names[blamed]
    assert repr(getattr(config, names[blamed])) in str(refused.value)


def test_without_a_certificate_clients_speak_plain_http() -> None:
    assert server_context(ProxyConfig()) is None


def test_clients_are_asked_for_a_certificate_only_where_an_authority_is_set(files: dict[str, str]) -> None:
    config = ProxyConfig(tls_cert_file=files["cert"], tls_key_file=files["key"])
    asked = ProxyConfig(tls_cert_file=files["cert"], tls_key_file=files["key"], tls_client_ca_file=files["ca"])
    modes = [context.verify_mode for each in (config, asked) if (context := server_context(each)) is not None]
    assert modes == [ssl.CERT_NONE, ssl.CERT_REQUIRED]


@pytest.mark.parametrize("ca", ["", "ca"])
def test_a_worker_must_always_show_who_it_is(files: dict[str, str], ca: str) -> None:
    context = worker_context(ProxyConfig(worker_ca_file=files[ca]))
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    authorities = {str(cert["subject"]) for cert in context.get_ca_certs() if ca}
    assert authorities == ({"((('commonName', 'authority'),),)"} if ca else set())
