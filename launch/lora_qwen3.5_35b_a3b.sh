#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3.5-35B-A3B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: EP 8 divides the experts over the node. The other weights fit on each GPU, so that all eight
# are data parallel and TP cuts nothing. Frozen weights leave room for all activations: no recompute.
# Other layouts were not rehearsed.
# On GPUs Qwen3.5 needs flash-linear-attention: install mcore-qwen3vl[fla].
# Memory of a GPU, rehearsed with the torch spec: 57.5 GB reserved of 77.4, 56.6 held (weights 14.1,
# gradients 0.5, optimizer 1.4, logits and loss 0.0, the rest 40.5).
NODES=${NODES:-${SLURM_NNODES:-1}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" "${MOE[@]}" \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
