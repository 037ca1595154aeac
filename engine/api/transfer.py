"""Transfer params on their one way from a body, of whatever endpoint, to the scheduler: through `extra_args`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from connectors.wire.openai import APIError, bad_request
from connectors.wire.seal import SEAL_HEADER, SealError
from connectors.wire.transfer import ECTransferParams, KVTransferParams, WireError
from engine.api.context import Serving

KV, EC = "kv_transfer_params", "ec_transfer_params"
_IDS = "prompt_token_ids"


@dataclass(frozen=True, slots=True)
class Transfer:
    extra_args: Mapping[str, object]
    """For SamplingParams: the params, parsed, beside what else the request brought there."""
    prompt_token_ids: list[int] | None
    """Ids that the router knows for this prompt, in the vocabulary."""


def trusted_params(http: web.Request, body: Mapping[str, Any], serving: Serving) -> Mapping[str, Any]:
    """The raw params of a body whose sender may send any, the extra arguments it has beside them included.

    Params stand at the top; in the extra arguments (`vllm_xargs`, or `extra_args` of `sampling_params`) they count
    only where the top has none, and only on an engine without a seal key, which trusts whoever reaches it.
    Raises APIError: 403 for params that are not sealed.
    """
    _, given = _extra_args(body)
    extra = given if isinstance(given, dict) else {}
    top = {name: body[name] for name in (KV, EC) if body.get(name) is not None}
    inner = {name for name in (KV, EC) if extra.get(name) is not None}
    if serving.seals is not None and (top or inner):
        try:
            if inner:
                raise SealError("they stand where no router puts them")
            serving.seals.check(http.headers.get(SEAL_HEADER), http.path, top)
        except SealError as error:
            raise forbidden(min(top or inner), str(error)) from None
    return extra | top


def check_extra_args(body: Mapping[str, Any]) -> None:
    """Raises APIError 400 for extra arguments that `trusted_params` has passed over: they are no object."""
    where, extra = _extra_args(body)
    if extra is not None and not isinstance(extra, dict):
        raise bad_request(f"{where}: an object expected", param=where)


def read_transfer(raw: Mapping[str, Any], serving: Serving, *, may_offer: bool) -> Transfer:
    """Parse and check trusted params. Raises APIError 400."""
    extra_args: dict[str, object] = dict(raw)
    ids = None
    try:
        if raw.get(EC) is not None:
            extra_args[EC] = ECTransferParams.parse(raw[EC])
        if raw.get(KV) is not None:
            extra_args[KV], ids = _kv_params(raw[KV], serving, may_offer)
    except WireError as error:
        raise bad_request(str(error), param=error.param) from None
    return Transfer({name: value for name, value in extra_args.items() if value is not None}, ids)


def _kv_params(raw: object, serving: Serving, may_offer: bool) -> tuple[KVTransferParams, list[int] | None]:
    params = KVTransferParams.parse(_without_ids(raw))
    alone = not (params.do_remote_prefill or params.do_remote_decode)
    if alone and not (params.offer_blocks and may_offer):
        return KVTransferParams(), None  # nobody's hand-off: ids would only be a way around the chat template
    ids = _prompt_ids(raw.get(_IDS) if isinstance(raw, dict) else None, serving.vocab_size)
    if alone:
        known = KVTransferParams.for_decode_alone(max_prefill_tokens=params.max_prefill_tokens)
        return known if params.remote_blocks_ttl is None else known.kept_for(params.remote_blocks_ttl), ids
    if serving.kv is None:
        raise WireError(KV, "this engine runs without a KV connector; start it with --role")
    serving.kv.connector.check(params)
    return params, ids


def _extra_args(body: Mapping[str, Any]) -> tuple[str, object]:
    """The field for them, and what stands there."""
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        return "extra_args", sampling.get("extra_args")
    return "vllm_xargs", body.get("vllm_xargs")


def without_prompt_ids(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Trusted params less the ids of the prompt, whatever stands in their place."""
    return {**raw, KV: _without_ids(raw.get(KV))}


def _without_ids(raw: object) -> object:
    return {key: value for key, value in raw.items() if key != _IDS} if isinstance(raw, dict) else raw


def _prompt_ids(value: object, vocab_size: int) -> list[int] | None:
    if value is None:
        return None
    where = f"{KV}.{_IDS}"
    if not isinstance(value, list) or set(map(type, value)) != {int} or min(value) < 0:
        raise WireError(where, "a list of token ids expected, with at least one")
    if max(value) >= vocab_size:
        raise WireError(where, f"token id {max(value)} is out of vocabulary, ids end at {vocab_size - 1}")
    return value


def forbidden(param: str, why: str) -> APIError:
    return APIError(
        403, f"{param}: only the router may send these, and {why}", type="PermissionDeniedError", param=param
    )
