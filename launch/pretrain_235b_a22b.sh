#!/usr/bin/env bash
#SBATCH --nodes=32 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-235B-A22B, continued pretraining at 8k packed: 32 nodes of 8xH100-80GB.
#
# Layout: as for fine-tuning, but without CP, and with eight data-parallel ranks and 64 micro-batches
# per pipeline.
# Memory of a GPU (first stage, 2 virtual), rehearsed with the torch spec: 42.7 GB reserved of 79.0,
# 41.3 held (weights 7.2, gradients 14.5, optimizer 9.5, logits and loss 0.0, the rest 10.1). A rank
# waits 7.5% of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-32}}
MOE_MODEL=1
SPLIT="Ettt|(t*7|)*4(t*6|)*10tttL"
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "$SPLIT" \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 512 \
    "${OPTIONAL[@]}" "$@"
