"""A prompt of messages, with tools, history and images, has the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.data import load_processor
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.generation.prompts import process_conversations, render_prompt
from tests.command import exit_code
from tests.generation.cases import picture

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 3, "of": "Oslo"}}}
AS_TEXT = {
    "type": "function",
    "function": {**CALL["function"], "arguments": '{"at": 3, "of": "Oslo"}'},
}
ASKED = {"role": "user", "content": "And now?"}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": "a.png"},
            {"type": "text", "text": "Or"},
            {"type": "image", "image": "b.png"},
        ],
    },
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "wet"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("messages")
    picture(0, 40, 64).save(path / "a.png")
    picture(1, 72, 24).save(path / "b.png")
    return path


def of_transformers(processor: Any, folder: Path, messages: list[Any], **options: Any) -> Any:
    """Return what transformers makes of messages, whose images it opens itself."""
    opened = [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [
                {"type": "image", "path": str(folder / part["image"])}
                if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]  # fmt: skip
    return processor.apply_chat_template(
        opened,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        **options,
    )


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("form", ["parts", "tags", "asked again"])
def test_tokens_and_pixels_are_those_of_transformers(
    form: str, arguments: dict[str, Any], hybrid: Path, folder: Path
) -> None:
    processor = load_processor(hybrid)
    messages = [*HISTORY, ASKED] if form == "asked again" else HISTORY
    record: Any = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": arguments}
    if form == "tags":  # and JSON text, as OpenAI and tables have it
        told = [
            HISTORY[0],
            {"role": "user", "content": "<image>Or<image>"},
            {**HISTORY[2], "tool_calls": json.dumps([AS_TEXT])},
            HISTORY[3],
        ]
        record |= {"messages": told, "images": ["a.png", "b.png"], "tools": json.dumps([TOOL])}
    want = of_transformers(processor, folder, messages, tools=[TOOL], **arguments)
    prompt = render_prompt(record, processor, MediaFolder(folder, {}))
    got = process_conversations(processor, [prompt])
    for name in ("input_ids", "pixel_values", "image_grid_thw"):
        assert torch.equal(got[name], want[name]), name
    left = [("a message", "reasoning_content")] if form == "asked again" else []
    assert [(item.where, item.name) for item in prompt.unused] == left


def test_a_record_wins_over_the_flag(hybrid: Path) -> None:
    processor = load_processor(hybrid)
    record = {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": False}}
    on = {"enable_thinking": True}
    texts = [
        render_prompt(one, processor, chat_template_kwargs=on).text for one in ([ASKED], record)
    ]
    assert texts[0].endswith("<think>\n")
    assert texts[1].endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "Hi"}, "a list of messages"),
        ([], "at least one message"),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ([ASKED, {"role": "assistant", "content": "Yes"}], "nothing to answer"),
        ([{**ASKED, "content": "<image>"}], "more image placeholders"),
        ([{**ASKED, "content": [{"type": "image", "image": "no.png"}]}], "no.png"),
        (
            [{**ASKED, "content": [{"type": "image", "image": "a.png", "max_pixels": 900}]}],
            "processor's own size",
        ),
        ({"messages": [ASKED], "chat_template_kwargs": {"deep": 1}}, "does not read deep"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_one_message(
    record: Any, message: str, hybrid: Path, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "prompt.json"
    (tmp_path / "a.png").symlink_to(folder / "a.png")
    file.write_text(json.dumps(record))
    assert exit_code("generate", hybrid, "--cpu", "--messages", file) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of them is needed"),
        (["--messages", "prompt.json", "--prompt", "?"], "one of them is needed"),
        (["--messages", "prompt.json", "--image", "a.png"], "belong to --prompt"),
        (["--messages", "no.json"], "no.json cannot be read"),
        (["--messages", "text.json"], "cannot be read"),
    ],
)
def test_one_way_to_ask(
    arguments: list[str], message: str, hybrid: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompt.json").write_text(json.dumps([ASKED]))
    Path("text.json").write_text("What?")
    Path("a.png").touch()
    assert exit_code("generate", hybrid, "--cpu", *arguments) == 2
    assert message in capsys.readouterr().err


def test_the_command_answers(hybrid: Path, folder: Path, capsys: Any) -> None:
    """As the last message asks it alone: the same answer as to --prompt."""
    (folder / "asked.json").write_text(json.dumps({"messages": [ASKED], "source": "web"}))
    options = ("--cpu", "--max-new-tokens", 3, "--temperature", 0, "--json")
    said = []
    for asked in (("--prompt", ASKED["content"]), ("--messages", folder / "asked.json")):
        assert exit_code("generate", hybrid, *options, *asked) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["answers"][0]["token_ids"] == said[1]["answers"][0]["token_ids"]
    assert {"where": "a record", "name": "source", "why": ""} in said[1]["unused"]
