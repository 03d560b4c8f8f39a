"""What churn says of its rounds: what came in place of answers, what grows, and what the proxy tells."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.overhead.churn import ChurnSample, shown, telling, verdict

SAMPLE = ChurnSample(at_s=90.0, rss_kib=80 * 1024, open_files=28, requests=1234, faults={})
METRICS = """# TYPE ppd_refused_total counter
ppd_refused_total{reason="queue_full"} 0.0
ppd_refused_total{reason="poisoned_prompt"} 1407.0
ppd_leg_failures_total{cause="reset",leg="decode",phase="request_sent"} 14.0
ppd_leg_seconds_count{leg="prefill"} 900.0
ppd_turns_total{reason="first_turn",route="SPLIT"} 900.0
ppd_inflight_legs{role="D"} 0.0
ppd_inflight_turns 2.0
ppd_body_memory_bytes 5e+06
ppd_connections 1.0
"""


def test_faults_are_shown_by_row_and_by_what_came_in_place_of_an_answer() -> None:
    assert shown(SAMPLE) == "    1.5 min      80.0 MiB     28 files       1,234 requests  0 faults"
    failed = replace(
        SAMPLE, faults={("whole answers", "502"): 14, ("whole answers", "503"): 1407, ("long prompts", "broken off"): 1}
    )
    said = "1,422 faults (whole answers: 502 x 14; whole answers: 503 x 1,407; long prompts: broken off x 1)"
    assert shown(failed).endswith(said)


def test_of_its_metrics_what_failed_and_what_it_still_holds_is_told() -> None:
    assert telling(METRICS, "") == [
        'ppd_refused_total{reason="poisoned_prompt"} 1407.0',
        'ppd_leg_failures_total{cause="reset",leg="decode",phase="request_sent"} 14.0',
        "ppd_inflight_turns 2.0",
        "ppd_body_memory_bytes 5e+06",
    ]


def test_of_its_log_the_first_lines_are_told_and_how_many_there_are() -> None:
    assert telling("", "one\n") == ["log: one"]
    assert telling("", "\n".join(map(str, range(2000)))) == [
        *(f"log: {line}" for line in range(5)),
        "log: 2,000 lines in all",
    ]


def test_the_verdict_is_on_memory_and_on_open_files_with_what_was_told_at_last() -> None:
    samples = [
        replace(SAMPLE, at_s=60.0 * at, rss_kib=80_000 + 10 * at, open_files=60 + at % 2, told=[f"round {at}"])
        for at in range(120)
    ]
    memory, files, told = verdict(samples).splitlines()
    assert memory.startswith("RSS grows by +10.0 KiB a minute")
    assert files.startswith("open files grow by +0.00 a minute")
    assert told == "round 119"
    assert verdict(samples[:3]).splitlines() == ["too few samples for a slope: let it run for longer", "round 2"]
