"""The router's settings. Flags, environment names and YAML keys are all derived from these fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from router.discovery.kube import SERVICE_ACCOUNT
from router.discovery.parse import check
from router.member import Role
from router.redis_address import RedisAddress, password_file, redis_url
from router.statement import EngineStatement, without_user
from router.tracing import collector_url

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def _distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    names = [without_user(url) for url in urls]  # by which engines are told from each other
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{sorted(twice)[0]} is given twice")
    return urls


Entries = Annotated[tuple[Annotated[str, AfterValidator(check)], ...], AfterValidator(_distinct)]


class RouterConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve the port together, each on a core of its own. Limits such as prefill_limit hold for each."""
    admin_host: str = "127.0.0.1"
    """Address to listen on for operators."""
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port to listen on for operators: status, metrics, draining of engines. Not for clients. Default: none."""
    admin_names: tuple[Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,253}$")], ...] = ()
    """Names by which browsers reach that port, such as an ingress's host: it answers them under no other name that has
    a dot. Addresses, and names without one, need not be said."""
    prefill: Entries = ()
    """URL of a prefill engine, or of what names some: dns://NAME:PORT, srv://NAME, pods://NAMESPACE?labels=…&port=…,
    endpointslices://NAMESPACE/SERVICE?port=…. With none, decode engines prefill for themselves."""
    decode: Annotated[Entries, Field(min_length=1)]
    """The same of decode engines."""
    encode: Entries = ()
    """The same of encode engines, which turn pictures, sound and film into encodings for the engine that prefills. With
    none, and for what they fail at, that engine encodes for itself."""
    engines: Mapping[Annotated[str, AfterValidator(check)], EngineStatement] = Field(default_factory=dict)
    """What is stated of engines, by URL or by that of what names them, in place of having it found out: kind,
    block_size, bidirectional,
    streams_carry_params, tokenize, api_key_file."""
    service_account: Path = SERVICE_ACCOUNT
    """Folder of token, ca.crt and namespace for the Kubernetes API, whose address is that of KUBERNETES_SERVICE_HOST
    and _PORT in the environment."""
    redis: Annotated[str, AfterValidator(redis_url)] = "redis://127.0.0.1:6379/0"
    """Redis or Valkey with the conversation records: redis://, rediss://, unix://, redis+sentinel:// or
    redis+cluster://. A cache: without it turns are answered, but not remembered."""
    redis_password_file: Annotated[Path, AfterValidator(password_file)] | None = None
    """File whose first line is the password for Redis, in place of one in its address; read for each connection."""
    redis_timeout: Seconds = 0.05
    """Seconds one exchange with Redis may take; beyond, the turn goes on without the record."""
    conversation_ttl: Seconds = 450.0
    """Seconds a conversation's record lives, or less if its decode engine says that it keeps the blocks for less; for
    engines that do not say, keep it below their decoder_kv_blocks_ttl (480 s)."""
    max_record_bytes: Positive = 4 << 20
    """Largest record of one conversation (about a million tokens); beyond, only its engines are remembered."""
    tenant_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] = "Authorization"
    """Requests that differ in this header never share a conversation."""
    seal_key: SecretStr | None = None
    """Secret of router and engines, at least 16 characters: transfer params count only if sealed with it. Give it
    in the environment or a file, where other users cannot see it."""
    seal_key_file: Path | None = None
    """File with that secret, in place of seal_key; with several, one per line: the first seals, each opens."""
    client_transfer_params: Literal["drop", "refuse"] = "drop"
    """What clients write that only router and engines may say to each other: leave it out, or answer 400."""
    expose_transfer_params: bool = False
    """For debugging: leave in the answers what engines tell the router only. It names their memory and addresses."""
    status: bool = True
    """Answer GET /admin/status, which names engines and what they can do."""
    explain: bool = True
    """Answer X-Backhaul-Explain: 1. The headers name engines, and tell whether a prompt was in a cache."""
    trace_endpoint: Annotated[str, AfterValidator(collector_url)] | None = None
    """Where traces of turns go: the URL of an OpenTelemetry collector for OTLP over HTTP, such as
    http://collector:4318/v1/traces. Wants the extra `tracing`. Default: turns are not traced."""
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the turns whose client does not say whether they are traced (traceparent), how many are."""
    kv_recompute_threshold: Annotated[int, Field(ge=0)] = 64
    """Tokens: blocks of the last turn that hold fewer are not offered to the prefill engine; as for the engines."""
    kv_block_size: Positive | None = None
    """Tokens per KV block of engines that do not say (vLLM's --block-size): lets an offer be cut where a prompt differs
    from the last turn; without it, such an engine's blocks are used whole or not at all."""
    decode_only_tokens: Annotated[int, Field(ge=0)] | None = None
    """A prompt with at most so many new tokens is left to the decode engine that has the rest; 0: never; default: as
    many as it computes in the time a prefill leg takes apart from computing, as measured."""
    tokenize_timeout: Seconds = 2.0
    """Seconds an engine has to tell the ids of a prompt, so that they can be compared with those of the last turn."""
    idle_kv_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of a decode engine's KV blocks, how much conversations may hold that are not being served; beyond, the oldest
    are given back. 1: as much as there is. Default: 0.5 for vLLM, which keeps them whoever needs the room; 1 for ours,
    which do not."""
    prefill_fallback: Literal["fail", "decode"] = "fail"
    """When no prefill engine can be had: answer 503, or let the decode engine prefill for itself."""
    encode_batch: Annotated[int, Field(ge=0)] = 0
    """Most pictures in one request to an encode engine; 0: any number. Sound and film always go one by one."""
    encode_timeout: Seconds = 30.0
    """Seconds for one request to an encode engine."""
    encode_required: bool = False
    """When no encode engine can be had: answer 503, instead of having the engine that prefills encode."""
    media_rewrite: bool = False
    """Give the other engines, in place of pictures, what encode engines say of their size, so that none is fetched and
    decoded again. Where that is not known of all, or an engine refuses it, they get the pictures."""
    affinity_slack: Annotated[int, Field(ge=0)] = 4
    """A conversation stays on its engines, and a system prompt goes to those that have seen it, unless they have this
    many more requests to work on than another."""
    prefill_limit: Positive | None = None
    """Requests of this router that a prefill engine gets at a time; more wait here, the lowest `priority` first.
    Default: any number."""
    decode_limit: Positive | None = None
    """The same of decode engines; a turn that waits for one has not been prefilled yet."""
    max_waiting: Annotated[int, Field(ge=0)] = 1000
    """Turns that may wait for room in a pool; beyond, 503."""
    queue_timeout: Seconds = 30.0
    """Seconds a turn may wait for room; then 503."""
    retry_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Of all turns, how many may be tried again for faults of engines; one a second always may."""
    connect_timeout: Seconds = 2.0
    """Seconds to connect to an engine."""
    prefill_timeout: Seconds = 120.0
    """Seconds for the whole prefill leg, queueing included."""
    pull_timeout: Seconds = 30.0
    """Seconds for a prefill leg that was offered the last turn's KV; then it is sent again without. An engine that
    cannot have the blocks may wait for them much longer than it takes to compute them."""
    first_byte_timeout: Seconds = 120.0
    """Seconds until a streamed answer begins, from sending the decode leg."""
    idle_timeout: Seconds = 60.0
    """Seconds between two pieces of a streamed answer."""
    turn_timeout: Seconds = 3600.0
    """Seconds for the whole turn."""
    outage_wait: Annotated[float, Field(ge=0)] = 5.0
    """Seconds for which a turn that no engine of a pool could serve waits for one to come back, from when the last one
    was lost; then 503. 0: it does not wait."""
    dispatch_deadline: Annotated[float, Field(gt=0, lt=30)] = 25.0
    """Seconds from the prefill answer to sending the decode leg; later the blocks' lease (30 s) may have ended."""
    probe_interval: Seconds = 2.0
    """Seconds between two looks at an engine's /v1/models; an engine that is down is looked at more often at first."""
    probe_timeout: Seconds = 2.0
    """Seconds an engine has to list its models."""
    max_body_bytes: Positive = 64 << 20
    """Largest request body, after decompression."""
    drain_delay: Annotated[float, Field(ge=0)] = 5.0
    """Seconds after SIGTERM in which /ready says 503 but requests are still taken, for load balancers to notice."""
    drain_timeout: Seconds = 60.0
    """Seconds running turns get to end after that."""
    json_file: Path | None = None
    """Write {"url", "pid"} here once the router listens."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @model_validator(mode="after")
    def _redis_has_one_password(self) -> Self:
        try:
            RedisAddress.parse(self.redis, self.redis_password_file)
        except ValueError as error:
            raise ValueError(f"redis: {error}") from None
        return self

    @model_validator(mode="after")
    def _engines_are_ours(self) -> Self:
        sources = (*self.prefill, *self.decode, *self.encode)
        strange = [url for url in self.engines if url not in sources]
        if strange and all(one.startswith("http") for one in sources):  # others name engines only later
            raise ValueError(f"engines: {strange[0]} is given neither as prefill nor as decode nor as encode")
        return self

    def entries(self, role: Role) -> tuple[str, ...]:
        return {"prefill": self.prefill, "decode": self.decode, "encode": self.encode}[role]

    @property
    def limits(self) -> Mapping[Role, int | None]:
        return {"prefill": self.prefill_limit, "decode": self.decode_limit, "encode": None}
