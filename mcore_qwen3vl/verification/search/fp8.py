"""A model in FP8 as it is published, beside the values that its FP8 numbers mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_BLOCK = 128
_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.visual", "model.language_model.embed_tokens"],
    "quant_method": "fp8",
    "weight_block_size": [_BLOCK, _BLOCK],
}
_ENDS = ("_proj", "experts", "in_proj_qkv", "in_proj_z")


def write_fp8(model: Path | str, quantized: Path | str, values: Path | str) -> None:
    """Write a Hugging Face model in FP8, and a model with its values, which transformers loads."""
    from safetensors.torch import load_file, save_file

    model, quantized, values = Path(model), Path(quantized), Path(values)
    for folder in (quantized, values):
        shutil.copytree(model, folder)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        for file in folder.glob("*.safetensors"):
            file.unlink()
    for file in model.glob("*.safetensors"):
        stored: dict[str, Tensor] = {}
        meant: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            stored[name] = meant[name] = tensor
            if ".layers." in name and name.removesuffix(".weight").endswith(_ENDS):
                codes, factors = quantize(tensor)
                stored[name], stored[f"{name}_scale_inv"] = codes, factors
                meant[name] = (codes.float() * _repeat(factors, tensor)).to(tensor.dtype)
        save_file(stored, quantized / file.name, {"format": "pt"})
        save_file(meant, values / file.name, {"format": "pt"})
    config = json.loads((model / "config.json").read_text("utf-8"))
    text = json.dumps({**config, "quantization_config": _CONFIG}, indent=2)
    (quantized / "config.json").write_text(text, "utf-8")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight (..., M, N) in FP8, and a bfloat16 factor for each block of 128 x 128.

    The factor makes the block's largest value 448, the largest of FP8.
    """
    rows, columns = weight.shape[-2:]
    grid = weight.new_zeros(*weight.shape[:-2], -(-rows // _BLOCK), -(-columns // _BLOCK))
    for row in range(grid.shape[-2]):
        for column in range(grid.shape[-1]):
            block = weight[
                ...,
                row * _BLOCK : (row + 1) * _BLOCK,
                column * _BLOCK : (column + 1) * _BLOCK,
            ]
            grid[..., row, column] = block.abs().amax((-2, -1)) / torch.finfo(FP8).max
    factors = grid.bfloat16()
    return (weight.float() / _repeat(factors, weight)).to(FP8), factors


def _repeat(factors: Tensor, weight: Tensor) -> Tensor:
    """Return the factor of each value of a weight, (..., M, N) float32."""
    each = factors.float().repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)
    return each[..., : weight.shape[-2], : weight.shape[-1]]
