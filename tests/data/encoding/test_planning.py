"""Tokens, pixels and the loss mask equal those of Hugging Face's processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers.image_utils import load_image
from transformers.video_utils import read_video_pyav

from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.data.encoding.pixels import PixelLoader
from mcore_qwen3vl.data.encoding.planning import Plan, Planner, truncate
from mcore_qwen3vl.data.encoding.rendering import Renderer
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample, OverlongSample, Reading
from tests.data.conftest import chat

ANSWER = "The  answer\nis 42 — naïve 😀\n"

RECORDS: dict[str, dict[str, Any]] = {
    "text": chat(("user", "hello there"), ("assistant", ANSWER)),
    "system": chat(("system", "be brief"), ("user", "hello"), ("assistant", ANSWER)),
    "multi_turn": chat(
        ("system", "sys"),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
        ("assistant", ANSWER),
    ),
    "image": {**chat(("user", "<image>what?"), ("assistant", ANSWER)), "images": ["0.png"]},
    "many_images": {
        **chat(
            ("user", "a <image> and <image>, compare"),
            ("assistant", "different"),
            ("user", "and <image>?"),
            ("assistant", ANSWER),
        ),
        "images": ["0.png", "1.png", "3.png"],
    },
    "parts": chat(
        (
            "user",
            [
                {"type": "image", "image": "2.png"},
                {"type": "text", "text": "and"},
                {"type": "image_url", "image_url": {"url": "0.png"}},
            ],
        ),
        ("assistant", [{"type": "text", "text": ANSWER}]),
    ),
    "video": {**chat(("user", "<video>what?"), ("assistant", ANSWER)), "videos": ["clip.mp4"]},
    "video_and_image": {
        **chat(
            ("user", "see <video> and <image> and <video>"),
            ("assistant", "seen"),
            ("user", "sure?"),
            ("assistant", ANSWER),
        ),
        "videos": ["clip.mp4", "short.mp4"],
        "images": ["1.png"],
    },
}


def planned(
    processor: Any, record: Any, folder: Path, reading: Reading = PLAIN, **config: Any
) -> tuple[Plan, Any]:
    settings = DataConfig(**{"seq_length": 4096, **config})
    settings.media_limits.apply(processor)
    parsed = parse_record(record, MediaFolder(folder, {}), reading)
    return Planner(processor, settings).plan(Renderer(processor).render(parsed)), parsed


def hf_inputs(processor: Any, parsed: Conversation, **options: Any) -> Any:
    """Encode the same sample by HF's processor alone, end to end."""
    images = [load_image(str(m.content)) for m in parsed.media if m.kind == "image"]
    videos, metadata = [], []
    for item in parsed.media:
        if item.kind == "video":
            every = lambda metadata, **_: np.arange(metadata.total_num_frames)  # noqa: E731
            frames, meta = read_video_pyav(str(item.content), every)
            videos.append(frames)
            metadata.append(meta)
    text = processor.apply_chat_template(parsed.messages, tokenize=False)
    media: dict[str, Any] = {"images": images} if images else {}
    if videos:
        media |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": True}
    return processor(text=[text], **media, return_tensors="pt", **options)


@pytest.mark.parametrize("name", RECORDS)
def test_tokens_and_pixels_are_those_of_the_hf_processor(
    name: str, processor: Any, media: Path
) -> None:
    plan, parsed = planned(processor, RECORDS[name], media)
    expected = hf_inputs(processor, parsed)
    assert plan.input_ids.tolist() == expected["input_ids"][0].tolist()

    assert_pixels_are_hf_s(PixelLoader(processor), plan, expected, torch.uint8)


def assert_pixels_are_hf_s(
    loader: PixelLoader, plan: Plan, expected: Any, dtype: torch.dtype
) -> None:
    """Check that normalised pixels equal HF's bit for bit."""
    pixels = loader.load(plan.media)
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        ours = getattr(pixels, key)
        assert (ours is None) == (key not in expected)
        if ours is not None and key.startswith("pixel"):
            assert ours.dtype == dtype
            ours = loader.scale.apply(ours) if loader.scale else ours
        if ours is not None:
            assert torch.equal(ours, expected[key]), key


