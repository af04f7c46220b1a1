#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-32B, full fine-tuning at 8k packed: four nodes of 8xH100-80GB.
#
# Layout: TP 8 with SP stays on a node's NVLink, and four data-parallel ranks divide the optimizer
# states. There is no pipeline, so small global batches have no bubble.
# Memory of a GPU, rehearsed with the torch spec: 56.4 GB reserved of 83.0, 55.2 held (weights 9.4,
# gradients 18.8, optimizer 14.1, logits and loss 1.0, the rest 12.0).
NODES=${NODES:-${SLURM_NNODES:-4}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --tensor-model-parallel-size 8 --sequence-parallel \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
