"""Making keys, and looking at a key file."""

from __future__ import annotations

import os
import re
import resource
import stat
import tomllib
from pathlib import Path

import pytest
import zmq.auth
from click.testing import CliRunner, Result

from ppd.proxy.admission.key_file import load
from ppd.proxy.admission.keys import Client, decode
from ppd.proxy.cli.keys import append, command
from ppd.proxy.laws.targets import GivenTargets


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def key_of(result: Result) -> str:
    """The key is all of standard output."""
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"ppd_[A-Za-z0-9_-]{43}\n", result.stdout)
    return result.stdout.strip()


def refusal(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (1, "")
    return result.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_new_key_opens_what_its_flags_say(file: Path) -> None:
    flags = "--tenant acme --priority -2 --weight 2.5 --rpm 60 --tpm 9000 --model llama --model qwen".split()
    key = key_of(run("new", "--name", "acme-1", *flags, "--slo", "tpot=0.1", "--file", file))
    assert load(file).find(key) == Client(
        name="acme-1",
        tenant="acme",
        priority=-2,
        weight=2.5,
        requests_per_minute=60,
        tokens_per_minute=9000,
        models=("llama", "qwen"),
        slo=GivenTargets(tpot=0.1),
    )


def test_a_name_is_enough(file: Path) -> None:
    key = key_of(run("new", "--name", "acme", "--file", file))
    assert load(file).find(key) == Client(name="acme", tenant="acme")
    assert set(tomllib.loads(file.read_text())["key"][0]) == {"name", "hash"}


def test_the_key_is_shown_once_and_is_in_no_file(file: Path) -> None:
    result = run("new", "--name", "acme", "--file", file)
    key = key_of(result)
    assert result.output.count(key) == 1
    assert [path.name for path in file.parent.iterdir()] == ["keys.toml"]
    assert key.removeprefix("ppd_") not in file.read_text()


def test_without_a_file_the_entry_is_shown_beside_the_key() -> None:
    result = run("new", "--name", "acme", "--rpm", "6")
    key = key_of(result)
    assert key not in result.stderr
    entry = result.stderr[result.stderr.index("[[key]]") :]
    found = decode(entry.encode(), "entry").find(key)
    assert found == Client(name="acme", tenant="acme", requests_per_minute=6)


@pytest.mark.parametrize("end", ["", "\n"])
def test_what_stands_in_the_file_stays(file: Path, end: str) -> None:
    first = key_of(run("new", "--name", "first", "--file", file))
    before = "# the operator's own words\n" + file.read_text() + "# the last of them" + end
    file.write_text(before)
    second = key_of(run("new", "--name", "second", "--file", file))
    assert file.read_text().startswith(before.rstrip("\n") + "\n\n[[key]]")
    found = [load(file).find(key) for key in (first, second)]
    assert [client and client.name for client in found] == ["first", "second"]


def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_rights(file: Path) -> None:
    before = os.umask(0)
    try:
        key_of(run("new", "--name", "first", "--file", file))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o644)
        key_of(run("new", "--name", "second", "--file", file))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_link_stays_one(file: Path) -> None:
    link = file.with_name("link.toml")
    link.symlink_to(file)
    key = key_of(run("new", "--name", "acme", "--file", link))
    assert link.is_symlink()
    assert load(file).find(key) is not None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--name", "first"], "key 'first': name: must be unique"),
        (["--name", "a b"], "key 2: name: must be 1 to 64 letters"),
        (["--name", "ppd_" + "k" * 43], "holds a key in plain text"),
        (["--name", "a", "--rpm", "-1"], "key 'a': requests_per_minute = -1: must be"),
        (["--name", "a", "--weight", "nan"], "key 'a': weight = nan: must be"),
        (["--name", "a", "--tenant", "first", "--weight", "2"], "key 'a': weight = 2: must be 1 as key 'first' says"),
        (["--name", "a", "--model", ""], "key 'a': models: must be"),
        (["--name", "a", "--model", os.fsdecode(b"\xff")], "must be TOML in UTF-8"),
    ],
)
def test_an_entry_that_could_not_be_used_is_not_made(file: Path, flags: list[str], expected: str) -> None:
    key_of(run("new", "--name", "first", "--file", file))
    before = file.read_bytes()
    assert expected in refusal(run("new", *flags, "--file", file))
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["keys.toml"]


