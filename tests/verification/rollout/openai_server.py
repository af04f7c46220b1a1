"""A server in the form of vLLM's OpenAI API, whose numbers are plain transformers'.

It shares no code with the package. What a `Fault` changes is changed in it alone.
"""

from __future__ import annotations

import base64
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.generation.cases import frames

NAME = "tiny"


@dataclass(frozen=True)
class Fault:
    """What this server does otherwise than a right one."""

    system: str = ""  # prompt that its chat template adds
    before: str = ""  # text that its tokenizer adds
    cut_to: int | None = None  # last tokens of a prompt that it keeps
    picture: Callable[[Image.Image], Image.Image] = lambda image: image  # what it makes of images
    processor: Callable[[Any], object] = lambda processor: None  # changes it in place
    model: Callable[[Any], object] = lambda model: None  # changes it in place
    dtype: torch.dtype = torch.float32
    temperature: float | None = None  # by which it divides, whatever it is asked for
    processed: bool = False  # as --logprobs-mode processed_logprobs
    left_out: tuple[str, ...] = ()  # keys of the answer that it does not send


class Oracle:
    """Transformers' model of a checkpoint, and what it answers."""

    def __init__(self, checkpoint: Path, fault: Fault) -> None:
        self.fault = fault
        has_tower = "vision_config" in json.loads((checkpoint / "config.json").read_text())
        load, read = transformers.AutoModelForImageTextToText, transformers.AutoProcessor
        if not has_tower:
            load, read = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        self.model = load.from_pretrained(checkpoint, dtype=fault.dtype).eval()
        self.processor = read.from_pretrained(checkpoint)
        self.tokenizer = self.processor.tokenizer if has_tower else self.processor
        with torch.no_grad():
            fault.model(self.model)
        fault.processor(self.processor)
        self.asked: list[dict[str, Any]] = []
        self._lock = threading.Lock()  # draws are torch's, which all threads share

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.asked.append(deepcopy(asked))
            return self._complete(asked)

    def _complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        inputs = self._inputs(asked)
        ids = inputs["input_ids"]
        temperature = asked["temperature"]
        torch.manual_seed(asked["seed"])
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        options |= {"top_k": None}
        if temperature:
            options = {
                "do_sample": True,
                "temperature": self.fault.temperature or temperature,
                "top_k": max(asked["top_k"], 0),
                "top_p": asked["top_p"],
            }
        made = self.model.generate(
            **inputs,
            **options,
            max_new_tokens=asked["max_tokens"],
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = made.sequences[0, ids.shape[1] :].tolist()
        steps = made.scores if self.fault.processed else made.logits
        values = [
            float(step[0].float().log_softmax(-1)[token])
            for step, token in zip(steps, tokens, strict=True)
        ]
        decode = self.tokenizer.decode
        content = [
            {"token": f"token_id:{token}", "logprob": max(value, -9999.0),
             "bytes": list(decode([token]).encode()), "top_logprobs": []}
            for token, value in zip(tokens, values, strict=True)
        ]  # fmt: skip
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": decode(tokens, skip_special_tokens=True)},
            "logprobs": {"content": content},
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": tokens,
        }
        said = {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": NAME,
            "choices": [choice],
            "usage": {"prompt_tokens": ids.shape[1], "completion_tokens": len(tokens)},
            "prompt_logprobs": None,
            "prompt_token_ids": ids[0].tolist(),
        }
        for name in self.fault.left_out:
            said.pop(name, None)
            choice.pop(name, None)
        return said

    def _inputs(self, asked: dict[str, Any]) -> dict[str, Any]:
        images, videos, turns = [], [], []
        for message in asked["messages"]:
            content = message["content"]
            if not isinstance(content, str):
                parts = []
                for part in content:
                    kind = part["type"].removesuffix("_url")
                    if kind == "text":
                        parts.append(part)
                        continue
                    encoded = part[f"{kind}_url"]["url"].partition(";base64,")[2]
                    data = base64.b64decode(encoded)
                    parts.append({"type": kind})
                    if kind == "image":
                        picture = Image.open(BytesIO(data)).convert("RGB")
                        images.append(self.fault.picture(picture))
                    else:
                        videos.append(_frames(data))
                content = parts
            turn = {**message, "content": content}
            for call in turn.get("tool_calls", []):  # as vLLM does, for templates
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            turns.append(turn)
        if self.fault.system:
            turns = [{"role": "system", "content": self.fault.system}, *turns]
        text = self.processor.apply_chat_template(
            turns,
            tools=asked.get("tools"),
            add_generation_prompt=True,
            tokenize=False,
            **asked.get("chat_template_kwargs", {}),
        )
        media: dict[str, Any] = {}
        if images:
            media["images"] = images
        if videos:
            media["videos"], media["video_metadata"] = map(list, zip(*videos, strict=True))
            media["do_sample_frames"] = True
        inputs = self.processor(text=[self.fault.before + text], return_tensors="pt", **media)
        if self.fault.cut_to:
            whole = inputs["input_ids"].shape[1]
            for name, value in inputs.items():
                if value.shape[:2] == (1, whole):
                    inputs[name] = value[:, -self.fault.cut_to :]
        for name, value in inputs.items():
            if value.is_floating_point():
                inputs[name] = value.to(self.fault.dtype)
        return inputs


def _frames(data: bytes) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(data)
        file.flush()
        return frames(file.name)


@contextmanager
def serving(checkpoint: Path, fault: Fault | None = None) -> Iterator[tuple[str, Oracle]]:
    """Yield the address of a server, and what answers there."""
    oracle = Oracle(checkpoint, fault or Fault())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": NAME, "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/detokenize":
                text = oracle.tokenizer.decode(asked["tokens"])
                self._send(200, {"prompt": text})
            elif self.path == "/v1/chat/completions":
                try:
                    self._send(200, oracle.complete(asked))
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"
                    self._send(400, {"error": {"message": message, "code": 400}})
            else:
                self._send(404, {"detail": "Not Found"})

        def _send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", oracle
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
