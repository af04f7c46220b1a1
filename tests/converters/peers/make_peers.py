"""A script that lets other projects' own converters write the checkpoints of this folder.

Megatron-Bridge's `AutoBridge`, ms-swift's `megatron export` and VERL's Megatron engine with its
checkpoint manager run unchanged, on the CPU with gloo. Only Transformer Engine's compiled
extension, on which conversion does not depend, is replaced (:mod:`tests.model.te.device`), and
:mod:`mcore_qwen3vl.runtime.verl_cpu` answers when VERL asks for a device. The checkpoints were made
with torch 2.13, megatron-core 0.19.2, megatron-bridge 0.6.2, mcore-bridge 1.6.5, ms-swift 4.6.0,
verl 0.9.1 and transformer-engine 2.20.2, which were installed with ``--no-deps`` beside this
project, together with what they import (nvidia-modelopt, hydra-core, omegaconf, modelscope,
qwen-vl-utils and smaller packages). VERL ran with transformers 5.10.4, in the environment of
``make test-verl`` with Megatron-Bridge and Transformer Engine; its own package ``tests``, which
hides ours, was deleted there. Qwen3.5's (``hybrid``) were made with transformers 5.12.1. In an
empty folder::

    peers="-m tests.converters.peers.make_peers"
    for model in dense moe hybrid hybrid_moe; do python $peers hf hf-$model $model; done
    two="torchrun --nproc-per-node 2 $peers"
    $two megatron-bridge hf-dense megatron-bridge-dense tensor_model_parallel_size=2
    $two megatron-bridge hf-moe megatron-bridge-moe expert_model_parallel_size=2
    $two ms-swift $PWD/hf-dense ms-swift-dense tensor_model_parallel_size=2
    $two ms-swift $PWD/hf-moe ms-swift-moe expert_model_parallel_size=2
    $two megatron-bridge hf-hybrid megatron-bridge-hybrid tensor_model_parallel_size=2
    mtp=mtp_num_layers=1
    $two ms-swift $PWD/hf-hybrid ms-swift-hybrid tensor_model_parallel_size=2 $mtp
    $two ms-swift $PWD/hf-hybrid_moe ms-swift-hybrid_moe expert_model_parallel_size=2 $mtp
    export VERL_USE_EXTERNAL_MODULES=mcore_qwen3vl.runtime.verl_cpu
    weights="--written megatron-bridge-dense/iter_0000000"
    $two verl hf-dense verl-dense $weights tensor_model_parallel_size=2

Pai-Megatron-Patch's ``distributed_checkpoints_convertor`` ran in an environment of its own: a
checkout of Pai-Megatron-Patch at commit a098ca5 with the Megatron-LM that it names for Qwen3-VL, at
commit 6a6cd47, torch 2.13, transformers 4.57.6, numpy 1.26, accelerate, and transformer-engine
2.20.2 (``--no-deps``). Megatron-LM's package ``tests`` was deleted. The checkouts of
Pai-Megatron-Patch (PAI) and Megatron-LM (MEGATRON) come after this one (OURS) on the path. Besides
CUDA and Transformer Engine's extension, two things were replaced: the process to collect results
while Megatron saves, which is forked here, and the sizes of the vision tower, because
Pai-Megatron-Patch knows them for the published models only::

    export PYTHONPATH=$OURS:$PAI:$MEGATRON:$PAI/toolkits/distributed_checkpoints_convertor/impl
    $two pai-megatron-patch hf-dense pai-megatron-patch-dense tensor_model_parallel_size=2
    $two pai-megatron-patch hf-moe pai-megatron-patch-moe expert_model_parallel_size=2

Of each, the iteration's tensors and metadata are kept, and the tracker; of Hugging Face's, the
config and the weights; of VERL's, which has no tracker, ``ckpt_contents.json``, the tensors and
metadata of the model, and its config.

Megatron-Bridge's `pretrain` and ms-swift's `megatron sft` were run for two steps of training, and
export to Hugging Face at the same time. They ran with transformers 5.12.1, datasets 4.8.4, peft
0.20 and nvidia-resiliency-ext 0.7.0. Besides the extension, these are replaced: Megatron-Bridge's
refusal to start without CUDA, its compiled index for text, its smallest picture, and ms-swift's
fixed number of the image token, which a small vocabulary does not have::

    python $peers hf hf-small small
    for maker in megatron-bridge ms-swift; do
        $two $maker-trained hf-small $maker-trained tensor_model_parallel_size=2
    done

Of each, an archive has the tensors and metadata of the iteration, the trackers, the states of
training beside them, and the config and weights of the export; `run_config.yaml` and `args.json`
are left out. Dense and MoE models as above were compared in the same way, and are not kept.

Checkpoints that we write in their dialects go the other way: their own loaders read one, strictly
and under another layout, and their own functions write it again, to be compared with the source::

    mcore-qwen3vl convert hf-to-mcore hf-dense ours --dialect megatron-bridge  # or ms-swift
    $two megatron-bridge hf-dense again --written ours tensor_model_parallel_size=2
    mcore-qwen3vl verify tensors again hf-dense
"""

