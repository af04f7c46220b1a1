#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Qwen3-VL-8B, LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: most of the memory is activations. TP 2 with SP halves them and leaves half of the GPU free
# for longer packs. TP 1 just fits.
# Memory of a GPU, rehearsed with the torch spec: 24.0 GB reserved of 83.0, 23.6 held (weights 9.4,
# gradients 0.1, optimizer 0.1, logits and loss 0.9, the rest 13.0).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${LORA[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --global-batch-size 64 \
    "${OPTIONAL[@]}" "$@"
