"""Load tensors into vLLM's own model on the CPU, through its own loader; a process of its own.

    python load.py CHECKPOINT TENSORS RESULT

Builds the model of CHECKPOINT, fills its parameters with NaN, hands it the tensors of the file
TENSORS one by one, and writes its parameters to the file RESULT.
"""

from __future__ import annotations

import os
import sys


def main(checkpoint: str, tensors: str, result: str) -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # a wheel for CUDA, and no device

    from safetensors import safe_open
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(checkpoint, dtype="float32", enforce_eager=True, max_model_len=512)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        store = f"file://{result}.store"
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel(1)
        model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        with safe_open(tensors, "pt") as file:
            model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    save_file({n: p.data.contiguous() for n, p in model.named_parameters()}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
