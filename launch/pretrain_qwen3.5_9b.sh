#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-9B, continued pretraining at 8k packed: four nodes of 8xH100-80GB.
#
# Layout: as for fine-tuning. Sixteen data-parallel ranks divide the optimizer states further, so that
# the tower's blocks are kept. It is the fastest of four layouts that rehearse --fit compared
# (docs/measurements/layouts.md).
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU, rehearsed with the torch spec: 58.8 GB reserved of 81.1, 55.9 held (weights 9.9,
# gradients 19.7, optimizer 3.7, logits and loss 2.2, the rest 20.4).
NODES=${NODES:-${SLURM_NNODES:-4}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --global-batch-size 256 \
    "${OPTIONAL[@]}" "$@"
