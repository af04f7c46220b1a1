#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-30B-A3B, full fine-tuning at 8k packed: two nodes of 8xH100-80GB.
#
# Layout: EP 8 keeps the exchange of tokens inside a node. TP 2 with SP halves logits and vision work.
# Single experts are not split (ETP 1). Each token goes to eight experts, so activations are large: full
# recompute.
# Memory of a GPU, rehearsed with the torch spec: 58.1 GB reserved of 79.7, 57.1 held (weights 9.9,
# gradients 19.8, optimizer 23.7, logits and loss 0.0, the rest 3.7).
NODES=${NODES:-${SLURM_NNODES:-2}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
