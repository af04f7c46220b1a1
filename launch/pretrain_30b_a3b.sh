#!/usr/bin/env bash
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-30B-A3B, continued pretraining at 8k packed: eight nodes of 8xH100-80GB.
#
# Layout: enough data-parallel ranks divide the optimizer states to do without TP, whose exchange is
# dear for layers this narrow. EP 8 stays inside a node. 36 of the 48 layers are recomputed; with 24,
# 4 % of the GPU are left, too little where a rank's experts get more tokens than others.
# Memory of a GPU, rehearsed with the torch spec: 63.5 GB reserved of 77.4, 57.3 held (weights 11.4,
# gradients 22.8, optimizer 5.8, logits and loss 2.6, the rest 14.7).
#
# EP_OVERLAP=1 hides the exchange, which no recomputed decoder layer allows. TP 2 and CP 2 make room for
# their activations, 47.9 GB reserved, and leave each kernel a part of the tokens: 261 TFLOP/s a GPU in place
# of 225 if a launch takes the host 8 us (modelled, docs/measurements/layouts.md). rehearse assumes 35 us,
# with which the host may be the limit. CP 2 alone runs out of memory where experts get unequal numbers of
# tokens.
NODES=${NODES:-${SLURM_NNODES:-8}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

SCHEDULE=("${FULL_RECOMPUTE[@]}" --recompute-method block --recompute-num-layers 36)
if [[ ${EP_OVERLAP:-0} == 1 ]]; then
    SCHEDULE=(
        --recompute-vision --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
        --overlap-moe-expert-parallel-comm
    )
fi

train "${PRETRAIN[@]}" "${MOE[@]}" "${SCHEDULE[@]}" \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 512 \
    "${OPTIONAL[@]}" "$@"
