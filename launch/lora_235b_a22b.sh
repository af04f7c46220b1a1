#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-235B-A22B, LoRA of the language model at 8k packed: two nodes of 8xH100-80GB.
#
# Layout: the weights alone take 470 GB. PP 2 gives each node half of the layers, and EP 8 divides their
# experts over the node. TP 4 is the most that the four key/value heads allow.
# Memory of a GPU (first stage), rehearsed with the torch spec: 38.7 GB reserved of 77.4, 38.1 held
# (weights 31.9, gradients 0.7, optimizer 1.9, logits and loss 0.0, the rest 3.6). A rank waits 3.3%
# of an iteration for others (modelled).
NODES=${NODES:-${SLURM_NNODES:-2}}
MOE_MODEL=1
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" "${MOE[@]}" "${FULL_RECOMPUTE[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
