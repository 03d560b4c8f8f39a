"""What the doctor says of a D that keeps nothing for the next turn."""

from __future__ import annotations

import pytest

from ppd.proxy.cli.doctor.fleet import decodes_keep_prefixes
from ppd.proxy.cli.doctor.values import Facts, Level, WorkerFact
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
