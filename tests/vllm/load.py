"""A program that loads tensors into vLLM's own model on the CPU, by vLLM's own loader.

    python load.py CHECKPOINT TENSORS RESULT [TENSORS RESULT]...

It builds the model of CHECKPOINT. For each pair of files, it fills the model's parameters with
NaN, gives it the tensors of the file TENSORS one by one, and writes its parameters to RESULT.
"""

from __future__ import annotations

import sys


def main(checkpoint: str, *files: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(checkpoint, dtype="float32", enforce_eager=True, max_model_len=512)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        store = f"file://{files[1]}.store"
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel(1)
        model = initialize_model(config)
        for tensors, result in zip(files[::2], files[1::2], strict=True):
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
            with safe_open(tensors, "pt") as file:
                names = file.keys()
                model.load_weights((name, file.get_tensor(name)) for name in names)
            save_file({n: p.data.contiguous() for n, p in model.named_parameters()}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
