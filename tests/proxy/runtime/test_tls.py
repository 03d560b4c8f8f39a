"""Which files make a TLS context, and what a wrong one is called."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import time
from pathlib import Path

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import ConfigError
from ppd.proxy.runtime.tls import Tls, client_tls, worker_tls
from ppd.proxy.runtime.watched_files import STILL_IF_SHORTER
from tests.support.credentials import Authority

DAY_S = 86_400.0  # for so long certificates are valid here


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    one, two, rsa = authority.issue("one"), authority.issue("two"), authority.issue("rsa", key="rsa:2048")
    locked = authority.issue("locked", password="secret")
    (folder / "text").write_text("no certificate")
    return {
        "": "",
        "ca": authority.ca,
        "cert": one.cert,
        "key": one.key,
        "two cert": two.cert,
        "two key": two.key,
        "rsa cert": rsa.cert,
        "rsa key": rsa.key,
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
        ("cert", "two key", "", "key"),
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
        client_tls(config) if side == "clients" else worker_tls(config)
    assert refused.value.param == names[blamed]
    assert repr(getattr(config, names[blamed])) in str(refused.value)


def test_the_systems_authorities_are_read_once_somebody_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[ssl.SSLContext]()

    def noted(context: ssl.SSLContext) -> None:
        read.append(context)

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", noted)
    tls = worker_tls(ProxyConfig())
    assert read == []
    assert tls.context is tls.context
    assert read == [tls.context]


def test_without_a_certificate_clients_speak_plain_http() -> None:
    assert client_tls(ProxyConfig()) is None


def test_clients_are_asked_for_a_certificate_only_where_an_authority_is_set(files: dict[str, str]) -> None:
    config = ProxyConfig(tls_cert_file=files["cert"], tls_key_file=files["key"])
    asked = ProxyConfig(tls_cert_file=files["cert"], tls_key_file=files["key"], tls_client_ca_file=files["ca"])
    modes = [tls.context.verify_mode for each in (config, asked) if (tls := client_tls(each)) is not None]
    assert modes == [ssl.CERT_NONE, ssl.CERT_REQUIRED]


@pytest.mark.parametrize("ca", ["", "ca"])
def test_a_worker_must_always_show_who_it_is(files: dict[str, str], ca: str) -> None:
    context = worker_tls(ProxyConfig(worker_ca_file=files[ca])).context
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    authorities = {str(cert["subject"]) for cert in context.get_ca_certs() if ca}
    assert authorities == ({"((('commonName', 'authority'),),)"} if ca else set())


# -- renewal


class Shown:
    """A context with a certificate in files of its own, and the one that a client is shown."""

    def __init__(self, files: dict[str, str], folder: Path) -> None:
        self._files = files
        self._cert, self._key = folder / "own.pem", folder / "own.key"
        self.write("cert", "key")
        self.now_s = time.time()
        config = ProxyConfig(tls_cert_file=str(self._cert), tls_key_file=str(self._key))
        tls = client_tls(config, lambda: self.now_s)
        assert tls is not None
        self.tls = tls

    def write(self, cert: str = "", key: str = "") -> None:
        for name, file in ((cert, self._cert), (key, self._key)):
            if name:
                shutil.copyfile(self._files[name], file)

    def name(self) -> str:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.load_verify_locations(self._files["ca"])
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.tls.context.wrap_bio(to_server, to_client, server_side=True)
        asking = client.wrap_bio(to_client, to_server)
        for side in (asking, server, asking, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        shown = asking.getpeercert()
        assert shown is not None
        return str(shown["subject"][0][0][1])


@pytest.fixture
def shown(files: dict[str, str], tmp_path: Path) -> Shown:
    return Shown(files, tmp_path)


def looked(tls: Tls) -> bool | None:
    """What comes of changed files once they are at rest; a new certificate may be shorter than the old one."""
    return next((taken for _ in range(STILL_IF_SHORTER) if (taken := tls.look()) is not None), None)


@pytest.mark.parametrize("new", ["two", "rsa"])
def test_a_renewed_certificate_is_shown_once_both_files_are_there_and_at_rest(shown: Shown, new: str) -> None:
    assert (shown.tls.look(), shown.name()) == (None, "one")
    shown.write(f"{new} cert", f"{new} key")
    assert (shown.tls.look(), shown.name()) == (None, "one")
    assert (looked(shown.tls), shown.name()) == (True, new)
    assert (shown.tls.look(), shown.name()) == (None, new)
    shown.write("cert", "key")
    assert (shown.tls.look(), shown.name()) == (None, new)
    assert (looked(shown.tls), shown.name()) == (True, "one")


def test_a_certificate_without_its_key_changes_nothing_until_that_comes(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    shown.write("two cert")
    assert [shown.tls.look(), looked(shown.tls), shown.tls.look()] == [None, False, None]
    assert shown.name() == "one"
    assert "tls_key_file" in caplog.text
    shown.write(key="two key")
    assert [shown.tls.look(), looked(shown.tls)] == [None, True]
    assert shown.name() == "two"


def test_one_that_has_expired_never_replaces_another(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    shown.now_s += 2 * DAY_S
    shown.write("two cert", "two key")
    assert [shown.tls.look(), looked(shown.tls), shown.tls.look()] == [None, False, None]
    assert shown.name() == "one"
    (line,) = caplog.messages
    assert "tls_cert_file" in line and "expired" in line
    shown.now_s -= 2 * DAY_S
    shown.write("rsa cert", "rsa key")
    assert [shown.tls.look(), looked(shown.tls)] == [None, True]
    assert shown.name() == "rsa"


def test_one_that_has_expired_is_served_from_the_start_with_a_warning(
    files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for side in (client_tls, worker_tls):
        caplog.clear()
        own = ("tls" if side is client_tls else "worker") + "_cert_file"
        config = ProxyConfig(**{own: files["rsa cert"], own.replace("cert", "key"): files["rsa key"]})  # type: ignore[arg-type]
        assert side(config, lambda: time.time() + 2 * DAY_S) is not None
        (line,) = caplog.messages
        assert own in line and "expired" in line


def test_a_renewed_authority_counts(files: dict[str, str], tmp_path: Path) -> None:
    authorities = tmp_path / "ca.pem"
    shutil.copyfile(files["ca"], authorities)
    tls = worker_tls(ProxyConfig(worker_ca_file=str(authorities)))
    shutil.copyfile(Authority(tmp_path, "another").ca, authorities)
    assert [tls.look(), looked(tls)] == [None, True]
    assert [cert["subject"][0][0][1] for cert in tls.context.get_ca_certs()] == ["another"]


def test_a_longer_file_that_lacks_an_authority_is_waited_for_as_a_shorter_one(
    files: dict[str, str], tmp_path: Path
) -> None:
    """Its writer may have come to that border of two certificates, and write on."""
    authorities, another = tmp_path / "ca.pem", Authority(tmp_path, "another")
    one, other = (Path(file).read_text() for file in (files["ca"], another.ca))
    authorities.write_text(one + other)
    tls = worker_tls(ProxyConfig(worker_ca_file=str(authorities)))
    authorities.write_text("a long history " * 200 + "\n" + one)
    assert [tls.look() for _ in range(1 + STILL_IF_SHORTER)] == [None] * STILL_IF_SHORTER + [True]
    assert len(tls.context.get_ca_certs()) == 1
