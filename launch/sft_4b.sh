#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-4B, full fine-tuning at 8k packed: one node of 8xH100-80GB.
#
# Layout: weights, optimizer states and activations together do not fit a GPU of 80 GB. TP 2 with SP
# halves all of them. Its communication over NVLink costs less than full recompute.
# Memory of a GPU, rehearsed with the torch spec: 38.8 GB reserved of 83.0, 37.5 held (weights 4.9,
# gradients 9.7, optimizer 7.3, logits and loss 0.9, the rest 14.8).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
