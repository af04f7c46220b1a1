#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-8B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: frozen weights have no gradients and no optimizer states, so the model fits one GPU and all
# eight are data parallel: a step is modelled 10 % shorter than with TP 2. For longer packs, append
# --tensor-model-parallel-size 2 --sequence-parallel, which halves the activations.
# --keep-activations recomputes nothing: a step is modelled 4 % shorter. On a GPU with less memory, append
# --no-keep-activations: 45.9 GB reserved.
# Memory of a GPU, rehearsed with the torch spec: 61.8 GB reserved of 81.6, 60.1 held (weights 17.6,
# gradients 0.2, optimizer 0.1, logits and loss 0.7, the rest 41.6).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" \
    --keep-activations \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
