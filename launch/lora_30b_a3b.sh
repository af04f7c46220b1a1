#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-30B-A3B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: EP 8 divides the experts over the node, TP 2 with SP the rest. Frozen weights leave room for
# all activations: no recompute.
# Memory of a GPU, rehearsed with the torch spec: 30.5 GB reserved of 77.4, 29.5 held (weights 10.1,
# gradients 0.4, optimizer 1.0, logits and loss 0.6, the rest 17.5).
NODES=${NODES:-${SLURM_NNODES:-1}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" "${MOE[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
