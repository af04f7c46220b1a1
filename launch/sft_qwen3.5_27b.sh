#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3.5-27B, full fine-tuning at 8k packed: four nodes of 8xH100-80GB.
#
# Layout: as for Qwen3-VL-32B, TP 4 with SP exchanges half as much as TP 8, and PP 2 makes room for
# it: TP 4 alone is estimated to hold 78 GB. The tower's stage has two layers less than the other.
# Other layouts were not rehearsed. FP8=1 is refused: TP 4 leaves 4,120 rows of a delta net's input
# projection to a rank, no multiple of 16.
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# The te spec, which is the default here, was not rehearsed.
# Memory of a GPU (first stage), rehearsed with the torch spec: 61.6 GB reserved of 81.1, 59.0 held
# (weights 7.5, gradients 14.9, optimizer 11.2, logits and loss 0.0, the rest 25.4). A rank waits
# 10.1% of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-4}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 31 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
