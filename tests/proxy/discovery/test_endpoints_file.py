"""llm-d's `endpoints.yaml`: which workers it names, and what is told of what cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd.proxy.config.yaml_document import parse_yaml
from ppd.proxy.discovery.endpoints_file import EndpointsOfFile, endpoints_in
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role, Source, Worker
from ppd.proxy.runtime.watched_files import STILL_IF_SHORTER


def found(text: str) -> tuple[Worker, ...]:
    return endpoints_in(parse_yaml("epp_config", "endpoints.yaml", text))


def test_an_endpoint_is_a_static_worker_with_its_labels() -> None:
    workers = found(
        """endpoints:
- {name: a, namespace: b, address: 10.0.0.5, port: "8100", labels: {llm-d.ai/role: prefill, zone: x}}
- {name: b, address: "fd00::6", port: 8200}
"""
    )
    assert [(one.role, one.address, one.connector) for one in workers] == [
        (Role.PREFILL, "10.0.0.5:8100", "nixl"),
        (Role.DECODE, "[fd00::6]:8200", "nixl"),
    ]
    assert workers[0].labels == {"llm-d.ai/role": "prefill", "zone": "x"}
    assert {one.source for one in workers} == {Source.STATIC}


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ("{}", Role.DECODE),
        ("{zone: a}", Role.DECODE),
        ("{role: prefill}", Role.PREFILL),
        ("{role: prefill, llm-d.ai/role: decode}", Role.DECODE),
        ("{llm-d.ai/role: encode-prefill}", Role.PREFILL),
        ("{llm-d.ai/role: encode-decode}", Role.DECODE),
        ("{llm-d.ai/role: prefill-decode}", Role.REPLICA),
        ("{llm-d.ai/role: encode-prefill-decode}", Role.REPLICA),
        ("{llm-d.ai/role: both}", Role.REPLICA),
    ],
)
def test_a_label_says_the_role(labels: str, role: Role) -> None:
    (worker,) = found(f"endpoints: [{{name: a, address: 10.0.0.5, port: 1, labels: {labels}}}]")
    assert (worker.role, worker.connector) == (role, "nixl")


ONE = "endpoints:\n- {name: a, address: 10.0.0.5, port: 80}\n"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("endpoints: {}\n", 1, "endpoints = a map: must be a list"),
        ('endpoints:\n- !!int ""\n', 2, "must be text, a number, true, false or null"),
        ("endpoints:\n- !!timestamp x\n", 2, "must be text, a number, true, false or null"),
        ("endpoints:\n- {!!bool maybe: a}\n", 2, "names must be text"),
        ("endpoint: []\n", 1, "endpoint: no such field; known are endpoints"),
        ("endpoints:\n- {name: a, port: 80}\n", 2, "must have address"),
        ("endpoints:\n- {name: a, address: host, port: 80}\n", 2, "address = 'host': must be an IP address"),
        ("endpoints:\n- {name: a, address: 10.0.0.5, port: 0}\n", 2, "port = 0: must be a whole number from 1 to"),
        ("endpoints:\n- {name: a, address: 10.0.0.5, port: '65536'}\n", 2, "must be a whole number from 1 to 65535"),
        ("endpoints:\n- {name: a, address: 10.0.0.5, port: true}\n", 2, "must be a whole number"),
        (ONE + "- {name: b, address: 10.0.0.5, port: '80'}\n", 3, "10.0.0.5:80 is in line 2 too"),
        (ONE + "- {name: a, address: 10.0.0.6, port: 80}\n", 3, "default/a is in line 2 too"),
        ("endpoints:\n- {name: a, address: 10.0.0.5, port: 80, labels: {role: encode}}\n", 2, "prefill or decode"),
        ("endpoints:\n- {name: a, address: 10.0.0.5, port: 80, labels: {'a b': c}}\n", 2, "labels: must be [PREFIX/]"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_line(text: str, line: int, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        found(text)
    assert told in refused.value.message
    assert f"endpoints.yaml:{line}: " in refused.value.message


def test_a_file_that_cannot_be_used_or_is_emptied_changes_nothing(tmp_path: Path) -> None:
    (file := tmp_path / "endpoints.yaml").write_text(ONE)
    known = EndpointsOfFile(str(file), is_watched=True)
    before = known.workers
    for text in (ONE + "\0\0", "endpoints: [", "endpoints: []", "{}"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            known.reread(may_be_empty=False)
        assert known.workers == before
    assert not known.reread(may_be_empty=True), "it has not been still for long enough"
    while not (known.are_new() and known.reread(may_be_empty=True)):
        assert known.workers == before
    assert known.workers == ()
    with pytest.raises(ConfigError, match="must be a readable file"):
        EndpointsOfFile(str(tmp_path / "none.yaml"), is_watched=False)


def test_a_file_that_lacks_workers_is_waited_for_though_it_is_longer(tmp_path: Path) -> None:
    """Its writer may have come to that border of two entries, and write on."""
    (file := tmp_path / "endpoints.yaml").write_text(ONE + "- {name: b, address: 10.0.0.6, port: 80}\n")
    known = EndpointsOfFile(str(file), is_watched=True)
    file.write_text("# " + "a long history " * 10 + "\n" + ONE)
    looks = [known.are_new() and known.reread(may_be_empty=False) for _ in range(2 + STILL_IF_SHORTER)]
    assert looks == [*[False] * STILL_IF_SHORTER, True, False]
    assert [worker.address for worker in known.workers] == ["10.0.0.5:80"]
