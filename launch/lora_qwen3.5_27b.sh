#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-27B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: TP 2 with CP 2 exchanges less than TP 4, and leaves room for the activations of all 64
# layers: no recompute. TP 2 alone is modelled 9 % faster and leaves 11 % of the GPU: docs/measurements/layouts.md
# has the layouts that rehearse --fit compared.
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU, rehearsed with the torch spec: 52.6 GB reserved of 80.7, 51.8 held (weights 28.0,
# gradients 0.3, optimizer 0.2, logits and loss 0.7, the rest 22.6).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