def test_without_a_file_an_entry_is_checked_as_well() -> None:
    assert "new key: key 'a': priority = 5000: must be" in refusal(run("new", "--name", "a", "--priority", "5000"))
    assert "new key: key 'a': slo: must be" in refusal(run("new", "--name", "a", "--slo", "fast"))


def test_a_broken_file_is_left_as_it_is(file: Path) -> None:
    file.write_text("[[key]]\n")
    assert f"{file}: key 1: hash: must be" in refusal(run("new", "--name", "a", "--file", file))
    assert file.read_text() == "[[key]]\n"


def test_a_file_that_says_that_it_holds_no_key_takes_one(file: Path) -> None:
    file.write_text("# ours\nkey = []\n")
    key_of(run("new", "--name", "one", "--file", file))
    assert [entry.client.name for entry in load(file).entries] == ["one"]
    assert file.read_text().startswith("# ours\n")


def test_only_one_adds_a_key_at_a_time(file: Path) -> None:
    part = file.with_name("keys.toml.part")
    part.write_bytes(b"another's")
    assert "another key is being added; if that run was ended, delete this file" in refusal(
        run("new", "--name", "a", "--file", file)
    )
    assert part.read_bytes() == b"another's"
    assert not file.exists()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    said = refusal(run("new", "--name", "a", "--file", tmp_path / "none" / "keys.toml"))
    assert said.endswith("keys.toml: cannot be written: No such file or directory\n")


def test_a_file_that_can_not_be_read_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").mkdir()
    with pytest.raises(Exception, match="cannot be written"):
        append(tmp_path / "keys.toml", b'[[key]]\nname = "a"\n')
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_a_loop_of_links_is_said(file: Path) -> None:
    file.symlink_to(file)
    assert refusal(run("new", "--name", "a", "--file", file)).startswith(f"Error: {file}: cannot be written")


@pytest.mark.skipif(not Path("/dev/zero").is_char_device(), reason="there is no endless file here")
def test_what_is_no_file_is_never_read(file: Path) -> None:
    file.symlink_to("/dev/zero")
    assert refusal(run("new", "--name", "a", "--file", file)).endswith("keys.toml: cannot be written: no file\n")


def test_list_shows_whose_keys_there_are_and_no_hash(file: Path) -> None:
    key_of(
        run(
            "new", "--name", "acme-1", "--tenant", "acme", "--rpm", "60", "--model", "a", "--model", "b", "--file", file
        )
    )
    key_of(run("new", "--name", "solo", "--tpm", "9000", "--priority", "-1", "--weight", "0.5", "--file", file))
    result = run("list", file)
    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines()] == [
        ["name", "tenant", "priority", "weight", "requests/min", "tokens/min", "models"],
        ["acme-1", "acme", "0", "1", "60", "-", "a,", "b"],
        ["solo", "solo", "-1", "0.5", "-", "9000", "all"],
    ]


def test_list_names_a_file_that_can_not_be_used(file: Path) -> None:
    assert refusal(run("list", file)).endswith("keys.toml: must be a readable key file (No such file or directory)\n")


def test_certificates_come_as_a_pair_whose_secret_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "keys" / "agents"
    made = run("curve", "a1", "--dir", folder)
    assert made.exit_code == 0, made.output
    public, secret = zmq.auth.load_certificate(folder / "a1.key_secret")
    assert secret is not None and zmq.auth.load_certificate(folder / "a1.key") == (public, None)
    assert stat.S_IMODE((folder / "a1.key_secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert secret.decode() not in made.output


def test_a_certificate_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    assert run("curve", "proxy", "--dir", tmp_path).exit_code == 0
    before = (tmp_path / "proxy.key_secret").read_bytes()
    assert "is there already" in refusal(run("curve", "proxy", "--dir", tmp_path))
    assert (tmp_path / "proxy.key_secret").read_bytes() == before


@pytest.mark.parametrize("name", ["../proxy", "a/b", "", ".hidden", "x" * 65])
def test_a_certificates_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    assert "NAME: must be" in refusal(run("curve", name, "--dir", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_half_a_pair_of_certificates_does_not_stay(tmp_path: Path) -> None:
    """As a full disk leaves it; the next run would take it for a certificate that is there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        said = refusal(run("curve", "a1", "--dir", tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written: File too large" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refusal(run("curve", "a1", "--dir", tmp_path / "file" / "keys"))
    assert said == f"Error: {tmp_path}/file/keys: cannot be written: Not a directory\n"
