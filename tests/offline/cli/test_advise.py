"""`ppd advise` and `ppd goodput` as programs: what they print, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from ppd.offline.advice.advise import Plan, advise
from ppd.offline.advice.contenders import Contender, Setting
from ppd.offline.advice.traffic import traffic_of
from ppd.offline.advice.trying import AS_IT_IS, Conditions, Figures, Job, Trying, TryOutcome
from ppd.offline.cli.advise import command, document, told
from ppd.offline.cli.goodput import command as goodput
from ppd.offline.goodput.slo import Slo
from ppd.offline.simulation.modelled_hardware import profile_for
from ppd.offline.simulation.setup import pulled
from ppd.proxy.errors import ConfigError
from ppd.proxy.telemetry.receipts import Receipt
from tests.offline.replay.receipts import line_of, log_of, receipt
from tests.support.clock import FakeClock

AT = Figures(
    rate=1.0, first_share=0.99, later_share=0.5, ttft_first=(0.1, 0.2), ttft_later=None, tpot=(0.01, 0.02), turns=9
)


def turns() -> list[Receipt]:
    """12 sessions of two turns, the second beyond what the profile was fitted to."""
    later = {"estimated_new_tokens": 3000, "prompt_tokens": 4000, "estimated_prompt_tokens": 4000}
    return [
        receipt("D1", 10.0 * at + 5.0 * number, session=f"s{at}", turn=number, **(later if number == 2 else {}))
        for at in range(12)
        for number in (1, 2)
    ]


def write(folder: Path, receipts: Sequence[Receipt]) -> Path:
    file = folder / "receipts.jsonl"
    file.write_bytes(b"".join(map(line_of, receipts)))
    return file


def conditions() -> Conditions:
    return Conditions(
        traffic=traffic_of(log_of(*turns()).turns),
        profile=pulled(profile_for("h100-llama-3.1-8b")),
        slo=Slo(ttft_s=0.5),
    )


def advised(best: Contender, rate: float = 4.0) -> str:
    """Where this one serves twice as much as all others, and a cap of long prompts brings half as much again."""

    def ask(jobs: Sequence[Job]) -> list[TryOutcome]:
        rates = [
            (rate if job.contender == best else rate / 2) * (1.5 if job.setting.long_prefill_tokens else 1.0)
            for job in jobs
        ]
        return [
            TryOutcome(figures=AT) if job.at else TryOutcome(rate=one if one >= (job.bar or 0.0) else None, windows=1)
            for job, one in zip(jobs, rates, strict=True)
        ]

    known = conditions()
    plan = Plan(workers=2, modes=("slo", "replica"), rate=1.0, budget_s=60.0, processors=2)
    found = advise(log_of(*turns()), known, plan, ask, lambda text: None)
    assert msgspec.json.encode(document(found, known))
    return "\n".join(part.plain for part in told(found, known))


def test_it_says_that_it_begins_before_anything_is_played() -> None:
    """On hundreds of GPUs the first fleets take minutes, and only they show how long the rest takes."""
    known, said = conditions(), list[str]()

    def ask(jobs: Sequence[Job]) -> list[TryOutcome]:
        said.append("played")
        return [TryOutcome(figures=AT) if job.at else TryOutcome(rate=1.0, windows=1) for job in jobs]

    plan = Plan(workers=2, modes=("slo", "replica"), rate=1.0, budget_s=60.0, processors=2)
    advise(log_of(*turns()), known, plan, ask, said.append)
    assert said[:3] == [
        "2R slo, 1P_1D slo, 2R replica are tried first, to see how long it takes",
        "played",
        "3 fleets and modes; about 0 s on 2 processors",
    ]


def test_a_budget_in_which_no_fleet_is_found_is_refused() -> None:
    plan, said = Plan(workers=2, modes=("slo",), rate=1.0, budget_s=6.0, processors=2), list[str]()
    with pytest.raises(ConfigError, match=r"budget = 0.1: in that time no fleet was found that meets the targets"):
        advise(log_of(*turns()), conditions(), plan, lambda jobs: [TryOutcome(is_cut=True)] * len(jobs), said.append)


def test_it_says_what_the_budget_has_ended() -> None:
    def ask(jobs: Sequence[Job]) -> list[TryOutcome]:
        return [TryOutcome(figures=AT) if job.at else TryOutcome(rate=1.0, is_cut=True, windows=1) for job in jobs]

    known, clock = conditions(), iter(range(1000))
    plan = Plan(workers=2, modes=("slo", "replica"), rate=1.0, budget_s=1.0, processors=2)
    found = advise(log_of(*turns()), known, plan, ask, lambda text: None, lambda: next(clock))
    text = "\n".join(part.plain for part in told(found, known))
    assert "(in short windows only, for want of time: --budget)" in text
    assert "searches that --budget has ended, so that their rates may be higher: 3" in text
    assert document(found, known)["cut"] == 3


def test_all_replicas_are_one_of_the_answers() -> None:
    text = advised(Contender("2R", "replica"))
    assert "Recommended: do not disaggregate: 2R, mode replica. It serves up to 4 " in text
    assert "4 x the rate asked for" in text
    assert "Runner-up: 2R slo, -50.0% (-50% to -50%)" in text
    assert "prefills_answer" not in text


def test_a_fleet_of_pairs_is_shown_beside_the_best_of_replicas() -> None:
    text = advised(Contender("1P_1D", "slo"))
    assert "Recommended: mode slo on 1P_1D" in text
    assert "- long_prefill_tokens = 2048, engines started with --long-prefill-token-threshold 2048: 6 " in text
    assert "- prefills_answer = true: 4 (4 to 4) sessions a second, +0.0% (+0% to +0%)" in text
    assert "99.0%  50.0%" in text
    assert "100 / 200" in text


def test_it_says_what_the_profile_cannot_tell() -> None:
    text = advised(Contender("2R", "replica"))
    assert "50% of the turns: contexts beyond the 3,136 tokens up to which it was fitted" in text
    assert "50% of the turns: more new tokens than the 1,024" in text
    assert "the log does not say what GPU its engines ran on" in text
    assert "12 sessions are few" in text


def test_targets_that_nobody_meets_are_said_so() -> None:
    text = advised(Contender("2R", "replica"), rate=0.0)
    assert "No fleet and mode meets the targets at any rate" in text
    assert "another setting" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "windows"), [(-1.0, 0), (0.0, 1)])
def test_a_trial_that_is_late_plays_no_window_more(seconds: float, windows: int, clock: FakeClock) -> None:
    def now() -> float:
        clock.advance(1.0)
        return clock() - 1.0

    job = Job(contender=Contender("1R", "replica"), sessions=10, near=0.1, until_s=clock() + seconds)
    found = Trying(conditions(), now)(job)
    assert (found.windows, found.is_cut) == (windows, True)
    assert found.rate == (pytest.approx(0.1, rel=0.1) if windows else None)


@pytest.mark.slow
def test_a_contender_is_tried_by_playing_the_logs_sessions() -> None:
    trying = Trying(conditions())
    job = Job(contender=Contender("1R", "replica"), sessions=10, precision=0.9, near=10.0)
    found = trying(job)
    assert found.rate is not None
    assert 1.0 < found.rate < 100.0
    assert trying(Job(contender=job.contender, sessions=10, bar=100.0 * found.rate)).rate is None


@pytest.mark.parametrize(
    ("contender", "setting"),
    [
        (Contender("1R", "replica"), Setting(long_prefill_tokens=64)),
        (Contender("1P_1D", "least_ttft"), Setting(prefills_answer=True)),
    ],
)
def test_a_setting_is_tried_as_engines_and_proxy_would_have_it(contender: Contender, setting: Setting) -> None:
    trying = Trying(conditions())
    plain, other = (trying(Job(contender=contender, setting=one, sessions=10, at=9.0)) for one in (AS_IT_IS, setting))
    assert plain.figures is not None and other.figures is not None
    assert plain.figures.ttft_later != other.figures.ttft_later


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpus", "8", "--profile", "none"), "profile = 'none': must be"),
        (("--gpus", "8", "--share", "0"), "share = 0.0: must be above 0"),
        (("--gpus", "8", "--ttft", "nan"), "ttft = nan: must be a number from 0 to 3600"),
        (("--gpus", "8", "--tpot", "0"), "tpot = 0.0: must be a number above 0, at most 60"),
        (("--gpus", "8", "--ttft", "0", "--ttft-factor", "0"), "ttft, ttft_factor: one of them must be above 0"),
        (("--gpus", "8", "--rate", "nan"), "Invalid value for '--rate': nan is not a finite number"),
        (("--gpus", "8", "--budget", "nan"), "Invalid value for '--budget': nan is not a finite number"),
        (("--gpus", "8", "--longest-pause", "nan"), "Invalid value for '--longest-pause': nan is not a finite number"),
        (("--gpus", "8", "--model", "none"), "model = 'none': must be m"),
        (("--gpus", "1", "--profile", "h100-llama-3.1-70b-tp4"), "gpus = 1: one engine of this profile takes 4"),
        (("--gpus", "8", "--profile", "h100-qwen3-8b", "--mode", "table"), "table: must be given for mode table"),
        (
            ("--gpus", "1", "--mode", "always_split"),
            "mode = always_split: on one worker it must be one of ",
        ),
        (("--gpus", "8", "--mode", "oracle"), "Invalid value for '--mode'"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(command, [str(write(tmp_path, turns())), *flags])
    assert result.exit_code in (1, 2)
    assert said in result.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: a receipt is written when its turn ends"),
        (b"\n", "is empty"),
        (b"{}\n\0\n", "no line is the receipt of a turn"),
        (line_of(receipt("D1")), "the log has 1 sessions of model 'm'"),
    ],
)
def test_a_log_with_too_little_is_an_error_and_damage_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "receipts.jsonl"
    file.write_bytes(content)
    result = CliRunner().invoke(command, [str(file), "--gpus", "8"])
    assert result.exit_code == 1
    assert said in result.output
    assert ("line 2 is skipped" in result.stderr) is (content.startswith(b"{}"))


def search(file: Path, *flags: str) -> Result:
    small = ("--topology", "1R", "--mode", "replica", "--seeds", "2", "--sessions", "10", "--precision", "0.5")
    return CliRunner().invoke(goodput, [str(file), *small, *flags])


def test_goodput_of_a_receipt_log_and_of_a_trace(tmp_path: Path) -> None:
    text = search(write(tmp_path, turns())).output
    assert "1R, mode replica, profile h100-llama-3.1-8b" in text
    assert "goodput: " in text
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n' * 3)
    found = msgspec.json.decode(search(trace, "--json").stdout)
    assert [one["seed"] for one in found["by_seed"]] == [0, 1]
    assert all(one["rate"] == pytest.approx(found["goodput"]["value"], rel=0.6) for one in found["by_seed"])


def test_goodput_names_what_it_cannot_use(tmp_path: Path) -> None:
    file = write(tmp_path, turns())
    assert "topology = 'D'" in search(file, "--topology", "D").output
    assert "topology = '2000R': must be of at most 1024 workers" in search(file, "--topology", "2000R").output
    assert "in none of the known formats" in search(_holding(tmp_path, "{}\n")).output
    assert ", nor a receipt log" in search(_holding(tmp_path, "{}\n")).output
    assert search(_holding(tmp_path, "")).output.endswith(".jsonl: is empty\n")


def _holding(folder: Path, content: str) -> Path:
    file = folder / "holding.jsonl"
    file.write_text(content)
    return file
