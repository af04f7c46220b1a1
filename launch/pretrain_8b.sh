#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-8B, continued pretraining at 8k packed: four nodes of 8xH100-80GB.
#
# Layout: sixteen data-parallel ranks divide the optimizer states far enough for TP 2, which communicates
# less than TP 4.
# Memory of a GPU, rehearsed with the torch spec: 53.5 GB reserved of 81.1, 51.1 held (weights 9.3,
# gradients 18.7, optimizer 3.5, logits and loss 1.4, the rest 18.2).
NODES=${NODES:-${SLURM_NNODES:-4}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --global-batch-size 256 \
    "${OPTIONAL[@]}" "$@"
