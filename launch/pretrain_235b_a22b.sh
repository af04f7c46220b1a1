#!/usr/bin/env bash
#SBATCH --nodes=32 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-235B-A22B, continued pretraining at 8k packed: 32 nodes of 8xH100-80GB.
#
# Layout: as for fine-tuning, without CP, with eight data-parallel ranks and 64 micro-batches a pipeline.
# Memory of a GPU (first stage), rehearsed with the torch spec: 47.6 GB reserved of 79.0, 43.2 held
# (weights 8.5, gradients 17.0, optimizer 11.4, logits and loss 0.0, the rest 6.3).
NODES=32
MOE_MODEL=1
SPLIT="Ettt|(t*7|)*4(t*6|)*10tttL"
source "${LAUNCH_DIR:-$(dirname "${BASH_SOURCE[0]}")}/common.sh"

train "${PRETRAIN[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "$SPLIT" \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 512 \
    "${OPTIONAL[@]}" "$@"
