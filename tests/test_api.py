"""The model works in a user's own program: its loss is Hugging Face's, and its exports load there.

tests/docs runs the calls as the documentation shows them, in a fresh process.
"""

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from PIL import Image
from torch import nn

from mcore_qwen3vl import (
    Layout,
    api,
    load_model,
    load_processor,
    prepare_batch,
    reduce_gradients,
    save_model,
)
from mcore_qwen3vl.data import IGNORED
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime import device
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.turns import slow

IMAGE = Image.new("RGB", (64, 40), (220, 30, 30))
QUESTION = [{"type": "image", "image": IMAGE}, {"type": "text", "text": "Which colour?"}]
CONVERSATIONS = [
    [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is red."}],
    [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}],
]


def hugging_face_model(checkpoint):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)


def hugging_face_loss(checkpoint, model=None):
    """Compute the mean loss over the answers' tokens, one conversation at a time, by HF alone."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    model = model or hugging_face_model(checkpoint)
    total, count = 0.0, 0
    for user, assistant in CONVERSATIONS:
        prompt = processor.apply_chat_template([user], add_generation_prompt=True)
        answer = assistant["content"] + "<|im_end|>"
        images = None if isinstance(user["content"], str) else [IMAGE]
        inputs = processor(text=[prompt + answer], images=images, return_tensors="pt")
        trained = len(processor.tokenizer(answer)["input_ids"])
        logits = model(**inputs).logits[0, -trained - 1 : -1]
        targets = inputs["input_ids"][0, -trained:]
        total = total + nn.functional.cross_entropy(logits, targets, reduction="sum")
        count += trained
    return total / count


def _one_step(checkpoint, layout, out):
    model = load_model(checkpoint, layout)
    assert next(model.parameters()).device.type == "cpu"
    batch = prepare_batch(model, load_processor(checkpoint), CONVERSATIONS)
    losses = model(
        batch.input_ids,
        batch.position_ids,
        ~batch.padding_mask,
        labels=batch.labels.clamp(min=0),
        visual=batch.visual,
    )
    save_model(model, out)
    loss = (losses * batch.loss_weights).sum() / batch.loss_weights.sum()
    return float(loss), batch.labels, batch.input_ids.shape[1]


@pytest.mark.parametrize("layout", ["single", "tp2+sp"])
def test_loss_and_export_are_hugging_faces(dense, layout, tmp_path):
    layout = Layout.parse(layout)
    results = run_layout(_one_step, layout.world_size, dense, layout, tmp_path / "out")
    expected = float(hugging_face_loss(dense))
    tokenizer = load_processor(dense).tokenizer
    for loss, labels, length in results:
        assert loss == pytest.approx(expected, rel=1e-5)
        answers = [tokenizer.decode(row[row != IGNORED]) for row in labels]
        assert answers == ["It is red.<|im_end|>", "2<|im_end|>"]
        assert length % layout.tp == 0
    assert float(hugging_face_loss(tmp_path / "out")) == pytest.approx(expected, rel=1e-6)


def _refusals(checkpoint):
    model = load_model(checkpoint)
    processor = load_processor(checkpoint)
    for conversations, message in (
        ([], "no record"),
        ([CONVERSATIONS[0], CONVERSATIONS[0][:1]], "Record 1 cannot be used: no assistant"),
        ([[{"role": "user", "content": [{"type": "image", "image": "absent.png"}]},
           CONVERSATIONS[0][1]]], "Record 0 cannot be used: image .*absent.png"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            prepare_batch(model, processor, conversations)
    with pytest.raises(BadInput, match="needs 2 ranks; 1 are running"):
        load_model(checkpoint, Layout(tp=2))


def test_what_cannot_be_used_is_named(dense):
    run_layout(_refusals, 1, dense)


def adamw(parameters):
    # With the usual epsilon, a gradient that is zero up to rounding would move its parameter by
    # the full learning rate in a random direction.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


def _backward(model, batch):
    """Run a pass like the documentation's, or by Megatron's schedule; return the token count."""
    held = model.local_tokens(batch.input_ids.shape[1])
    weights = batch.loss_weights[:, held]

    def forward_step(_, model):
        losses = model(
            batch.input_ids,
            batch.position_ids,
            ~batch.padding_mask,
            labels=batch.labels.clamp(min=0),
            visual=batch.visual,
        )
        return losses, lambda losses: ((losses * weights).sum(), weights.sum().int(), {})

    if mpu.get_pipeline_model_parallel_world_size() == 1:
        losses, loss = forward_step(None, model)
        loss(losses)[0].backward()
    else:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=1,
            seq_length=batch.input_ids.shape[1],
            micro_batch_size=len(batch.input_ids),
            forward_only=False,
        )
    return weights.sum()


def _three_steps(checkpoint, layout, out, reduce=reduce_gradients):
    model = load_model(checkpoint, layout)
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    batch = prepare_batch(model, load_processor(checkpoint), CONVERSATIONS[rank::size])
    optimizer = adamw(model.parameters())
    for _ in range(3):
        reduce(model, _backward(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    save_model(model, out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that gives a checkpoint, and HF's weights before and after three steps."""
    made = {}

    def get(kind):
        if kind not in made:
            path = write_tiny_checkpoint(tmp_path_factory.mktemp(kind) / "hf", **KINDS[kind])
            model = hugging_face_model(path).train()
            before = {n: p.detach().clone() for n, p in model.state_dict().items()}
            optimizer = adamw(model.parameters())
            for _ in range(3):
                hugging_face_loss(path, model).backward()
                optimizer.step()
                optimizer.zero_grad()
            made[kind] = path, before, model.state_dict()
        return made[kind]

    return get


