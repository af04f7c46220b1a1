"""``import mcore_qwen3vl`` costs nothing, its functions may be called in any order, and refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mcore_qwen3vl
from mcore_qwen3vl import (
    Layout,
    convert,
    generate,
    load_model,
    load_processor,
    prepare_batch,
    reduce_gradients,
    save_model,
    score,
    verify,
)
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.launch import run_layout
from tests.data.records.format_examples import TEMPLATE


def run(program: str, folder: Path | None = None) -> str:
    """Run a program in a fresh process, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_imports_nothing_until_a_name_is_used():
    """Neither torch nor megatron, and of the package itself no other module."""
    program = (
        "import sys; before = set(sys.modules); import mcore_qwen3vl; dir(mcore_qwen3vl)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "ours = [name for name in sys.modules if name.startswith('mcore_qwen3vl')]\n"
        "print(sorted(new & {'torch', 'megatron', 'transformers', 'numpy'}), ours)\n"
        "from mcore_qwen3vl import Layout; print('torch' in sys.modules)"
    )
    assert run(program) == "[] ['mcore_qwen3vl']\nFalse\n"


def test_the_names_are_those_that_are_listed():
    assert set(mcore_qwen3vl.__all__) <= set(dir(mcore_qwen3vl))
    assert all(hasattr(mcore_qwen3vl, name) for name in mcore_qwen3vl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        mcore_qwen3vl.absent  # noqa: B018
    for name in mcore_qwen3vl.__all__:  # no package takes the place of a function
        assert find_spec(f"mcore_qwen3vl.{name}") is None


@pytest.mark.slow  # half a minute of imports
def test_a_program_may_call_the_functions_in_any_order(dense, tmp_path):
    """Importing all of them imports no megatron; the model is the last that is called."""
    hf_to_mcore(dense, tmp_path / "mcore")
    (tmp_path / "data.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    program = (
        "import sys\n"
        "from mcore_qwen3vl import *\n"
        "assert not [name for name in sys.modules if name.startswith('megatron')]\n"
        f"assert verify({str(dense)!r}, layout=Layout(tp=2, sp=True), batches=['text']).equal\n"
        "processor = load_processor('mcore')\n"
        "assert score('mcore', 'data.jsonl', 'before.jsonl').scored == 1\n"
        "model = load_model('mcore')\n"
        "assert score('mcore', 'data.jsonl', 'behind.jsonl').scored == 1\n"
        f"assert convert({str(dense)!r}, 'again').equal\n"
        "save_model(model, 'saved')\n"
        f"print(verify('saved', {str(dense)!r}).equal)"
    )
    assert run(program, tmp_path) == "True\n"
    before, behind = ((tmp_path / f"{n}.jsonl").read_text() for n in ("before", "behind"))
    assert before == behind


def test_a_processor_of_a_converted_checkpoint_is_the_sources(dense, tmp_path):
    hf_to_mcore(dense, tmp_path / "mcore")
    for checkpoint in (tmp_path / "mcore", tmp_path / "mcore" / "release"):
        vocabulary = load_processor(checkpoint).tokenizer.get_vocab()
        assert vocabulary == load_processor(dense).tokenizer.get_vocab()


def _batches_of_records(checkpoint):
    from PIL import Image

    model, processor = load_model(checkpoint), load_processor(checkpoint)
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
    turns = [
        {"role": "user", "content": "<image>What is it?"},
        {"role": "assistant", "content": "Red.", "weight": 0.5},
    ]
    image = Image.new("RGB", (64, 40), "red")
    tools = [{"type": "function", "function": {"name": "paint", "parameters": {}}}]
    record = {"messages": turns, "images": [image]}
    plain, told = (
        prepare_batch(model, processor, [r]) for r in (record, {**record, "tools": tools})
    )
    alone = prepare_batch(model, processor, [[{**turns[0], "content": "Hello."}, turns[1]]])
    return (
        [set(batch.loss_weights.unique().tolist()) for batch in (plain, told, alone)],
        processor.tokenizer.decode(told.input_ids[0]),
        plain.visual.pixel_values.equal(told.visual.pixel_values),
        alone.visual,
    )


def test_a_record_has_tools_images_and_weights(dense):
    ((weights, text, same_pixels, no_pixels),) = run_layout(_batches_of_records, 1, dense)
    assert weights == [{0.0, 0.5}] * 3
    assert "paint" in text.partition("What is it?")[0]
    assert same_pixels
    assert no_pixels is None


def _answers(checkpoint):
    from PIL import Image

    model, processor = load_model(checkpoint), load_processor(checkpoint)
    image = Image.new("RGB", (64, 40), "red")
    messages = [{"role": "user", "content": [{"type": "image", "image": image}]}]
    record = {"messages": [{"role": "user", "content": "<image>"}], "images": [image]}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": {}}}]
    asked = [messages, record, {**record, "tools": tools}]
    return generate(model, processor, asked, max_new_tokens=3, temperature=0)


def test_a_record_is_a_prompt(dense):
    ((plain, same, told),) = run_layout(_answers, 1, dense)
    assert same == plain
    assert told.prompt_tokens > plain.prompt_tokens


def test_reports_say_whether_source_and_target_are_equal(dense, tmp_path):
    report = convert(dense, tmp_path / "mcore")
    assert report.equal is True
    assert report.to_dict()["direction"] == "hf-to-mcore"
    assert report.to_dict()["comparison"]["ok"] is True
    half = convert(tmp_path / "mcore", tmp_path / "half", dtype="bf16")
    assert (half.equal, half.to_dict()["comparison"]) == (None, None)
    assert not verify(tmp_path / "half", dense).equal
    assert verify(tmp_path / "mcore").equal  # by the checksums of its conversion
    again = convert(dense, tmp_path / "v5", to="huggingface", compare=True)
    assert (again.equal, again.result.direction) == (True, "hf-to-hf")


def test_a_report_notices_one_different_bit(dense, tmp_path, monkeypatch):
    """The target is read again: what was written counts, not what was to be."""
    from mcore_qwen3vl import api

    def damaged(src, dst):
        result = hf_to_mcore(src, dst)
        file = next((tmp_path / "mcore" / "release").glob("*.distcp"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        return result

    key = next(k for k in api._DIRECTIONS if k[1] == "megatron")
    monkeypatch.setitem(api._DIRECTIONS, key, (damaged, set()))
    assert convert(dense, tmp_path / "mcore").equal is False


def _refusals(checkpoint, folder):
    model, processor = load_model(checkpoint), load_processor(checkpoint)
    message = {"role": "user", "content": "a"}
    for call, said in {
        lambda: load_model(3): "checkpoint is int: pass the path of a directory",
        lambda: load_model(folder / "absent"): "absent is not a directory",
        lambda: load_model(checkpoint, "tp2"): r"layout is 'tp2': pass a Layout",
        lambda: load_model(checkpoint, Layout(pp=2, vpp=2)): "virtual stages",
        lambda: load_model(checkpoint, Layout(tp=7)): "7",
        lambda: load_model(checkpoint, dtype="bf16"): "dtype is 'bf16': pass one of torch",
        lambda: load_model(checkpoint, device="tpu"): "device is 'tpu': pass cpu or cuda",
        lambda: load_model(checkpoint, device="cuda"): "runs on the CPU, as it was told before",
        lambda: load_model(checkpoint, hidden_drop=1): "hidden_drop is neither an argument",
        lambda: load_model(checkpoint, params_dtype=1): "pass it as dtype=",
        lambda: load_model(checkpoint, sequence_parallel=True): "one of the layout's sizes",
        lambda: load_processor(folder): "processor",
        lambda: prepare_batch(checkpoint, processor, []): "model is .*Path: pass what load_model",
        lambda: prepare_batch(model, processor, {"messages": []}): "records is dict: pass a list",
        lambda: prepare_batch(model, processor, [3]): "Record 0 cannot be used",
        lambda: prepare_batch(model, processor, [{"text": 3}]): "Record 0 cannot be used",
        lambda: reduce_gradients([model], 1): "model is list: pass what load_model returned",
        lambda: save_model(processor, folder / "out"): "pass what load_model returned",
        lambda: save_model(model, 3): "out is int",
        lambda: generate(model, processor, [message]): "a list of lists of messages",
        lambda: generate(model, processor, "a"): "a list of lists of messages",
        lambda: generate(model, processor, [[message]], temperature=-1): "temperature",
        lambda: convert(checkpoint, folder / "out", to="mcore"): "to is 'mcore': pass megatron or",
        lambda: convert(checkpoint, folder / "out", shard=1): "shard is no option of a conversion",
        lambda: convert(
            checkpoint, folder / "out", dtype="bf16", compare=True
        ): "leave compare out",
        lambda: score(checkpoint, folder / "absent.jsonl"): "absent.jsonl",
        lambda: score(checkpoint, folder, topk=2): "topk is no option of score, which has",
        lambda: verify(checkpoint, batches=["text"]): "batches is for comparing what models",
        lambda: verify(checkpoint, layout=Layout(tp=2)): "call it in a process without load_model",
        lambda: verify(checkpoint, layout=Layout(), batch=1): "batch is no option of verify",
    }.items():
        with pytest.raises(BadInput, match=said):
            call()
    assert not (folder / "out").exists()


def test_what_cannot_be_used_is_one_sentence(dense, tmp_path):
    run_layout(_refusals, 1, dense, tmp_path)


def _on_two_ranks(checkpoint, folder):
    load_model(checkpoint, Layout(tp=2))
    for call, said in {
        lambda: convert(checkpoint, folder / "out"): "convert works in one process, and this is",
        lambda: verify(checkpoint): "verify works in one process, and this is one of 2 ranks",
        lambda: load_model(checkpoint, Layout(pp=2)): "pp2 is not that of this process, tp2",
    }.items():
        with pytest.raises(BadInput, match=said):
            call()


def test_what_needs_one_process_is_refused_on_two_ranks(dense, tmp_path):
    run_layout(_on_two_ranks, 2, dense, tmp_path)


def test_what_a_converted_checkpoint_computes_needs_its_source_to_compare_with(dense, tmp_path):
    hf_to_mcore(dense, tmp_path / "mcore")
    with pytest.raises(BadInput, match="name the Hugging Face one whose model computes the same"):
        verify(tmp_path / "mcore", layout=Layout())


def test_a_program_that_imports_megatron_first_is_told_so(dense):
    program = (
        "import os, megatron.core.parallel_state\n"
        "from mcore_qwen3vl import load_model\n"
        "from mcore_qwen3vl.errors import BadInput\n"
        f"try: load_model({str(dense)!r}, device='cpu')\n"
        "except BadInput as error: print(error)"
    )
    assert "must be installed before megatron is imported" in run(program)


def test_under_torchrun_a_conversion_is_not_made_by_every_rank(dense, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="one of 2 ranks"):
        convert(dense, tmp_path / "out")
