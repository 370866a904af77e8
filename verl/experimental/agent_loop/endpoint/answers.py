"""Answers of the OpenAI API as JSON: the model's answer or an error, with token ids under vLLM's names."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl.experimental.agent_loop.endpoint.history import Answer
from verl.experimental.agent_loop.endpoint.requests import Options, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Body = dict[str, Any]


def error_body(error: RequestError) -> Body:
    """Return the body of an error."""
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code},
    }


def chat_body(answer: Answer, options: Options, model: str, tokenizer: "PreTrainedTokenizerBase") -> Body:
    """Return the body of a chat completion; it holds ``prompt_token_ids`` and ``token_ids`` if asked for."""
    message: Body = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if not answer.calls:
        message["content"] = answer.text
    else:
        message["tool_calls"] = [
            {
                "id": answer.call_id(number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(answer.calls)
        ]
    choice: Body = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    if options.wants_log_probs:
        choice["logprobs"] = {"content": [*_chat_log_probs(answer, tokenizer)]}
    body = _head(answer, "chatcmpl", "chat.completion", model) | {"choices": [choice], "usage": usage(answer)}
    if options.wants_token_ids:
        choice["token_ids"] = answer.output.token_ids
        body["prompt_token_ids"] = answer.prompt_ids
    return body


def completion_body(answer: Answer, options: Options, model: str, tokenizer: "PreTrainedTokenizerBase") -> Body:
    """Return the body of a completion; its choice holds ``prompt_token_ids`` and ``token_ids`` if asked for."""
    choice: Body = {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}
    if options.wants_log_probs:
        tokens = [_text(tokenizer, token) for token in answer.output.token_ids]
        ends = [0]
        for token in tokens:
            ends.append(ends[-1] + len(token))
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": answer.output.log_probs,
            "top_logprobs": None,
            "text_offset": ends[:-1],
        }
    if options.wants_token_ids:
        choice |= {"token_ids": answer.output.token_ids, "prompt_token_ids": answer.prompt_ids}
    return _head(answer, "cmpl", "text_completion", model) | {"choices": [choice], "usage": usage(answer)}


def usage(answer: Answer) -> Body:
    """Return the numbers of tokens."""
    prompt = len(answer.prompt_ids)
    sampled = len(answer.output.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.output.num_cached_tokens},
    }


def chunks(body: Body, options: Options) -> Iterator[bytes]:
    """Yield an answer as server-sent events: one with the whole answer, one with the usage if requested, and the end.

    The tokens of a trajectory are whole before they are sent.
    """
    whole = {key: value for key, value in body.items() if key != "usage"}
    choice = dict(body["choices"][0])
    message = choice.pop("message", None)
    if message is not None:
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", []))]
        choice["delta"] = message | ({"tool_calls": calls} if calls else {})
        whole["object"] = "chat.completion.chunk"
    events = [whole | {"choices": [choice]}]
    if options.stream_usage:
        events.append(whole | {"choices": [], "usage": body["usage"]})
    for event in events:
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def models_body(model: str, context: int) -> Body:
    """Return the list of models, which has one entry; ``context`` is the maximum number of tokens in a trajectory."""
    return {
        "object": "list",
        "data": [{"id": model, "object": "model", "created": 0, "owned_by": "verl", "max_model_len": context}],
    }


def _head(answer: Answer, prefix: str, kind: str, model: str) -> Body:
    return {"id": f"{prefix}-{answer.name}", "object": kind, "created": answer.created, "model": model}


def _chat_log_probs(answer: Answer, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Body]:
    for token, value in zip(answer.output.token_ids, answer.output.log_probs or [], strict=True):
        text = _text(tokenizer, token)
        yield {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


def _text(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    return str(tokenizer.decode([token]))
