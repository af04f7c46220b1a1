#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-9B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: frozen weights have no gradients and no optimizer states, so the model fits one GPU and all
# eight are data parallel, which rehearse --fit found faster than CP 2 and CP 4 (docs/measurements/layouts.md).
# For longer packs, append --tensor-model-parallel-size 2 --sequence-parallel, which halves the
# activations.
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU, rehearsed with the torch spec: 51.7 GB reserved of 81.6, 50.7 held (weights 18.9,
# gradients 0.2, optimizer 0.1, logits and loss 0.0, the rest 31.5).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