from __future__ import annotations

import json
import multiprocessing
import runpy
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import read_config_file
from tests.converters.checkpoints import load, save

HERE = Path(__file__).parent
TEXT: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 20,
    "intermediate_size": 36,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
}
MOE = {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [1, 3],
    "depth": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "num_position_embeddings": 16,
}


HYBRID: dict[str, Any] = {
    "full_attention_interval": 2,
    "hidden_size": 20,
    "intermediate_size": 36,
    "linear_key_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 6,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}
HYBRID_MOE = {**MOE, "shared_expert_intermediate_size": 8}


SMALL: tuple[dict[str, Any], dict[str, Any]] = (
    {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12},
    {"depth": 1, "deepstack_visual_indexes": [0], "hidden_size": 8, "intermediate_size": 8},
)


def write_hf(path: Path, model: str, *, dtype: str = "bfloat16", seed: int = 27) -> None:
    from mcore_qwen3vl.tiny.tiny_checkpoint import FamilyName, write_tiny_checkpoint

    moe, hybrid = model.endswith("moe"), model.startswith("hybrid")
    usual, experts = (HYBRID, HYBRID_MOE) if hybrid else (TEXT, MOE)
    text, vision = SMALL if model == "small" else ({}, {})
    text, vision = usual | (experts if moe else {}) | text, VISION | vision
    if hybrid:
        vision["deepstack_visual_indexes"] = []
    family: FamilyName = "qwen3.5" if hybrid else "qwen3-vl"
    write_tiny_checkpoint(
        path, family=family, moe=moe, dtype=dtype, seed=seed, text=text, vision=vision
    )
    if (
        moe and hybrid and dtype == "bfloat16"
    ):  # as transformers saves a model in bf16; the dense one is as published
        save({name: tensor.bfloat16() for name, tensor in load(path).items()}, path)


def set_up() -> None:
    """Make Megatron and Transformer Engine run here; nothing of theirs may be imported before."""
    from tests.model.te import extension

    extension.install()
    from mcore_qwen3vl.runtime import cpu

    cpu.install()
    from tests.model.te import device

    device.install()
    import torch
    from megatron.core.ssm.gated_delta_net import common, gdn

    # flash-linear-attention, whose kernels no conversion calls
    common.HAVE_FLA, gdn.chunk_gated_delta_rule = True, object()
    torch.distributed.init_process_group("gloo")


def set_up_of_2025() -> None:
    """Do what `set_up` does for the Megatron-LM of June 2025, to which other names belong."""
    from tests.model.te import extension

    extension.install()
    import torch

    from mcore_qwen3vl.runtime import cpu

    import_module("torch.utils._device")._device_constructors()
    cpu.apply((*cpu.TORCH_REPLACEMENTS, *cpu.DEVICE_REPLACEMENTS))
    from tests.model.te import device

    device.install()
    cpu.apply(cpu.TRAINING_REPLACEMENTS)
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import initialize, training

    initialize.initialize_megatron = training.initialize_megatron
    results = multiprocessing.get_context("fork").Manager().Queue()
    filesystem_async._get_write_results_queue = lambda: results
    torch.distributed.init_process_group("gloo")


def megatron_bridge(source: Path, target: Path, written: Path | None, **layout: int) -> None:
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint

    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider()
    for name, size in {**layout, "gradient_accumulation_fusion": False}.items():
        setattr(provider, name, size)
    provider.finalize()
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    if written is not None:
        for parameter in (p for model in models for p in model.parameters()):
            parameter.data.fill_(torch.nan)
        folder = str(written / "release")
        _load_model_weights_from_checkpoint(folder, models, dist_ckpt_strictness="raise_all")
    bridge.save_megatron_model(models, target)


def train_megatron_bridge(source: Path, target: Path, written: Path | None, **layout: int) -> None:
    """Train two steps on pictures of noise; each save has a Hugging Face export too."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.data.builders import MockVLMSFTDatasetConfig
    from megatron.bridge.models.qwen_vl.data.collate_fn import qwen2_5_collate_fn
    from megatron.bridge.models.qwen_vl.qwen3_vl_step import forward_step
    from megatron.bridge.recipes.common import _sft_common_vlm
    from megatron.bridge.training import initialize, setup
    from megatron.bridge.training.pretrain import pretrain

    # Its smallest picture has 3,136 tokens here: the processor's own limits hold.
    qwen2_5_collate_fn.__defaults__ = (None, None, *qwen2_5_collate_fn.__defaults__[2:])
    # It refuses to start without CUDA, and compiles an index of text data, which are not used.
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    torch.cuda.device_count = lambda: 1
    initialize.compile_helpers = lambda: None
    cfg = _sft_common_vlm()
    cfg.model = AutoBridge.from_hf_pretrained(source).to_megatron_provider()
    trained = {
        f"freeze_{p}": False for p in ("language_model", "vision_model", "vision_projection")
    }
    for name, value in {**layout, **trained, "gradient_accumulation_fusion": False}.items():
        setattr(cfg.model, name, value)
    cfg.model.seq_length = 128
    cfg.dataset = MockVLMSFTDatasetConfig(
        seq_length=128, hf_processor_path=str(source), image_size=(64, 64), num_workers=0
    )
    cfg.tokenizer.vocab_size = cfg.model.vocab_size - 1
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 2, 2, 1
    cfg.validation.eval_iters = 0
    cfg.optimizer.lr, cfg.optimizer.min_lr = 1e-2, 1e-3
    cfg.scheduler.lr_warmup_iters, cfg.scheduler.lr_decay_iters = 0, 2
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
    cfg.checkpoint.save, cfg.checkpoint.load, cfg.checkpoint.save_interval = str(target), None, 2
    cfg.checkpoint.also_save_hf_checkpoint, cfg.checkpoint.hf_source_path = True, str(source)
    pretrain(cfg, forward_step)


def train_ms_swift(source: Path, target: Path, written: Path | None, **options: Any) -> None:
    """Train two steps on pictures; each save has a Hugging Face export too."""
    import torch

    data = target.parent / "data"
    if torch.distributed.get_rank() == 0:
        write_pictures(data)
    torch.distributed.barrier()
    torch.jit.script = lambda function, *_, **__: function  # as in `ms_swift`
    from swift.megatron import megatron_sft_main
    from swift.template.templates.qwen import Qwen3VLTemplate

    # It writes the published number of this token, which a small vocabulary does not have.
    Qwen3VLTemplate.image_token_id = read_config_file(source)["image_token_id"]
    given = {"model": source, "model_type": "qwen3_vl", "dataset": data / "train.jsonl"}
    given |= {"output_dir": target, "add_version": "false", "ddp_backend": "gloo"}
    given |= {"torch_dtype": "bfloat16", "attention_backend": "auto", "max_length": 256}
    given |= {"freeze_vit": "false", "freeze_aligner": "false", "check_model": "false"}
    given |= {"train_iters": 2, "save_steps": 2, "global_batch_size": 2, "lr": 1e-2}
    given |= {"split_dataset_ratio": 0, "dataloader_num_workers": 0, **options}
    megatron_sft_main([part for k, v in given.items() for part in (f"--{k}", str(v))])


def write_pictures(folder: Path) -> None:
    from PIL import Image

    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(4):
        Image.effect_noise((32, 32), 90).convert("RGB").save(picture := folder / f"{number}.png")
        said = (("user", "<image>What is this?"), ("assistant", f"It is number {number}."))
        messages = [{"role": role, "content": content} for role, content in said]
        lines.append(json.dumps({"messages": messages, "images": [str(picture)]}))
    (folder / "train.jsonl").write_text("\n".join(lines))


def ms_swift(source: Path, target: Path, written: Path | None, **layout: int) -> None:
    import torch

    # It compiles functions of torch that have stand-ins here.
    torch.jit.script = lambda function, *_, **__: function
    from swift.megatron import megatron_export_main

    model_type = read_config_file(source)["model_type"].replace("vl_moe", "vl")
    given = {"model": source, "model_type": model_type, "output_dir": target, **layout}
    if model_type.startswith("qwen3_5"):
        given["template"] = "qwen3_5"  # it has several for these models
    given |= {"to_mcore": "true"} if written is None else {"to_hf": "true", "mcore_model": written}
    given |= {"exist_ok": "true", "torch_dtype": "bfloat16"}
    megatron_export_main([part for k, v in given.items() for part in (f"--{k}", str(v))])


def verl(source: Path, target: Path, written: Path | None, **layout: int) -> None:
    from verl.workers import config
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    contents = ["model", "optimizer", "extra", "hf_model"]
    engine = MegatronEngineWithLMHead(
        model_config=config.HFModelConfig(path=str(source)),
        engine_config=config.McoreEngineConfig(
            use_dist_checkpointing=True, dist_checkpointing_path=str(written), **layout
        ),
        optimizer_config=config.McoreOptimizerConfig(
            lr=1e-6, lr_warmup_steps=0, total_training_steps=20
        ),
        checkpoint_config=config.McoreCheckpointConfig(save_contents=contents),
    )
    engine.initialize()
    engine.save_checkpoint(str(target), global_step=20)


def pai_megatron_patch(source: Path, target: Path, written: Path | None, **layout: int) -> None:
    from megatron_patch.model.qwen3_vl import transformer_config

    config = json.loads((source / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    published = transformer_config.get_vision_model_config

    def of_the_source(*args: Any) -> Any:
        made = published(*args)
        for name, value in vision.items():
            if hasattr(made, name):
                setattr(made, name, value)
        made.num_layers, made.ffn_hidden_size = vision["depth"], vision["intermediate_size"]
        made.num_attention_heads = made.num_query_groups = vision["num_heads"]
        made.kv_channels = made.hidden_size // made.num_attention_heads
        return made

    transformer_config.get_vision_model_config = of_the_source
    given = {
        "synchronizer": "qwen3_vl",
        "pretrain-script": "qwen3_vl.pretrain_qwen",
        "auto-model": "AutoModelForImageTextToText",
        "model-type": "GPT",
        "load-dir": source,
        "save-dir": target,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": text["vocab_size"] - 1,  # it adds an end of text
        "padded-vocab-size": text["vocab_size"],
        "num-layers": text["num_hidden_layers"],
        "hidden-size": text["hidden_size"],
        "ffn-hidden-size": text["intermediate_size"],
        "num-attention-heads": text["num_attention_heads"],
        "num-query-groups": text["num_key_value_heads"],
        "kv-channels": text["head_dim"],
        "position-embedding-type": "mrope",
        "normalization": "RMSNorm",
        "max-position-embeddings": text["max_position_embeddings"],
        "seq-length": 1,
        "micro-batch-size": 1,
        "train-iters": 1,
        "lr": 1e-5,
        **{name.replace("_", "-"): size for name, size in layout.items()},
    }
    flags = ["swiglu", "disable-bias-linear", "group-query-attention", "qk-layernorm", "bf16"]
    flags += ["debug", "no-load-optim", "no-load-rng", "no-gradient-accumulation-fusion"]
    if not config["tie_word_embeddings"]:
        flags.append("untie-embeddings-and-output-weights")
    if experts := text.get("num_experts"):
        given |= {"num-experts": experts, "moe-ffn-hidden-size": text["moe_intermediate_size"]}
        given |= {"moe-layer-freq": f"([1]*{text['num_hidden_layers']})"}
        given |= {"moe-token-dispatcher-type": "alltoall"}
        flags.append("moe-grouped-gemm")
    sections = ["--mrope-section", *map(str, text["rope_scaling"]["mrope_section"])]
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    sys.argv = ["convert.py", *words, *(f"--{flag}" for flag in flags), *sections]
    runpy.run_module("convert", run_name="__main__")


def main(maker: str, source: str, target: str, *sizes: str) -> None:
    set_up_of_2025() if maker == "pai-megatron-patch" else set_up()
    written = None
    if sizes[:1] == ("--written",):
        written, sizes = Path(sizes[1]), sizes[2:]
    options = dict(one.split("=") for one in sizes)
    options = {name: int(value) if value.isdigit() else value for name, value in options.items()}
    WRITE[maker](Path(source).absolute(), Path(target).absolute(), written, **options)


WRITE: dict[str, Callable[..., None]] = {
    "megatron-bridge": megatron_bridge,
    "megatron-bridge-trained": train_megatron_bridge,
    "ms-swift": ms_swift,
    "ms-swift-trained": train_ms_swift,
    "pai-megatron-patch": pai_megatron_patch,
    "verl": verl,
}


if __name__ == "__main__":
    if sys.argv[1] == "hf":
        write_hf(Path(sys.argv[2]), sys.argv[3])
    else:
        main(*sys.argv[1:])
