"""`ppd doctor` against a fleet of real engines finds a handoff that works."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from ppd.proxy.config import Mode
from tests.support.proxy import ADMIN_KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_doctor_sees_a_real_handoff(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_LOCAL)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ppd.servers", "doctor", "--proxy", fleet.base_url, "--admin-key", ADMIN_KEY, "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    report = json.loads(out)
    findings = report["findings"] if isinstance(report, dict) else report
    assert process.returncode == 0, findings
    levels = {finding["check"]: finding["level"] for finding in findings}
    assert levels["handoff"] == "OK", findings
    assert "FAIL" not in levels.values()
