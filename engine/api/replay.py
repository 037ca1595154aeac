"""An answer of /inference/v1/generate read back: the choices its ids make, as if they had been generated here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from connectors.wire.openai import bad_request
from engine.api.bodies.base import check_ids
from engine.api.bodies.derender import Generated, GeneratedChoice
from engine.api.context import Serving
from engine.api.generation import Choice, Json
from engine.logprobs import TokenLogprobs
from engine.output import OutputText
from engine.request import Request, SamplingParams

logger = logging.getLogger(__name__)


def check_generated(serving: Serving, generated: Generated, param: str) -> None:
    """Raises APIError 400 for ids the model cannot have generated."""
    for choice in generated.choices:
        ids = choice.token_ids or []
        if len(ids) > serving.max_model_len:
            raise bad_request(f"{param}: at most {serving.max_model_len} ids in a choice, got {len(ids)}", param=param)
        logprobs = (choice.logprobs and choice.logprobs.content) or []
        told = [t.token_id for item in logprobs for t in (item, *(item.top_logprobs or ()))]
        check_ids([*ids, *told], serving.vocab_size, param)


def replay(
    serving: Serving, index: int, generated: GeneratedChoice, prompt_token_ids: list[int], sampling: SamplingParams
) -> Choice:
    """The choice that these ids make. Work for a thread, if they are many. Raises APIError 400."""
    if len(prompt_token_ids) > serving.max_model_len:
        raise serving.too_long(str(len(prompt_token_ids)), "prompt_token_ids")
    check_ids(prompt_token_ids, serving.vocab_size, "prompt_token_ids")
    request = Request(
        request_id="",
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        eos_token_ids=serving.tokenizer.eos_token_ids,
        block_size=len(prompt_token_ids) + 1,
        hash_seed=b"",
    )
    output = OutputText(
        serving.tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens),
        stop=sampling.stop,
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )
    choice = Choice(index, request, output)
    ids = generated.token_ids or []
    by_token = generated.finish_reason == "stop" and not isinstance(generated.stop_reason, str)
    delta = output.push(ids, last=True, hide_last=by_token and not sampling.include_stop_str_in_output)
    content = (generated.logprobs and generated.logprobs.content) or []
    logprobs = [
        TokenLogprobs(
            item.token_id, item.logprob, item.rank or 0, tuple((t.token_id, t.logprob) for t in item.top_logprobs or ())
        )
        for item in content[: len(delta.token_ids)]
    ]
    choice.parts += delta.texts
    choice.token_ids += delta.token_ids
    choice.logprobs += logprobs
    choice.finish_reason = generated.finish_reason or "stop"
    choice.stop_reason = generated.stop_reason
    return choice


def usage_of(answers: Sequence[Generated], choices: Sequence[Choice], prompt_tokens: int | None) -> Json:
    """What the answers say, the rest from `prompt_tokens` for all of them, or else from the ids."""
    said = [answer.usage.prompt_tokens for answer in answers if answer.usage and answer.usage.prompt_tokens is not None]
    if len(said) == len(answers):
        prompt = sum(said)
    else:
        ids = sum(len(answer.prompt_token_ids or ()) for answer in answers)
        prompt = prompt_tokens if prompt_tokens is not None else ids or choices[0].request.num_prompt_tokens
    details = [answer.usage.prompt_tokens_details for answer in answers if answer.usage]
    output = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum((item.cached_tokens or 0) for item in details if item)},
    }


def passed_on(answers: Sequence[Generated]) -> Json:
    """The KV params of the answers, if they agree."""
    told: list[dict[str, Any] | None] = [answer.kv_transfer_params for answer in answers]
    if any(params != told[0] for params in told):
        logger.warning("generate answers with different kv_transfer_params: none are passed on")
        return {"kv_transfer_params": None}
    return {} if told[0] is None else {"kv_transfer_params": told[0]}
