#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-32B, full fine-tuning at 8k packed: four nodes of 8xH100-80GB.
#
# Layout: TP 4 with SP exchanges half as much as TP 8, and PP 2 makes room for it: a step is modelled
# 10 % shorter than with TP 8 alone. The tower's stage has two layers less than the other.
# Memory of a GPU (first stage), rehearsed with the torch spec: 69.8 GB reserved of 81.1, 67.5 held
# (weights 9.1, gradients 18.3, optimizer 13.7, logits and loss 0.0, the rest 26.4). A rank waits 7.6%
# of an iteration for others (modelled).
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
