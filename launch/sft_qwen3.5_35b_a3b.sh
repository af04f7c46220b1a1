#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-35B-A3B, full fine-tuning at 8k packed: two nodes of 8xH100-80GB.
#
# Layout: EP 8 keeps the tokens' exchange inside a node. TP 2 with SP halves logits and vision work;
# experts are not cut (ETP 1). Weights, gradients and optimizer states take 61 GB, so all layers are
# recomputed. Of those that rehearse --fit tried it is the fastest: docs/measurements/layouts.md.
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU, rehearsed with the torch spec: 64.9 GB reserved of 77.4, 64.4 held (weights 11.4,
# gradients 22.8, optimizer 26.7, logits and loss 0.0, the rest 3.4).
NODES=${NODES:-${SLURM_NNODES:-2}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
