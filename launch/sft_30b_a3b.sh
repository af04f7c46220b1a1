#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-30B-A3B, full fine-tuning at 8k packed: two nodes of 8xH100-80GB.
#
# Layout: EP 8 keeps the tokens' exchange inside a node. TP 2 with SP halves logits and vision work;
# experts are not cut (ETP 1). Each token visits eight experts, so activations are large: 32 of the 48
# layers are recomputed. All of them would take 7 % longer (modelled); 24 leave 11 % of the GPU, and
# none nothing, too little where a rank's experts get more tokens than others.
# Memory of a GPU, rehearsed with the torch spec: 64.0 GB reserved of 77.4, 63.2 held (weights 9.9,
# gradients 19.8, optimizer 23.7, logits and loss 0.6, the rest 9.2).
#
# EP_OVERLAP=1 hides the exchange, which no recomputed decoder layer allows. CP 2 makes room for their
# activations, 65.5 GB reserved, and leaves each kernel half of the tokens. With the 35 us of the host for
# a launch that rehearse assumes, the host is then the limit: it models a step of 6.0 s in place of 4.0 s.
# With 8 us it would be 3.1 s in place of 3.7 (docs/measurements/layouts.md). No GPU has run it.
NODES=${NODES:-${SLURM_NNODES:-2}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

SCHEDULE=("${FULL_RECOMPUTE[@]}" --recompute-method block --recompute-num-layers 32)
if [[ ${EP_OVERLAP:-0} == 1 ]]; then
    SCHEDULE=(--recompute-vision --context-parallel-size 2 --overlap-moe-expert-parallel-comm)
fi

train "${SFT[@]}" "${MOE[@]}" "${SCHEDULE[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
