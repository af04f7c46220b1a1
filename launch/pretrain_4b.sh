#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-4B, continued pretraining at 8k packed: two nodes of 8xH100-80GB.
#
# Layout: as for fine-tuning.
# Memory of a GPU, rehearsed with the torch spec: 64.9 GB reserved of 81.6, 61.9 held (weights 8.9,
# gradients 17.8, optimizer 3.3, logits and loss 2.6, the rest 29.4).
NODES=${NODES:-${SLURM_NNODES:-2}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" \
    --global-batch-size 256 \
    "${OPTIONAL[@]}" "$@"
