#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-8B, full fine-tuning at 8k packed: one node of 8xH100-80GB.
#
# Layout: TP 4 with SP leaves half of the GPU free for longer packs and larger images, without recompute.
# TP 2 fits too (63.1 GB reserved, 24 % left), with a step that is modelled 14 % shorter.
# Memory of a GPU, rehearsed with the torch spec: 42.5 GB reserved of 83.0, 41.6 held (weights 5.2,
# gradients 10.5, optimizer 15.7, logits and loss 1.0, the rest 9.2).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
