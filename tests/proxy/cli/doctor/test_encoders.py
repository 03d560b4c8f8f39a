"""What `ppd doctor` says of encoders."""

from __future__ import annotations

import pytest

from ppd.proxy.cli.doctor.fleet import encoders_have_consumers, prefix_caching_is_on
from ppd.proxy.cli.doctor.values import Facts, Level, WorkerFact
from ppd.proxy.fleet.worker import Role, Worker


def worker(name: str, model: str, version: str, engine: str = "vllm", *, caches: bool = True) -> WorkerFact:
    models = (model,) if model else ()
    made = Worker(role=Role(name[0]), address=f"{name}:1", models=models, engine=engine, engine_version=version)
    return WorkerFact(name=name, worker=made, prefix_caching=caches)


@pytest.mark.parametrize(
    ("encoder", "others", "level", "words"),
    [
        (("m", "0.32.0"), [("R1", "m", "0.32.0")], Level.OK, "E1 encodes for R1"),
        (("m", "0.32.0"), [("P1", "m", "0.32.0"), ("D1", "m", "")], Level.OK, "P1, D1"),
        (("m", "0.32.0"), [("R1", "n", "0.32.0")], Level.FAIL, "E1 serves m, which no other"),
        (("m", "0.32.0"), [("R1", "", "0.32.0")], Level.OK, "R1"),
        (("", "0.32.0"), [("R1", "m", "0.32.0")], Level.OK, "R1"),
        (("m", "0.32.0"), [("R1", "m", "0.33.0")], Level.WARN, "others 0.33.0"),
        (("m", ""), [("R1", "m", "0.33.0")], Level.WARN, "an unknown version"),
        (
            ("m", "0.32.0"),
            [("P1", "m", "0.5", "sglang"), ("R1", "m", "1.4", "trtllm")],
            Level.WARN,
            "sglang and trtllm",
        ),
        (("m", "0.32.0"), [("D1", "m", "0.5", "sglang"), ("R1", "m", "0.32.0")], Level.OK, "E1 encodes for R1"),
        (("m", "0.32.0"), [("D1", "m", "0.5", "sglang"), ("R1", "n", "0.32.0")], Level.FAIL, "which no other"),
        (("m", "0.32.0"), [], Level.FAIL, "which no other"),
    ],
)
def test_an_encoder_has_the_model_and_the_version_of_others(
    encoder: tuple[str, str], others: list[tuple[str, ...]], level: Level, words: str
) -> None:
    workers = (worker("E1", *encoder), *(worker(*other) for other in others))
    (finding,) = encoders_have_consumers(Facts(workers=workers))
    assert finding.level is level and words in finding.message
    assert bool(finding.remedy) is (level is not Level.OK)


def test_nothing_is_said_without_encoders() -> None:
    assert list(encoders_have_consumers(Facts(workers=(worker("R1", "m", ""),)))) == []


def test_an_encoder_needs_no_prefix_cache() -> None:
    workers = (worker("E1", "m", "", caches=False), worker("R1", "m", ""))
    (finding,) = prefix_caching_is_on(Facts(workers=workers))
    assert (finding.level, finding.message) == (Level.OK, "on, say the metrics of R1")
