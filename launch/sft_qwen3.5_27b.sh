#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-27B, full fine-tuning at 8k packed: four nodes of 8xH100-80GB.
#
# Layout: chosen with rehearse --fit (docs/measurements/layouts.md has those that lost). TP 2 with CP 4 fills a
# node: TP exchanges a third of what it does in TP 4, and a step is modelled 2 % shorter. PP 2 makes
# room for it. The tower's blocks are recomputed; kept, they leave 14 % of the GPU. The tower's stage
# has two layers less than the other.
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU (first stage), rehearsed with the torch spec: 66.0 GB reserved of 80.7, 64.0 held
# (weights 14.0, gradients 28.0, optimizer 10.5, logits and loss 0.0, the rest 11.6). A rank waits
# 5.3% of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-4}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --recompute-vision \
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4 \
    --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 31 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
