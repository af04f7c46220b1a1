#!/usr/bin/env bash
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-32B, continued pretraining at 8k packed: eight nodes of 8xH100-80GB.
#
# Layout: TP 8 with SP inside a node, and PP 2 between nodes. The global batch gives each pipeline 64
# micro-batches, so its bubble is about 1.5%.
# Memory of a GPU (first stage), rehearsed with the torch spec: 39.3 GB reserved of 82.4, 37.4 held
# (weights 5.3, gradients 10.6, optimizer 7.9, logits and loss 0.0, the rest 13.6). A rank waits 1.6%
# of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-8}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${PRETRAIN[@]}" \
    --tensor-model-parallel-size 8 --sequence-parallel \
    --pipeline-model-parallel-size 2 \
    --global-batch-size 256 \
    "${OPTIONAL[@]}" "$@"
