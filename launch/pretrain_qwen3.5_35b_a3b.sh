#!/usr/bin/env bash
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-35B-A3B, continued pretraining at 8k packed: eight nodes of 8xH100-80GB.
#
# Layout: EP 8 keeps the tokens' exchange inside a node. 32 data-parallel ranks divide the optimizer
# states so far that TP 2 with SP makes room for the activations of all decoder layers; only the
# tower's blocks are recomputed. Other layouts were not rehearsed.
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU, rehearsed with the torch spec: 62.5 GB reserved of 77.4, 61.6 held (weights 11.4,
# gradients 22.8, optimizer 6.7, logits and loss 0.0, the rest 20.6).
NODES=${NODES:-${SLURM_NNODES:-8}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" "${MOE[@]}" \
    --recompute-vision \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 512 \
    "${OPTIONAL[@]}" "$@"
