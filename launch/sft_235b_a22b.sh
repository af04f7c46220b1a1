#!/usr/bin/env bash
#SBATCH --nodes=16 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-235B-A22B, full fine-tuning at 8k packed: sixteen nodes of 8xH100-80GB.
#
# Layout: TP 4 is the most that its four key/value heads allow. With CP 2, TP x CP fills a node, and EP 8
# divides the experts over it. This leaves two data-parallel ranks, so each pipeline has 32
# micro-batches. PP 8 has two virtual stages per rank, split by counted work: the tower is as much work
# as four layers, and the head as two. The tower's stage keeps the three layers that DeepStack adds
# to, so only hidden states travel between stages.
# Memory of a GPU (middle stages (as 1), 2 virtual), rehearsed with the torch spec: 51.9 GB reserved
# of 76.9, 51.4 held (weights 8.3, gradients 16.7, optimizer 24.3, logits and loss 0.0, the rest 2.2).
# A rank waits 12.0% of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-16}}
MOE_MODEL=1
SPLIT="Ettt|(t*7|)*4(t*6|)*3t*5|(t*6|)*6ttttL"
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --context-parallel-size 2 \
    --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "$SPLIT" \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
