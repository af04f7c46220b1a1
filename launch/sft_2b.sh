#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-2B, full fine-tuning at 8k packed: one node of 8xH100-80GB.
#
# Layout: the model fits one GPU, so all eight GPUs are data parallel, without communication inside a
# layer. Half of the activations belong to the vision tower.
# --keep-activations recomputes nothing: a step is modelled 3 % shorter. On a GPU with less memory, append
# --no-keep-activations: 37.1 GB reserved.
# Memory of a GPU, rehearsed with the torch spec: 45.1 GB reserved of 81.6, 44.2 held (weights 4.3,
# gradients 8.5, optimizer 3.2, logits and loss 2.6, the rest 25.7).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${SFT[@]}" \
    --keep-activations \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
