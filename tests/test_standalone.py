"""The model in a program of one's own: the loss is Hugging Face's, and what comes out loads there.

The calls as the README shows them, in a fresh process, are run by tests/docs.
"""

import pytest
import torch
from PIL import Image

from mcore_qwen3vl.data import IGNORED, load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.standalone import init_distributed, load_model, prepare_batch, save_model
from mcore_qwen3vl.tiny import write_tiny_checkpoint

cpu.install()

IMAGE = Image.new("RGB", (64, 40), (220, 30, 30))
QUESTION = [{"type": "image", "image": IMAGE}, {"type": "text", "text": "Which colour?"}]
CONVERSATIONS = [
    [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is red."}],
    [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}],
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("standalone") / "hf")


def hugging_face_loss(checkpoint):
    """The mean over the answers' tokens, one conversation at a time, by HF's own code alone."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    total, count = 0.0, 0
    for user, assistant in CONVERSATIONS:
        prompt = processor.apply_chat_template([user], add_generation_prompt=True)
        answer = assistant["content"] + "<|im_end|>"
        images = None if isinstance(user["content"], str) else [IMAGE]
        inputs = processor(text=[prompt + answer], images=images, return_tensors="pt")
        trained = len(processor.tokenizer(answer)["input_ids"])
        with torch.no_grad():
            logits = model(**inputs).logits[0, -trained - 1 : -1]
        targets = inputs["input_ids"][0, -trained:]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += trained
    return total / count


def _one_step(checkpoint, layout, out):
    device = init_distributed(layout)
    assert device.type == "cpu"
    (model,) = load_model(checkpoint, layout)
    batch = prepare_batch(model, load_processor(checkpoint), CONVERSATIONS)
    losses = model(
        batch.input_ids,
        batch.position_ids,
        ~batch.padding_mask,
        labels=batch.labels.clamp(min=0),
        visual=batch.visual,
    )
    save_model(model, out, like=checkpoint)
    loss = (losses * batch.loss_weights).sum() / batch.loss_weights.sum()
    return float(loss), batch.labels, batch.input_ids.shape[1]


@pytest.mark.parametrize("layout", ["single", "tp2+sp"])
def test_loss_and_export_are_hugging_faces(checkpoint, layout, tmp_path):
    layout = Layout.parse(layout)
    results = run_layout(_one_step, layout.world_size, checkpoint, layout, tmp_path / "out")
    expected = hugging_face_loss(checkpoint)
    tokenizer = load_processor(checkpoint).tokenizer
    for loss, labels, length in results:
        assert loss == pytest.approx(expected, rel=1e-5)
        answers = [tokenizer.decode(row[row != IGNORED]) for row in labels]
        assert answers == ["It is red.<|im_end|>", "2<|im_end|>"]
        assert length % layout.tp == 0
    assert hugging_face_loss(tmp_path / "out") == pytest.approx(expected, rel=1e-6)


def _refusals(checkpoint):
    init_distributed()
    (model,) = load_model(checkpoint)
    processor = load_processor(checkpoint)
    for conversations, message in (
        ([], "no conversation"),
        ([CONVERSATIONS[0], CONVERSATIONS[0][:1]], "Conversation 1 cannot be used: no assistant"),
        ([[{"role": "user", "content": [{"type": "image", "image": "absent.png"}]},
           CONVERSATIONS[0][1]]], "Conversation 0 cannot be used: image .*absent.png"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            prepare_batch(model, processor, conversations)
    with pytest.raises(BadInput, match="needs 2 ranks; 1 are running"):
        init_distributed(Layout(tp=2))


def test_what_cannot_be_used_is_named(checkpoint):
    run_layout(_refusals, 1, checkpoint)
