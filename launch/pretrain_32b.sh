#!/usr/bin/env bash
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-32B, continued pretraining at 8k packed: eight nodes of 8xH100-80GB.
#
# Layout: TP 4 with SP exchanges half as much as TP 8, and PP 2 makes room for it; the global batch
# gives each pipeline 32 micro-batches. A step is modelled 15 % shorter than with TP 8.
# Memory of a GPU (first stage), rehearsed with the torch spec: 64.1 GB reserved of 81.1, 62.2 held
# (weights 9.4, gradients 18.8, optimizer 7.0, logits and loss 0.0, the rest 27.0). A rank waits 3.8%
# of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-8}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --pipeline-model-parallel-size 2 \
    --global-batch-size 256 \
    "${OPTIONAL[@]}" "$@"
