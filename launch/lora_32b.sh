#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-32B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: TP 4 with SP fits without recompute, and leaves two data-parallel ranks.
# Memory of a GPU, rehearsed with the torch spec: 41.5 GB reserved of 81.1, 40.5 held (weights 17.7,
# gradients 0.2, optimizer 0.4, logits and loss 0.8, the rest 21.4).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