KINDS = {"dense": {}, "tied": {"tie": True}, "moe": {"moe": True}}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", "cp2"),
        ("tied", "pp2"),
        ("moe", "tp2xep2+sp"),
        *slow(
            ("dense", "single"),
            ("dense", "tp2+sp"),
            ("dense", "tp2"),
            ("dense", "dp2"),
            ("moe", "ep2xdp2"),
        ),
    ],
)
def test_three_steps_are_hugging_faces(trained, kind, layout, tmp_path):
    checkpoint, before, after = trained(kind)
    layout = Layout.parse(layout)
    out = tmp_path / "out"
    run_layout(_three_steps, layout.world_size, checkpoint, layout, out)
    saved = hugging_face_model(out).state_dict()
    assert saved.keys() == after.keys()
    for name, expected in after.items():
        moved = (expected - before[name]).abs().max()
        assert moved > 1e-5, name
        assert (saved[name] - expected).abs().max() <= 5e-4 * moved, name


@pytest.mark.parametrize("layout", ["dp2", *slow("tp2+sp", "cp2")])
def test_without_reduced_gradients_nothing_is_saved(trained, layout, tmp_path):
    checkpoint, _, _ = trained("dense")
    layout = Layout.parse(layout)
    out = tmp_path / "out"

    def run():
        _three_steps(checkpoint, layout, out, reduce=lambda model, num_tokens: None)

    with pytest.raises(BadInput, match=r"different values of \d+ tensors.* call reduce_gradients"):
        run_layout(run, layout.world_size)
    assert not out.exists()


def test_one_different_bit_is_found(trained, tmp_path):
    checkpoint, _, _ = trained("dense")
    layout = Layout(tp=2)
    name = "model.language_model.layers.2.self_attn.q_norm.weight"

    def run():
        model = load_model(checkpoint, layout)
        weight = model.decoder.layers[2].self_attention.q_layernorm.weight.data
        if mpu.get_tensor_model_parallel_rank() == 1:
            weight[3] = torch.nextafter(weight[3], torch.tensor(2.0))
        save_model(model, tmp_path / "out")

    with pytest.raises(BadInput, match=rf"different values of 1 tensors .*\({name}\)"):
        run_layout(run, layout.world_size)


def test_gradients_of_megatrons_ddp_are_left_to_megatron(trained):
    checkpoint, _, _ = trained("dense")

    def run():
        model = load_model(checkpoint)
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        reduce_gradients(wrapped, 1.0)

    with pytest.raises(BadInput, match="wrapped in Megatron's DDP"):
        run_layout(run, 1)


def test_on_gpus_transfers_are_ordered_before_cuda_starts(monkeypatch):
    called = []
    monkeypatch.setattr(api.cpu, "is_installed", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(device, "order_transfers", lambda **_: called.append("order"))
    monkeypatch.setattr("torch.cuda.set_device", lambda device: called.append("start"))
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(api, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(api.atexit, "register", lambda function: None)
    api._start_rank(Layout(), api._choose_device(None), 1)
    assert called == ["order", "start"]
