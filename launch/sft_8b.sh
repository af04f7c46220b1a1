#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-8B, full fine-tuning at 8k packed: one node of 8xH100-80GB.
#
# Layout: TP 2 with SP is the least that fits. A step is modelled 14 % shorter than with TP 4, which
# exchanges three times as much and has narrower products, but leaves half of the GPU: for longer packs,
# append --tensor-model-parallel-size 4.
# Memory of a GPU, rehearsed with the torch spec: 64.1 GB reserved of 81.1, 61.7 held (weights 9.3,
# gradients 18.7, optimizer 14.0, logits and loss 1.4, the rest 18.2).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
