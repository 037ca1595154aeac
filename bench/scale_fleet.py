"""A pool of very many engines without any engine: real members of a real pool, told what looks would find, and kept
busy by the turns that are planned."""

from __future__ import annotations

import random
from array import array
from typing import Final

from connectors.wire.transfer import KVTransferParams
from router.capabilities import Capabilities
from router.discovery.source import Found
from router.load import Load, read_load
from router.member import Engine, Role
from router.plan import Facts, Plan
from router.pool import Pool

MODEL: Final = "m"
CARDS: Final = {MODEL: {"id": MODEL, "owned_by": "backhaul", "max_model_len": 131_072}}
TURNS_EACH: Final = 8
"""Under way at an engine, on average."""
NEWER: Final = 0.3
"""Of the engines: a rolling update is under way."""
POORLY: Final = (("suspect", 0.02), ("full", 0.02), ("ejected", 0.01), ("draining", 0.01))
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
NOBODY: Final = "http://10.9.9.9:8000"
"""An engine that has left."""


class Fleet:
    """`num_engines`, half of them for each role."""

    def __init__(self, num_engines: int, num_conversations: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = Pool(["prefill", "decode"])
        self.pool.draw = random.Random(seed)
        each = num_engines // 2
        for net, role in enumerate(ROLES, start=1):
            self.pool.update(role, "bench", [Found(f"http://10.{net}.{n // 250}.{n % 250}:8000") for n in range(each)])
        for engine in self.pool.engines:
            self._is_found(engine)
        self._under_way: list[Engine] = []
        self.poorly: dict[Role, list[str]] = {role: self._fall_ill(role) for role in ROLES}
        self.homes = {role: array("H", self.random.choices(range(each), k=num_conversations)) for role in ROLES}
        """Which engines each conversation's last turn was on, as its record in Redis would say."""

    def _is_found(self, engine: Engine) -> None:
        version = "0.2.0" if self.random.random() < NEWER else "0.1.0"
        engine.known.found(Capabilities(kind="backhaul", version=version, kv_layout="layout", num_blocks=4096))
        engine.known.saw_params(KVTransferParams(remote_engine_id=f"id of {engine.name}"))
        engine.heard(CARDS)
        engine.reported = self._reported()

    def _reported(self, ours: int = 0) -> Load:
        """What its metrics tell of its requests, those of other routers included."""
        running, full = ours + self.random.randrange(TURNS_EACH), self.random.random()
        return read_load(f"vllm:num_requests_running {running}\nvllm:kv_cache_usage_perc {full}\n".encode(), ours=ours)

    def _fall_ill(self, role: Role) -> list[str]:
        """Some of them, and which."""
        engines = list(self.pool.of(role))
        poorly: list[str] = []
        self.random.shuffle(engines)
        for state, share in POORLY:
            for engine in [engines.pop() for _ in range(round(share * len(self.pool.of(role))))]:
                poorly.append(engine.url)
                match state:
                    case "suspect":
                        engine.missed("TimeoutError", 0.0)
                    case "full":
                        engine.limit = 0
                    case "ejected":
                        engine.lost("connection refused")
                    case "draining":
                        self.pool.drain(engine.url, role, on=True)
        return poorly

    def serve(self, plan: Plan) -> None:
        """The turn is under way, and others have ended."""
        pool, under_way = self.pool, self._under_way
        for engine in (pool.get("prefill", plan.prefill or ""), pool.get("decode", plan.decode)):
            pool.dispatch(engine)
            under_way.append(engine)
        while len(under_way) > TURNS_EACH * len(pool.engines):
            at = self.random.randrange(len(under_way))
            under_way[at], under_way[-1] = under_way[-1], under_way[at]
            under_way.pop().in_flight -= 1

    def look(self) -> None:
        """One engine of all is looked at; now and then it does not answer, or does so again."""
        role = self.random.choice(ROLES)
        engine = self.random.choice(self.pool.of(role))
        if engine.url in self.poorly[role]:
            return
        if engine.state == "ready" and self.random.random() < 0.01:
            engine.missed("TimeoutError", 0.0)
        else:
            engine.heard(CARDS)
            engine.reported = self._reported(engine.in_flight)

    # What there is to plan.

    def new(self) -> Facts:
        return Facts(MODEL)

    def system_prompt(self) -> Facts:
        return Facts(MODEL, prefix=self.random.randbytes(16))

    def follow_up(self) -> Facts:
        number = self.random.randrange(len(self.homes["decode"]))
        prefill, decode = (self.pool.of(role)[self.homes[role][number]].url for role in ROLES)
        return self._after(prefill, decode)

    def homeless(self) -> Facts:
        """A follow-up whose engines are gone, out of rotation or have too much to do."""
        prefill, decode = (self.random.choice([NOBODY, *self.poorly[role]]) for role in ROLES)
        return self._after(prefill, decode)

    def _after(self, prefill: str, decode: str) -> Facts:
        engine_id = f"id of {decode}"
        return Facts(MODEL, None, prefill, decode, 400, "offered", engine_id, refuses=True)
