"""A certificate for a proxy."""

from __future__ import annotations

import pytest

from tests.support.credentials import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls_files(authority: Authority) -> dict[str, str]:
    own = authority.issue("proxy")
    return {"tls_cert_file": own.cert, "tls_key_file": own.key}
