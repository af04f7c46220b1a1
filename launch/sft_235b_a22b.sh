#!/usr/bin/env bash
#SBATCH --nodes=16 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-235B-A22B, full fine-tuning at 8k packed: sixteen nodes of 8xH100-80GB.
#
# Layout: TP 4 is the most that its four key/value heads allow. EP 8 spans two TP groups, one node. PP 8
# cuts the 94 layers into 11 + 6 x 12 + 11: the ends carry tower, embedding and head. Each pipeline
# works on 16 micro-batches.
# Memory of a GPU (first stage), rehearsed with the torch spec: 58.1 GB reserved of 79.0, 54.6 held
# (weights 8.5, gradients 17.0, optimizer 22.7, logits and loss 0.0, the rest 6.3).
NODES=16
MOE_MODEL=1
source "${LAUNCH_DIR:-$(dirname "${BASH_SOURCE[0]}")}/common.sh"

train "${SFT[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --pipeline-model-parallel-size 8 \
    --decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11 \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
