"""A whole engine on a tiny model, stepped by hand: scheduler, runner, and what they hand out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from connectors.base import NullConnector
from engine.blocks import BlockPool
from engine.grammar import GrammarSpec
from engine.grammars import Grammars
from engine.messages import Output
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from tests.running import BLOCK_SIZE, Machine, make_machine
from tests.tiny import VOCAB_SIZE


class TinyEngine:
    def __init__(self, folder: Path, *, num_blocks: int = 256) -> None:
        self.machine: Machine = make_machine(folder, num_blocks=num_blocks)
        self.tokenizer: Tokenizer = self.machine.loaded.tokenizer
        self.grammars = Grammars(self.tokenizer, VOCAB_SIZE)
        self._ids = itertools.count()
        self.restart()

    def restart(self, *, num_blocks: int | None = None, budget: int = 512, max_num_seqs: int = 8) -> None:
        """Begin with an empty cache, of other sizes perhaps."""
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=1024,
            pool=BlockPool(num_blocks or self.machine.cache.num_blocks),
            connector=NullConnector(),
        )
        self.outputs: dict[str, Output] = {}
        """All outputs of a request as one."""

    def submit(self, prompt: Sequence[int], grammar: GrammarSpec | None = None, **sampling: object) -> Request:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | sampling)  # type: ignore[arg-type]
        request = Request(
            f"r{next(self._ids)}",
            list(prompt),
            replace(params, grammar=grammar),
            self.tokenizer.eos_token_ids,
            BLOCK_SIZE,
            b"seed",
            matcher=None if grammar is None else self.grammars.compile(grammar)[0],
        )
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.scheduler.finish_step(batch, self.machine.runner.run(batch))
        for output in self.scheduler.take_outputs():
            earlier = self.outputs.get(output.request_id)
            self.outputs[output.request_id] = output if earlier is None else output.after(earlier)
        return batch is not None

    def run(self) -> None:
        """Step until every request has ended."""
        while self.step():
            pass
        assert not self.scheduler.requests

    def output(self, request: Request) -> Output:
        return self.outputs[request.request_id]

    def text(self, request: Request) -> str:
        """What the client would see of it."""
        output = self.output(request)
        ids = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        return self.tokenizer.decode(ids, skip_special_tokens=False)
