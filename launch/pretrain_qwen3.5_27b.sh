#!/usr/bin/env bash
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-27B, continued pretraining at 8k packed: eight nodes of 8xH100-80GB.
#
# Layout: as for fine-tuning. Twice as many data-parallel ranks divide the optimizer states further,
# so that the tower's blocks are kept. Of five layouts that rehearse --fit compared, it is the fastest
# that leaves 5 % of the GPU (docs/measurements/layouts.md).
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU (first stage), rehearsed with the torch spec: 63.0 GB reserved of 80.7, 61.0 held
# (weights 14.0, gradients 28.0, optimizer 5.2, logits and loss 0.0, the rest 13.8). A rank waits 5.0%
# of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-8}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4 \
    --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 31 \
    --global-batch-size 256 \
    "${OPTIONAL[@]}" "$@"
