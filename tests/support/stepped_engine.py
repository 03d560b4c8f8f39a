"""Engines without a clock or a socket: the profile of one, and a scheduler stepped by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ppd.proxy.laws.profile_file import ProfileFile, Status, Transfers
from ppd.proxy.laws.step_time import EngineProfile
from ppd.servers.sim.core.block_pool import BlockPool, Namespace
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.counters import Counters
from ppd.servers.sim.core.embeddings import EmbeddingStore
from ppd.servers.sim.core.handoffs import HandoffLedger, Transfer
from ppd.servers.sim.core.scheduler import Output, Scheduler, Step
from ppd.servers.sim.core.sequence import Finish, Sampling, Sequence

PROFILE = EngineProfile(first_sequence_s=1e-4, mean_context_token_s=1e-7)


def profile_of(**changes: Any) -> ProfileFile:
    """An H100 as the timing law has it by default, with changes."""
    usual: dict[str, Any] = {
        "name": "test",
        "status": Status.MODELLED,
        "model": "m",
        "gpu": "H100",
        "gpu_count": 1,
        "engine": "vllm 0.13",
        "source": "a test",
        "note": "",
        "licence": "Apache-2.0",
        "costs": EngineProfile(),
        "kv_capacity_tokens": 400_000,
        "transfers": Transfers.MISSING,
        "network": "NVLink",
    }
    return ProfileFile(**(usual | changes))


class Engine:
    """A scheduler with its collaborators, stepped by hand."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        size: int = 4,
        budget: int = 1000,
        cap: int = 0,
        seqs: int = 16,
        encoder_item_s: float = 0.0,
    ) -> None:
        """budget: tokens of a step; cap: of these, for one prompt beside other requests."""
        self.counters = Counters()
        self.pool = BlockPool(blocks, size)
        self.handoffs = HandoffLedger(self.pool, self.counters, lease_s=30, now=lambda: 0.0)
        profile = replace(PROFILE, max_batched_tokens=budget, long_prefill_tokens=cap)
        config = SimConfig(profile=profile, max_num_seqs=seqs, encoder_item_s=encoder_item_s)
        self.scheduler = Scheduler(config, self.pool, self.handoffs, self.counters, EmbeddingStore(64))
        self.texts: dict[str, str] = {}
        self.finishes: dict[str, Finish] = {}

    def add(self, name: str, prompt: str, **settings: Any) -> Sequence:
        sampling = Sampling(**{"max_tokens": 4, "ignore_eos": True} | settings)
        return self.add_sequence(name, prompt, sampling, Transfer())

    def add_sequence(self, name: str, prompt: str, sampling: Sampling, transfer: Transfer) -> Sequence:
        sequence = Sequence(
            id=name,
            prompt=tuple(map(ord, prompt)),
            sampling=sampling,
            namespace=Namespace("m"),
            transfer=transfer,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.plan()
        self.take(self.scheduler.complete(step))
        return step

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            name = output.sequence.id
            self.texts[name] = self.texts.get(name, "") + output.text
            if output.finish is not None:
                self.finishes[name] = output.finish

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.step().chunks:
                return
        raise AssertionError("the engine does not come to an end")


def shape(step: Step) -> list[tuple[str, int]]:
    return [(chunk.sequence.id, chunk.tokens) for chunk in step.chunks]


def alone(prompt: str, **settings: Any) -> str:
    engine = Engine(blocks=1000)
    engine.add("only", prompt, **settings)
    engine.run()
    return engine.texts["only"]
