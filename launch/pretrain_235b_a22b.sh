#!/usr/bin/env bash
#SBATCH --nodes=32 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-235B-A22B, continued pretraining at 8k packed: 32 nodes of 8xH100-80GB.
#
# Layout: as for fine-tuning, but without CP, and with eight data-parallel ranks and 64 micro-batches
# per pipeline.
# Memory of a GPU (middle stages (as 1), 2 virtual), rehearsed with the torch spec: 41.5 GB reserved
# of 77.4, 41.0 held (weights 8.3, gradients 16.7, optimizer 12.1, logits and loss 0.0, the rest 3.9).
# A rank waits 7.9% of an iteration for others (modelled).
#
# EP_OVERLAP=1 hides the exchange, which no recomputed decoder layer allows. CP 8 in place of TP 4 and
# DP 8, and four virtual stages, make room for their activations: 250 TFLOP/s a GPU in place of 198,
# and 18 % of the busiest ranks' time in exchanges and waiting in place of 31 %, if a launch takes the host
# 8 us (modelled, docs/measurements/layouts.md; rehearse assumes 35 us, with which the host may be the
# limit); 66.4 GB reserved. Beside the vision tower the first rank has seven layers only, so that the
# tower need not be recomputed. DeepStack's features travel to the second stage, which holds the first layers.
NODES=${NODES:-${SLURM_NNODES:-32}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

SPLIT="Ettt|(t*7|)*4(t*6|)*3t*5|(t*6|)*6ttttL"
SCHEDULE=("${FULL_RECOMPUTE[@]}" --tensor-model-parallel-size 4 --sequence-parallel)
if [[ ${EP_OVERLAP:-0} == 1 ]]; then
    SPLIT="E|(t*3|)*7tt|(t*3|)*15tt|(t*4|)*4(t*3|)*2ttL"
    SCHEDULE=(--context-parallel-size 8 --overlap-moe-expert-parallel-comm)
fi

train "${PRETRAIN[@]}" "${MOE[@]}" "${SCHEDULE[@]}" \
    --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "$SPLIT" \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 512 \
    "${OPTIONAL[@]}" "$@"
