#!/usr/bin/env bash
#SBATCH --nodes=128 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.8-2.4T-A95B, a language model alone, full fine-tuning at 8k packed: 128 nodes of 8xH100-80GB.
#
# Layout: EP 64 leaves each GPU eight experts of a layer. TP 4 is the most that the four key/value heads
# allow, and PP 16 divides the layers: three fewer on the last stage, which has the head, and one fewer on
# the first. Experts have one data-parallel rank, so their optimizer states are not divided. All layers
# are recomputed. The model's shape is partly derived (mcore_qwen3vl/published_configs), and other
# layouts were not rehearsed.
# On GPUs Qwen3.8 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU (middle stages (as 1)), rehearsed with the torch spec: 55.8 GB reserved of 77.4,
# 54.6 held (weights 6.3, gradients 12.7, optimizer 29.6, logits and loss 0.0, the rest 6.1). A rank
# waits 20.4% of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-128}}
MOE_MODEL=1
SPLIT="Et*5|(t*6|)*14tttL"
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

# There is no vision tower, whose learning rate the other scripts lower.
train --train-iters 2000 --lr 1e-5 --min-lr 1e-6 "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout "$SPLIT" \
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 \
    --global-batch-size 1024 \
    "${OPTIONAL[@]}" "$@"
