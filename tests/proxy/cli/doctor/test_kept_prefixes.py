"""What the doctor says of a D that keeps nothing for the next turn, or takes no turn without a P."""

from __future__ import annotations

import msgspec
import pytest

from ppd.proxy.cli.doctor.fleet import decodes_compute_prompts, decodes_keep_prefixes
from ppd.proxy.cli.doctor.gather import Said, _listed
from ppd.proxy.cli.doctor.values import Facts, Level, WorkerFact
from ppd.proxy.connectors import answers_alone
from ppd.proxy.fleet.worker import Role, Worker


@pytest.mark.parametrize(
    ("engine", "keeps", "found"),
    [
        ("sglang", False, (Level.WARN, "D1 has no radix cache")),
        ("sglang", True, None),
        ("sglang", None, None),
        ("trtllm", None, (Level.SKIP, "D1 does not tell whether it reuses blocks")),
        ("trtllm", True, None),
        ("trtllm", False, (Level.WARN, "D1 reuses no blocks")),
        ("vllm", None, None),
    ],
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_d_that_keeps_nothing_for_the_next_turn_is_told_with_what_to_do(
    role: Role, engine: str, keeps: bool | None, found: tuple[Level, str] | None
) -> None:
    told = {} if keeps is None else {"prefix_cache": str(keeps).lower()}
    fact = WorkerFact(name="D1", worker=Worker(role=role, address="d:1", engine=engine, coordinates=told))
    findings = list(decodes_keep_prefixes(Facts(workers=(fact,))))
    if found is None or role is Role.PREFILL:
        assert findings == []
    else:
        (finding,) = findings
        assert finding.level is found[0]
        assert found[1] in finding.message and finding.remedy.endswith(".")


@pytest.mark.parametrize(
    ("connector", "takes_plain", "is_told"),
    [("p2p_nccl", None, True), ("p2p_nccl", "false", True), ("p2p_nccl", "true", False), ("nixl", None, False)],
)
def test_a_d_that_waits_for_kv_of_each_request_is_told_with_what_to_do(
    connector: str, takes_plain: str | None, is_told: bool
) -> None:
    told = {} if takes_plain is None else {"takes_plain": takes_plain}
    workers = [
        WorkerFact(name=f"{role}1", worker=Worker(role=role, address="a:1", connector=connector, coordinates=told))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    findings = list(decodes_compute_prompts(Facts(workers=tuple(workers))))
    assert len(findings) == is_told
    for finding in findings:
        assert finding.level is Level.WARN
        assert "D1 gets no LOCAL turns" in finding.message and "takes_plain=true" in finding.remedy


@pytest.mark.parametrize("says", [True, False, None])
def test_a_proxy_tells_which_d_takes_plain_requests(says: bool | None) -> None:
    entry: dict[str, object] = dict.fromkeys(("id", "name", "state", "engine", "engine_version"), "")
    entry |= {"role": "D", "models": [], "connector": "p2p_nccl"} | ({} if says is None else {"takes_plain": says})
    listed = _listed(Said(200, msgspec.json.encode({"workers": [entry]})))
    assert listed is not None
    assert answers_alone(listed[0].worker) is bool(says)
