#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-4B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: frozen weights have no gradients and no optimizer states, so the model fits one GPU and all
# eight are data parallel.
# Memory of a GPU, rehearsed with the torch spec: 32.4 GB reserved of 83.6, 31.0 held (weights 8.9,
# gradients 0.1, optimizer 0.0, logits and loss 0.8, the rest 21.0).
NODES=1
source "${LAUNCH_DIR:-$(dirname "${BASH_SOURCE[0]}")}/common.sh"

train "${LORA[@]}" \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
