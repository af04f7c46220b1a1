"""A server with vLLM's OpenAI API: what it is asked, and what it answers.

It is told every setting of sampling, because vLLM takes those that a request leaves out from the
checkpoint's ``generation_config.json``. ``return_token_ids`` makes it send the tokens of the prompt
as they went into the model, after its processor has written out the images and videos.
"""

from __future__ import annotations

import base64
import json
import math
import mimetypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import httpx

from mcore_qwen3vl.data.records.media import Media
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.errors import BadInput

KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable whose key is sent; a flag would stand in reports and process lists."""

_LEAST = -9999.0
"""vLLM sends this in place of minus infinity, which JSON does not have."""
_REFUSALS = (400, 413, 422)
"""What a server answers to a request that it cannot take; others are about the server itself."""
_USUAL_TYPES = {"image": "image/png", "video": "video/mp4"}


class Refused(Exception):
    """The server does not take this prompt; the message is its own."""


@dataclass(frozen=True)
class Sampling:
    """How the server chooses an answer's tokens; top-p 1 and top-k 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise BadInput if a value is out of range."""
        for name, fits, wanted in (
            ("temperature", self.temperature >= 0, "0 for greedy, or more"),
            ("top-p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top-k", self.top_k >= 0, "0 for no limit, or a number of tokens"),
            ("max-tokens", self.max_tokens > 0, "at least 1"),
        ):
            if not fits:
                value = getattr(self, name.replace("-", "_"))
                raise BadInput(f"--{name} is {value:g}: it must be {wanted}.")

    def fields(self) -> dict[str, Any]:
        """Return them as fields of a request, with all others that change a distribution off."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,  # which every version takes for no limit
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Answer:
    """What the server says of one prompt; log-probabilities are those of the answer's n tokens."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]