@pytest.mark.parametrize(
    ("both", "videos", "scaled"),
    [
        ({"image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.28]}, {}, True),
        ({}, {"image_mean": [0.48, 0.45, 0.4]}, False),
        ({"do_rescale": False}, {}, False),
    ],
)
def test_pixels_are_hf_s_however_its_processors_normalise(
    both: dict[str, Any], videos: dict[str, Any], scaled: bool, processor: Any, media: Path
) -> None:
    for name, value in both.items():
        setattr(processor.image_processor, name, value)
    for name, value in {**both, **videos}.items():
        setattr(processor.video_processor, name, value)
    plan, parsed = planned(processor, RECORDS["video_and_image"], media)
    loader = PixelLoader(processor)
    assert (loader.scale is not None) == scaled
    dtype = torch.uint8 if scaled else torch.float32
    assert_pixels_are_hf_s(loader, plan, hf_inputs(processor, parsed), dtype)


def test_video_sampling_follows_fps_and_max_frames(processor: Any, media: Path) -> None:
    record = RECORDS["video"]
    frames = {}
    for fps, most in [(2.0, 768), (5.0, 768), (10.0, 6)]:
        limits = MediaLimits(video_fps=fps, video_max_frames=most)
        plan, parsed = planned(processor, record, media, media_limits=limits)
        expected = hf_inputs(processor, parsed)
        assert plan.input_ids.tolist() == expected["input_ids"][0].tolist()
        frames[fps] = plan.media[0].frames * 2
    assert frames == {2.0: 4, 5.0: 12, 10.0: 6}  # 2.3 s give 4.6, 11.5 and at most 6 frames


@pytest.mark.parametrize(
    "limits",
    [
        MediaLimits(image_max_tokens=9),
        MediaLimits(image_max_pixels=600),
        MediaLimits(image_min_pixels=1500, image_max_pixels=4000),
    ],
)
def test_image_budgets_bind(limits: MediaLimits, processor: Any, media: Path) -> None:
    plan, parsed = planned(processor, RECORDS["many_images"], media, media_limits=limits)
    assert plan.input_ids.tolist() == hf_inputs(processor, parsed)["input_ids"][0].tolist()
    for item in plan.media:
        if limits.image_max_tokens:
            assert item.patches // 4 <= limits.image_max_tokens
        if limits.image_max_pixels:
            assert item.patches * 16 <= limits.image_max_pixels
        if limits.image_min_pixels:
            assert item.patches * 16 >= limits.image_min_pixels


def trained_text(processor: Any, plan: Plan) -> list[str]:
    """Decode each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], plan.loss_weights > 0, [0]])))
    return [
        processor.tokenizer.decode(plan.input_ids[a:b].tolist())
        for a, b in edges.reshape(-1, 2).tolist()
    ]


@pytest.mark.parametrize("name", RECORDS)
def test_trained_are_the_answers_and_their_end_of_turn(
    name: str, processor: Any, media: Path
) -> None:
    plan, parsed = planned(processor, RECORDS[name], media)
    answers = [
        m["content"] if isinstance(m["content"], str) else m["content"][0]["text"]
        for m in parsed.messages
        if m["role"] == "assistant"
    ]
    end_of_turn = processor.tokenizer.eos_token
    assert trained_text(processor, plan) == [answer + end_of_turn for answer in answers]


# HF's apply_chat_template decodes videos with torchcodec alone.
@pytest.mark.parametrize("name", [name for name in RECORDS if "video" not in name])
def test_mask_is_hf_s_own_where_the_template_marks_the_turns(
    name: str, processor: Any, media: Path
) -> None:
    """The masks agree token by token: HF's is from ``{% generation %}`` blocks, ours from text."""
    plan, parsed = planned(processor, RECORDS[name], media)
    rendered = processor.apply_chat_template(parsed.messages, tokenize=False)
    processor.chat_template = marked_template()
    messages = _with_media(parsed)
    assert processor.apply_chat_template(parsed.messages, tokenize=False) == rendered
    hf = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert plan.input_ids.tolist() == hf["input_ids"][0]
    assert (plan.loss_weights > 0).astype(int).tolist() == hf["assistant_masks"][0]


def marked_template() -> str:
    """Return the tiny template with the assistant's part between generation markers."""
    from mcore_qwen3vl.tiny.tiny_checkpoint import chat_template

    original = chat_template()
    body = original[original.index("{%- if message['content'] is string") :]
    body = body[: body.index("{{- '<|im_end|>\\n' -}}")]
    opening = "{%- if message['role'] == 'assistant' -%}"
    marked = (
        f"{opening}{{%- generation -%}}{body}{{{{- '<|im_end|>' -}}}}{{%- endgeneration -%}}"
        f"{{{{- '\\n' -}}}}{{%- else -%}}{body}{{{{- '<|im_end|>\\n' -}}}}{{%- endif -%}}"
    )
    return original.replace(f"{body}{{{{- '<|im_end|>\\n' -}}}}", marked)


def _with_media(parsed: Conversation) -> list[dict[str, Any]]:
    """Return messages whose image parts name their file, as HF's own loading requires."""
    files = iter(parsed.media)
    messages = []
    for message in parsed.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                part if part["type"] == "text" else {**part, "path": str(next(files).content)}
                for part in content
            ]
        messages.append({**message, "content": content})
    return messages


def test_weights_of_messages_and_sample_multiply(processor: Any, media: Path) -> None:
    record = RECORDS["multi_turn"]
    messages = [dict(message) for message in record["messages"]]
    messages[2]["weight"] = 0.25
    plan, _ = planned(processor, {"messages": messages, "weight": 2.0}, media)
    values = sorted(set(plan.loss_weights.tolist()))
    assert values == [0.0, 0.5, 2.0]
    messages[2]["weight"] = 0
    plan, _ = planned(processor, {"messages": messages}, media)
    assert trained_text(processor, plan) == [ANSWER + "<|im_end|>"]


def test_documents_train_all_text_and_no_media(processor: Any, media: Path) -> None:
    record = {"texts": ["one ", None, " two ", None], "images": [None, "0.png", None, "1.png"]}
    plan, _ = planned(processor, record, media)
    assert trained_text(processor, plan) == ["one ", " two ", "<|endoftext|>"]
    text = processor.tokenizer.decode(plan.input_ids.tolist())
    assert text.startswith("one <|vision_start|><|image_pad|>")
    assert text.endswith("<|image_pad|><|vision_end|><|endoftext|>")


def test_caption_puts_the_image_first(processor: Any, media: Path) -> None:
    plan, _ = planned(processor, {"image": "2.png", "caption": "a picture"}, media)
    assert trained_text(processor, plan) == ["a picture<|endoftext|>"]
    assert plan.media[0].start == 0


@pytest.mark.parametrize("name", ["many_images", "video_and_image"])
def test_truncation_never_cuts_inside_media(name: str, processor: Any, media: Path) -> None:
    full, _ = planned(processor, RECORDS[name], media)
    kept = set()
    for limit in range(1, len(full.input_ids) + 1):
        plan = truncate(full, limit)
        length = len(plan.input_ids)
        cut = [item for item in full.media if item.start < limit < item.end]
        assert length == (cut[0].start if cut else limit)
        assert plan.input_ids.tolist() == full.input_ids[:length].tolist()
        assert [m.start for m in plan.media] == [m.start for m in full.media if m.end <= length]
        tokens = plan.input_ids.tolist()
        for kind, token in ("image", processor.image_token_id), ("video", processor.video_token_id):
            placeholders = sum(m.patches // 4 for m in plan.media if m.media.kind == kind)
            assert tokens.count(token) == placeholders
        starts = tokens.count(processor.vision_start_token_id)
        assert starts == tokens.count(processor.vision_end_token_id)
        kept.add(len(plan.media))
    assert kept == {0, 1, 2, 3}


def test_truncation_policy(processor: Any, media: Path) -> None:
    full, _ = planned(processor, RECORDS["many_images"], media)
    limit = full.media[2].end - 1
    cut, _ = planned(
        processor, RECORDS["many_images"], media, seq_length=limit, overlong="truncate"
    )
    assert len(cut.input_ids) == full.media[2].start
    assert trained_text(processor, cut) == ["different<|im_end|>"]
    limit = full.media[1].end
    with pytest.raises(BadSample, match="no trained token is left"):
        planned(processor, RECORDS["many_images"], media, seq_length=limit, overlong="truncate")


def test_overlong_is_dropped_by_default(processor: Any, media: Path) -> None:
    with pytest.raises(OverlongSample, match="more than seq_length 16"):
        planned(processor, RECORDS["image"], media, seq_length=16)


def test_placeholder_text_in_a_message_is_a_mismatch(processor: Any, media: Path) -> None:
    record = chat(("user", "what is <|image_pad|>?"), ("assistant", "a token"))
    with pytest.raises(BadSample, match="1 image placeholders for 0 images"):
        planned(processor, record, media)


@pytest.mark.parametrize(
    ("policy", "tokens", "error"),
    [("drop", 33, OverlongSample), ("drop", 8, TimeoutError), ("truncate", 33, TimeoutError)],
)
def test_a_text_that_no_row_can_hold_is_not_tokenised(
    policy: Any, tokens: int, error: type[Exception], processor: Any, media: Path
) -> None:
    longest = max(map(len, processor.tokenizer.get_vocab()))
    record = chat(("user", "w" * (4 * longest * tokens)), ("assistant", "a"))
    rendered = Renderer(processor).render(parse_record(record, MediaFolder(media, {})))
    planner = Planner(processor, DataConfig(32, overlong=policy))
    with mock.patch.object(Planner, "_tokenise", side_effect=TimeoutError), pytest.raises(error):
        planner.plan(rendered)
