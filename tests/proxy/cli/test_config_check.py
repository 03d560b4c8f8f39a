"""`ppd serve --check`: all that is wrong, and nothing else is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ppd.proxy.cli.serve import command


def checked(folder: Path, text: str, *flags: str) -> Result:
    file = folder / "ppd.toml"
    file.write_text(text)
    return CliRunner().invoke(command, ["--check", "--config", str(file), *flags])


def test_a_good_config_is_described_and_its_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("key = []")
    log = tmp_path / "receipts.jsonl"
    result = checked(tmp_path, f'keys_file = "{tmp_path}/keys.toml"\nreceipt_log = "{log}"', "--port", "0")
    assert result.exit_code == 0
    assert "mode table" in result.output
    assert not log.exists()


def test_what_has_no_effect_is_told_beside_the_description(tmp_path: Path) -> None:
    result = checked(tmp_path, "picker_shadow = true")
    assert result.exit_code == 0
    assert "warning: picker_shadow = True has no effect" in result.stderr
    assert "mode table" in result.stdout


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    result = checked(
        tmp_path,
        f"""
        prot = 1
        x = 2
        table = "none"
        profile = "none"
        mode = "replica"
        workers = ["X=a:1", "D=b"]
        weights_by_model = ["m:w=1"]
        slo_by_priority = ["fast"]
        order_by_model = ["m:first"]
        keys_file = "{tmp_path}/none.toml"
        tls_cert_file = "{tmp_path}/text"
        tls_key_file = "{tmp_path}/text"
        worker_ca_file = "{tmp_path}/none.pem"
        curve_port = 1
        curve_server_key_file = "{tmp_path}/none"
        curve_clients_dir = "{tmp_path}"
        receipt_log = "{tmp_path}"
        """,
        *("--port", "nine"),
    )
    assert result.exit_code == 1
    told = [line.strip().removeprefix("Error: ") for line in result.output.splitlines()]
    assert told[0] == "15 settings cannot be used:"
    assert [line.split(" = ")[0].split(":")[0].removeprefix(f"{tmp_path}/") for line in told[1:]] == [
        *("prot", "x", "port", "workers", "workers", "weights_by_model", "slo_by_priority", "order_by_model"),
        *("table", "profile", "none.toml"),
        *("tls_cert_file", "worker_ca_file", "curve_server_key_file", "receipt_log"),
    ]


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_key_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    result = checked(tmp_path, f'keys_file = "{tmp_path}/keys.toml"')
    assert result.exit_code == 1
    assert "write `key = []`" in result.output