class Server:
    """A client of one server and one of its models."""

    def __init__(self, address: str, model: str | None = None, *, timeout: float = 600.0) -> None:
        """
        Args:
            address: with or without ``/v1``.
            model: default: the first that the server names.
            timeout: seconds to wait for an answer.

        Raises:
            BadInput: nothing answers at the address, or it has no such model.
        """
        self.address = address.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=timeout, headers=headers, follow_redirects=True)
        try:
            listed = self._send("GET", "/v1/models").get("data")
        except Refused as error:
            raise BadInput(f"{self.address} refuses to name its models: {error}.") from None
        names = [one.get("id") for one in listed or [] if isinstance(one, Mapping)]
        if model is None and not names:
            raise BadInput(f"{self.address} names no model: give its name with --model.")
        if model is not None and model not in names:
            raise BadInput(
                f"{self.address} has no model {model}; it has {', '.join(map(str, names))}: name "
                "one of them with --model."
            )
        self.model: str = model or str(names[0])

    def answer(self, conversation: Conversation, sampling: Sampling) -> Answer:
        """Ask the server to go on with a conversation.

        Raises:
            Refused: it does not take this prompt.
            BadInput: it cannot be reached, or does not send what is needed.
        """
        asked = {
            "model": self.model,
            "messages": list(_openai_messages(conversation)),
            **sampling.fields(),
            "n": 1,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if conversation.chat_template_kwargs:
            asked["chat_template_kwargs"] = dict(conversation.chat_template_kwargs)
        if conversation.tools:
            # With "none" no answer is forced into the form of a call, and the prompt has the tools.
            asked |= {"tools": conversation.tools, "tool_choice": "none"}
        return self._read(self._send("POST", "/v1/chat/completions", asked))

    def text_of(self, ids: list[int]) -> str | None:
        """Return the text of tokens by the server's tokenizer; None if it does not tell."""
        try:
            said = self._send("POST", "/detokenize", {"model": self.model, "tokens": ids})
        except (Refused, BadInput):  # other servers have no such address
            return None
        text = said.get("prompt")
        return text if isinstance(text, str) else None

    def _send(self, method: str, path: str, body: Any = None) -> Mapping[str, Any]:
        where = f"{self.address}{path}"
        try:
            response = self._client.request(method, where, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise BadInput(
                f"{where} cannot be reached ({type(error).__name__}: {error}): start the server, "
                "as with `vllm serve CHECKPOINT`, and name its address, as http://HOST:8000."
            ) from None
        try:
            content = response.json()
        except ValueError:
            content = None
        if response.is_error:
            said = f"{response.status_code} {_reason_in(content) or response.reason_phrase}"
            if response.status_code in _REFUSALS:
                raise Refused(said)
            raise BadInput(
                f"{where} answers {said}. Name a server with vLLM's OpenAI API; if it wants a key, "
                f"set {KEY_VARIABLE}."
            )
        if not isinstance(content, Mapping):
            raise BadInput(f"{where} does not answer with a JSON object: it is no OpenAI API.")
        return content

    def _read(self, said: Mapping[str, Any]) -> Answer:
        choices = said.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        logged = (choice or {}).get("logprobs")
        tokens = (logged or {}).get("content")
        if not isinstance(tokens, list):
            raise BadInput(
                f"{self.address} sends no log-probabilities with an answer (logprobs.content): "
                "name a server with vLLM's OpenAI API."
            )
        prompt_ids, token_ids = said.get("prompt_token_ids"), (choice or {}).get("token_ids")
        if token_ids is None:
            token_ids = [_id_in(token) for token in tokens]
        if not (_are_ids(prompt_ids) and _are_ids(token_ids)):
            raise BadInput(
                f"{self.address} does not send the ids of the tokens of a prompt and an answer "
                "(prompt_token_ids, token_ids), which show whether both models see the same "
                "prompt. vLLM 0.10.2 and newer do for return_token_ids."
            )
        said_values = (one.get("logprob") if isinstance(one, Mapping) else None for one in tokens)
        values = [float(value) for value in said_values if _is_number(value)]
        if not len(values) == len(tokens) == len(token_ids):
            raise BadInput(
                f"{self.address} sends {len(values)} log-probabilities for {len(token_ids)} tokens "
                "of an answer: upgrade the server."
            )
        return Answer(
            prompt_ids,
            token_ids,
            [-math.inf if value <= _LEAST else value for value in values],
        )


def _reason_in(content: Any) -> str:
    """Return the message of an error in OpenAI's form, or in vLLM's older one."""
    if not isinstance(content, Mapping):
        return ""
    inner = content.get("error")
    holder = inner if isinstance(inner, Mapping) else content
    return str(holder.get("message") or holder.get("detail") or "")


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _id_in(token: Any) -> int | None:
    """Return the id in ``token_id:N``, as vLLM spells tokens if it is asked to."""
    name = token.get("token") if isinstance(token, Mapping) else None
    _, _, number = name.partition("token_id:") if isinstance(name, str) else ("", "", "")
    return int(number) if number.isdecimal() else None


def _openai_messages(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """Yield the messages in OpenAI's form, with the encoded bytes of images and videos."""
    media = iter(conversation.media)
    for message in conversation.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                part if part["type"] == "text" else _part_of(next(media)) for part in content
            ]
        calls = message.get("tool_calls")
        said = {**message, "content": content}
        if calls:
            said["tool_calls"] = [_openai_call(call, n) for n, call in enumerate(calls)]
        yield said


def _part_of(media: Media) -> dict[str, Any]:
    if isinstance(media.content, tuple):
        raise BadSample(
            f"video {media.name} is a list of images, whose times a server is not told: give a file"
        )
    with media.open() as file:
        encoded = base64.b64encode(file.read()).decode()
    guessed = mimetypes.guess_type(media.name)[0] or ""
    usual = _USUAL_TYPES[media.kind]
    form = guessed if guessed.startswith(media.kind) else usual
    key = f"{media.kind}_url"
    return {"type": key, key: {"url": f"data:{form};base64,{encoded}"}}


def _openai_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a call as OpenAI has it: the arguments are JSON text, and it has an id."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }
