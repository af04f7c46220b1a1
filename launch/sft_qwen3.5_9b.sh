#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-9B, full fine-tuning at 8k packed: one node of 8xH100-80GB.
#
# Layout: TP 2 with SP, because without TP weights, gradients and optimizer states alone are 74 GB.
# It is the fastest of six layouts that rehearse --fit compared (docs/measurements/layouts.md). The tower's blocks
# are recomputed; kept, they would hold 4.5 GB more (estimated).
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU, rehearsed with the torch spec: 64.2 GB reserved of 81.1, 62.5 held (weights 9.9,
# gradients 19.7, optimizer 14.8, logits and loss 2.2, the rest 15.9).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --recompute-vision \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
