#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-2B, continued pretraining at 8k packed: two nodes of 8xH100-80GB.
#
# Layout: as for fine-tuning. More data-parallel ranks divide the optimizer states further.
# On a GPU with less memory, append --no-keep-activations: 35.3 GB reserved.
# Memory of a GPU, rehearsed with the torch spec: 43.6 GB reserved of 81.6, 42.6 held (weights 4.3,
# gradients 8.5, optimizer 1.6, logits and loss 2.6, the rest 25.7).
NODES=${NODES:-${SLURM_NNODES:-2}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" \
    --keep-activations \
    --global-batch-size 256 \
    "${OPTIONAL[@]}" "$@"
