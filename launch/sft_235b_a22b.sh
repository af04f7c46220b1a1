#!/usr/bin/env bash
#SBATCH --nodes=16 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-235B-A22B, full fine-tuning at 8k packed: sixteen nodes of 8xH100-80GB.
#
# Layout: TP 4 is the most that its four key/value heads allow. EP 8 spans two TP groups, one node. PP 8
# cuts the 94 layers into 6 + 6 x 14 + 4, in two virtual stages each: the ends carry tower, embedding and
# head. Each pipeline works on 16 micro-batches.
# Memory of a GPU (middle stages (as 1), 2 virtual), rehearsed with the torch spec: 59.8 GB reserved
# of 79.0, 57.1 held (weights 9.0, gradients 17.9, optimizer 26.1, logits and loss 0.0, the rest 4.0).
NODES=16
MOE_MODEL=1
source "${LAUNCH_DIR:-$(dirname "${BASH_SOURCE[0]}")}/common.sh"

train "${SFT[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --pipeline-model-parallel-size 8 \
    --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 4 \
    --num-virtual-stages-per-pipeline-rank 2 \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
