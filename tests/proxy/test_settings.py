"""Changing settings while the proxy runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from ppd.proxy.config import Lookup, Mode, ProxyConfig, build
from ppd.proxy.errors import ConfigError, PPDError
from ppd.proxy.runtime.watched_files import STILL_IF_SHORTER, watch
from ppd.proxy.settings import ConfigSource, Settings, check_table
from tests.support.decisions import BY_ROLES, D1, LLM_D_HEAD


def settings(tmp_path: Path, text: str, **flags: object) -> tuple[Settings, Path]:
    file = tmp_path / "ppd.toml"
    file.write_text(text)
    source = ConfigSource(file, flags)
    return Settings(source.read().checked(), source), file


def test_new_weights_in_the_file_make_new_rules(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 1\n")
    file.write_text("w_tpot = 6\n")
    assert held.reload()
    scored = held.rules().scored
    assert scored is not None
    assert scored.weights.tpot == 6.0


def test_what_changes_is_logged_as_a_config_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held, file = settings(tmp_path, "")
    file.write_text('mode = "always_local"\nw_tpot = 6\n')
    with caplog.at_level("INFO"):
        assert held.reload()
    assert "changed: mode = 'always_local', w_tpot = 6.0" in caplog.text


def test_another_lookup_is_taken_while_the_proxy_runs(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "")
    before = held.rules().scored
    assert before is not None
    assert before.rule is Lookup.NEAREST
    file.write_text('lookup = "interpolated"\n')
    assert held.reload()
    after = held.rules().scored
    assert after is not None
    assert after.rule is Lookup.INTERPOLATED


@pytest.mark.parametrize(
    "text",
    [
        "w_tpot = -1\n",
        "w_tpot = ",
        'table = "none"\n',
        'profile = "none"\n',
        f'profile = "{"n" * 300}"\n',
        'workers = ["D=a:1,profile=none"]\n',
        "nonsense = 1\n",
    ],
)
def test_a_bad_file_changes_nothing(tmp_path: Path, text: str) -> None:
    held, file = settings(tmp_path, "w_tpot = 2\n")
    before = held.rules()
    file.write_text(text)
    assert not held.reload()
    assert held.rules() is before
    assert held.config.w_tpot == 2.0


def test_another_profile_is_taken_while_the_proxy_runs(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "")
    laws = held.rules().laws
    assert laws is not None
    assert laws.of(D1) is None
    file.write_text('profile = "h100-llama-3.1-8b"\n')
    assert held.reload()
    assert held.rules().laws is laws
    assert laws.of(D1) is not None


@pytest.mark.parametrize(("key", "text"), [("profile", 'profile = "none"'), ("workers", 'workers=["D=a:1,profile=n"]')])
def test_a_profile_that_is_not_there_is_refused_at_the_start(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match="profile = 'n") as caught:
        settings(tmp_path, text)
    assert caught.value.param == key


@pytest.mark.parametrize("mode", ["slo", "weights", "least_ttft", "lmetric", "slack"])
@pytest.mark.parametrize("workers", ["[]", '["D=a:1,profile=h100-llama-3.1-8b", "D=b:1"]'])
def test_a_mode_that_predicts_needs_a_profile(tmp_path: Path, mode: str, workers: str) -> None:
    with pytest.raises(ConfigError, match=f"mode = '{mode}' predicts") as caught:
        settings(tmp_path, f'mode = "{mode}"\nworkers = {workers}')
    assert caught.value.param == "profile"


@pytest.mark.parametrize("text", ['profile = "h100-llama-3.1-8b"', 'workers = ["D=a:1,profile=h100-llama-3.1-8b"]'])
def test_that_profile_may_be_the_configs_or_each_workers_own(tmp_path: Path, text: str) -> None:
    held, _ = settings(tmp_path, f'mode = "slo"\n{text}')
    assert held.rules().mode is Mode.SLO


def test_a_deleted_file_changes_nothing(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 2\n")
    file.unlink()
    assert not held.reload()
    assert held.config.w_tpot == 2.0


def test_a_refused_change_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    held, _ = settings(tmp_path, "")
    with pytest.raises(ConfigError, match="w_ttft"):
        held.change(w_ttft=-1.0)
    with pytest.raises(PPDError):
        held.change(table="none")
    assert (held.config.w_ttft, held.config.table) == (1.0, build(None, {}).table)


def test_only_mode_table_needs_a_table(tmp_path: Path) -> None:
    held, _ = settings(tmp_path, 'mode = "always_split"\ntable = "none"\n')
    assert held.rules().scored is None
    with pytest.raises(PPDError, match="none"):
        held.change(mode=Mode.TABLE)
    assert held.config.mode is Mode.ALWAYS_SPLIT


WORKERS = 'workers = ["P=a:1", "D=b:1"]\nw_tpot = 2\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n# nothing\n",
        "w_tpot = 3\n",  # its workers are gone
        "workers = []\n",
        "w_tpot = 3\nworkers = [",
    ],
)
def test_half_a_file_changes_nothing(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    held, file = settings(tmp_path, WORKERS)
    before = held.config
    file.write_text(text)
    assert [held.look() for _ in range(7)] == [*[None] * STILL_IF_SHORTER, False, None]
    assert held.config is before
    assert len(held.static_workers) == 2
    assert len([record for record in caplog.records if "is not used" in record.message]) == 1
    file.write_text(WORKERS.replace("2", "5"))
    assert [held.look(), held.look()] == [None, True]
    assert held.config.w_tpot == 5.0


@pytest.mark.parametrize("text", ["allow_empty = true\n", "allow_empty = true\nworkers = []\n"])
def test_a_file_may_say_that_its_workers_are_gone_for_good(tmp_path: Path, text: str) -> None:
    held, file = settings(tmp_path, WORKERS)
    file.write_text(text)
    assert held.reload()
    assert held.static_workers == ()


def test_with_allow_empty_even_an_empty_file_counts(tmp_path: Path) -> None:
    held, file = settings(tmp_path, WORKERS, allow_empty=True)
    file.write_text("")
    assert held.reload()
    assert (held.static_workers, held.config.w_tpot) == ((), 1.0)


def test_workers_of_a_flag_are_no_files_to_lose(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 2\n", workers=("R=a:1",))
    file.write_text("w_tpot = 3\n")
    assert held.reload()
    assert len(held.static_workers) == 1


def test_a_file_is_read_when_it_is_still(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 1\n")
    for value in (20, 300, 4000):  # sizes differ, as the clock of files has coarse ticks
        file.write_text(f"w_tpot = {value}\n")
        assert held.look() is None
    assert held.look() is True
    assert held.config.w_tpot == 4000.0


def test_a_change_between_the_first_read_and_the_first_look_is_not_missed(tmp_path: Path) -> None:
    file = tmp_path / "ppd.toml"
    file.write_text("w_tpot = 1\n")
    source = ConfigSource(file, {})
    config = source.read().checked()
    file.write_text("w_tpot = 20\n")
    held = Settings(config, source)
    assert [held.look(), held.look()] == [None, True]


@pytest.mark.parametrize("mode", ["table", "always_split"])
def test_a_table_that_cannot_be_loaded_is_refused_in_every_mode(tmp_path: Path, mode: str) -> None:
    held, file = settings(tmp_path, f'mode = "{mode}"\n')
    file.write_text(f'mode = "{mode}"\ntable = "none"\n')
    assert not held.reload()
    with pytest.raises(PPDError, match="none"):
        check_table("none")


def test_a_successor_takes_over_what_is_in_force_and_what_the_file_said(tmp_path: Path) -> None:
    """Its own first read is of a file that the others have refused."""
    (file := tmp_path / "ppd.toml").write_text(WORKERS)
    one, other = (Settings(build(file, {}), ConfigSource(file, {})) for _ in range(2))
    file.write_text(WORKERS.replace("2", "3"))
    assert one.reload()
    one.change(w_ttft=7.0)
    file.write_text("")
    assert not one.reload()
    other.adopt(*one.live())
    assert (other.config, other.static_workers) == (one.config, one.static_workers)
    assert [other.look() for _ in range(6)] == [*[None] * STILL_IF_SHORTER, False]
    file.write_text(WORKERS + "w_ttft = 1\n")
    assert [held.reload() for held in (one, other)] == [True, True]
    assert other.config == one.config
    assert (one.config.w_ttft, one.config.w_tpot) == (7.0, 2.0), "the file said 1.0 before, too"


async def test_a_watched_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 1\n")
    said: asyncio.Queue[bool] = asyncio.Queue()
    watching = asyncio.create_task(watch(held.look, said.put_nowait, every_s=0.005))
    await asyncio.sleep(0)
    for text, taken, w_tpot in (
        ("w_tpot = 6.5\n", True, 6.5),
        ("w_tpot = -1\n", False, 6.5),
        ("w_tpot = 22\n", True, 22.0),
    ):
        file.write_text(text)
        assert await asyncio.wait_for(said.get(), 60) is taken
        assert held.config.w_tpot == w_tpot
    watching.cancel()


PROFILES = LLM_D_HEAD + BY_ROLES
OWN_RULE = PROFILES.replace("prefix-based-pd-decider", "ppd-decider")


def test_a_file_of_plugins_that_says_the_same_keeps_what_they_remember(tmp_path: Path) -> None:
    plugins = tmp_path / "epp.yaml"
    plugins.write_text(PROFILES)
    held, file = settings(tmp_path, text := f'mode = "profiles"\nepp_config = "{plugins}"\n')
    schedule = held.rules().schedule
    assert schedule is not None
    file.write_text(f"{text}w_ttft = 2\n")
    assert held.reload()
    assert held.rules().schedule is schedule
    plugins.write_text(PROFILES.replace("100", "200"))
    file.write_text(f"{text}w_ttft = 3\n")
    assert held.reload()
    assert held.rules().schedule not in (None, schedule)
    held.change(mode=Mode.ALWAYS_LOCAL)
    assert held.rules().schedule is None
    plugins.write_text("kind: [")
    file.write_text(f"{text}w_ttft = 4\n")
    assert not held.reload()


@pytest.mark.parametrize(
    ("plugins", "named"),
    [
        (None, "epp_config: mode = 'profiles' goes by llm-d's plugins"),
        ("kind: [", "must be YAML"),
        (OWN_RULE.replace("nonCachedTokens: 100", "mode: slo"), "profile: mode"),
    ],
)
def test_the_mode_of_profiles_needs_their_file_and_what_it_asks_for(
    tmp_path: Path, plugins: str | None, named: str
) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(plugins or "")
    with pytest.raises(ConfigError, match=re.escape(named)):
        Settings(ProxyConfig(mode=Mode.PROFILES, epp_config=str(file) if plugins else ""))


def test_a_decider_of_our_own_has_the_table(tmp_path: Path) -> None:
    (file := tmp_path / "epp.yaml").write_text(OWN_RULE.replace("nonCachedTokens: 100", "mode: table"))
    assert Settings(ProxyConfig(mode=Mode.PROFILES, epp_config=str(file))).rules().scored is not None
