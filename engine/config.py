"""The engine's settings. Flags, environment names and YAML keys are all derived from these fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class KVConnectorExtraConfig(_Settings):
    """Connector settings, under the names vLLM gives them in `kv_connector_extra_config`."""

    bidirectional_kv_xfer: bool = True
    """Decode engines offer a finished turn's blocks to the next turn's prefill, and prefill engines fetch them."""
    kv_recompute_threshold: Annotated[int, Field(ge=0)] = 64
    """Tokens from which a prefill engine fetches them from a decode engine; fewer are computed again. 0: always."""
    decoder_kv_blocks_ttl: Seconds = 480.0
    """Seconds a decode engine offers a finished turn's blocks, unless an active request needs the room before."""
    kv_lease_duration: Seconds = 30.0
    """Seconds a prefill engine holds blocks for a decode engine that sends no heartbeat."""
    transfer_timeout: Seconds = 20.0
    """Seconds from claiming blocks to having read them; a peer that hangs costs this long."""
    handshake_timeout: Seconds = 5.0
    """Seconds for one HTTP exchange with a peer."""


class KVTransferConfig(_Settings):
    """`--kv-transfer-config`, as JSON or field by field."""

    kv_connector: Literal["NixlConnector"] | None = None
    """Default: NixlConnector for the roles prefill and decode, none for both."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    """Taken for the command lines of vLLM users; --role decides."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """A pull that failed: compute the tokens here, or fail that one request."""
    kv_connector_extra_config: KVConnectorExtraConfig = KVConnectorExtraConfig()


class ECConnectorExtraConfig(_Settings):
    """Settings of the encoder-cache connector."""

    ec_lease_duration: Seconds = 30.0
    """Seconds an encoder keeps what it has announced, unless it needs the room before and nobody is reading."""
    ec_wait_timeout: Seconds = 60.0
    """Seconds a request waits for encodings from other engines, all tries together; then it is encoded here."""
    transfer_timeout: Seconds = 20.0
    """Seconds from claiming an encoding to having read it."""
    handshake_timeout: Seconds = 5.0
    """Seconds for one HTTP exchange with a peer."""


class ECTransferConfig(_Settings):
    """`--ec-transfer-config`, as JSON or field by field."""

    ec_connector: Literal["NixlECConnector", "ECCPUConnector"] | None = None
    """What moves encodings: NIXL, whichever of the names is given (the second is vLLM's). Default: NIXL for the roles
    encode, prefill and decode, if the model takes pictures; none for both."""
    ec_role: Literal["ec_producer", "ec_consumer", "ec_both"] | None = None
    """ec_producer: announce the encodings of every request's pictures; ec_consumer: fetch those that are announced;
    ec_both: either. Default: ec_producer for the role encode, else ec_consumer. What the engine does beside that is
    said by --role alone."""
    ec_ip: str | None = None
    """Host under which peers reach what is announced. Default: VLLM_EC_SIDE_CHANNEL_HOST or
    VLLM_NIXL_SIDE_CHANNEL_HOST from the environment, else as for KV."""
    ec_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """A port of its own for that, on which this engine listens too. Default: VLLM_EC_SIDE_CHANNEL_PORT or
    VLLM_NIXL_SIDE_CHANNEL_PORT from the environment, else the port of the API."""
    ec_connector_extra_config: ECConnectorExtraConfig = ECConnectorExtraConfig()


class MediaLimits(_Settings):
    """`--limit-mm-per-prompt`, as JSON or field by field."""

    image: Annotated[int, Field(ge=0)] = 16
    """Pictures that one request may bring; 0: none, whatever the model sees."""


class EngineConfig(_Settings):
    model: str
    """A GGUF file or a Hugging Face folder (config.json, safetensors, tokenizer.json)."""
    role: Literal["prefill", "decode", "both", "encode"] = "both"
    """Prefill engines hold KV for decode engines; decode engines pull it; both does everything alone, or either. Encode
    engines load no more of a model than sees pictures, and answer with where the encodings are."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8100
    """Port to listen on; 0 takes a free one."""
    advertise_host: str | None = None
    """Host peers reach this engine under; default: --host, or this machine's address if that is a wildcard."""
    require_routable_host: bool = False
    """Refuse to start if that is an address of this machine only: for engines whose peers are on others."""
    served_model_name: str | None = None
    """Model name in the API; default: the name the model file carries, else the file's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. auto: bfloat16 on a GPU that has it and on a CPU with AMX, else float32."""
    quantization: Literal["int8"] | None = None
    """int8: on a CPU, weights in 8 bits, or the file's if those are fewer, and products in whole numbers: about
    1.5 times as fast to decode. Default: as exact as `dtype` is."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Positive | None = None
    """Longest prompt plus output, in tokens; default: the model's own limit."""
    block_size: Positive = 16
    """Tokens per KV block."""
    max_num_seqs: Positive = 32
    """Requests running at once."""
    max_num_batched_tokens: Positive = 512
    """Token budget of one step: long prompts are prefilled in chunks of this size, between decode tokens."""
    max_num_queued_reqs: Positive = 1024
    """Requests waiting at most; more are answered 503 with Retry-After."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is served first: fcfs, whoever came first; priority, whoever has the lower `priority` in its request."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    """Alternatives per token that a request may ask the log probabilities of."""
    max_body_bytes: Positive = 64 << 20
    """Largest request body, after decompression."""
    limit_mm_per_prompt: MediaLimits = MediaLimits()
    max_media_bytes: Positive = 20 << 20
    """Largest picture, as a file."""
    max_image_pixels: Positive = 1 << 25
    """Largest picture, width times height: to decode one takes up to 28 bytes for each."""
    mm_processor_cache_gb: Annotated[float, Field(ge=0)] = 0.25
    """Memory for pictures that are prepared: the next turn of a conversation brings the same again. 0: none."""
    allowed_media_hosts: tuple[str, ...] = ()
    """Hosts from which pictures are fetched, as they stand in URLs; host:port for a port that is not the scheme's own;
    * for any. Default: none, pictures come in data URLs."""
    allowed_media_domains: tuple[str, ...] = ()
    """The same under the name vLLM has for it; both count."""
    allowed_media_networks: tuple[str, ...] = ()
    """Networks such as 10.0.0.0/8, not public, in which these hosts may be. Default: only public addresses, so that
    no request reads what only this machine can reach."""
    media_fetch_timeout: Seconds = 5.0
    """Seconds to fetch one picture."""
    enable_mm_embeds: bool = False
    """Take encodings from clients in place of pictures (`image_embeds` parts with a tensor). Whoever can send them can
    make the model see anything."""
    encoder_cache_bytes: Positive | None = None
    """Memory for encoded pictures, of a model that takes them; default: room for 2 sequences of max_model_len that are
    nothing but pictures, at most a sixteenth of free memory."""
    kv_cache_memory_bytes: Positive | None = None
    """Size of the KV arena; default: room for 2 sequences of max_model_len, at most a quarter of free memory."""
    num_gpu_blocks_override: Positive | None = None
    """Number of KV blocks, instead of kv_cache_memory_bytes (the name is vLLM's; it counts on CPU too)."""
    enable_prefix_caching: bool = True
    threads: Positive | None = None
    """Compute threads; default: the cores this process may use."""
    chat_template: Path | None = None
    """Jinja file to use instead of the model's chat template."""
    chat_format: Literal["auto", "template", "harmony"] = "auto"
    """How the model is talked to: template, as its chat template says; harmony, as GPT-OSS models are; auto: harmony
    if the vocabulary has its special tokens and no setting here asks for a template."""
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json"] = "auto"
    """How the model writes tool calls; auto: as its chat template does."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """How it writes its thoughts: think, between <think> and </think>; auto: so if its chat template knows them."""
    kv_transfer_config: KVTransferConfig = KVTransferConfig()
    ec_transfer_config: ECTransferConfig = ECTransferConfig()
    seal_key: SecretStr | None = None
    """Secret of router and engines, at least 16 characters: transfer params count only if sealed with it. Give it
    in the environment or a file, where other users cannot see it."""
    seal_key_file: Path | None = None
    """File with that secret, in place of seal_key; with several, one per line: the first seals, each opens."""
    enable_scale_out: bool = True
    """Serve tokens for tokens, render, derender and abort: what a deployment that keeps templates away from the engines
    needs. Off: these routes answer 403."""
    drain_timeout: Seconds = 60.0
    """Seconds after SIGTERM in which running requests may end, and blocks held for other engines be read, before the
    process ends; on a prefill engine, longer than kv_lease_duration. Whoever sends SIGKILL should wait longer still."""
    json_file: Path | None = None
    """Write {"url", "role", "pid", "model"} here once requests can be served."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @property
    def kv_transfer_enabled(self) -> bool:
        if self.role == "encode":
            return False
        return self.role != "both" or self.kv_transfer_config.kv_connector is not None

    @property
    def ec_transfer_enabled(self) -> bool:
        """If the model takes pictures."""
        config = self.ec_transfer_config
        return self.role != "both" or config.ec_connector is not None or config.ec_role is not None

    @property
    def announces_encodings(self) -> bool:
        return self.role == "encode" or self.ec_transfer_config.ec_role in ("ec_producer", "ec_both")

    @property
    def fetches_encodings(self) -> bool:
        return self.role != "encode" and self.ec_transfer_config.ec_role in (None, "ec_consumer", "ec_both")
