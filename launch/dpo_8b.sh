#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --open-mode=append
# Qwen3-VL-8B, DPO with LoRA of the language model at 8k packed: one node of 8xH100-80GB.
#
# Layout: as for LoRA. The reference is the adapter switched off, one forward pass more: it keeps nothing
# but the micro-batches of an iteration. Data are records with chosen and rejected; a global batch counts
# packs of pairs.
# Memory of a GPU, rehearsed with the torch spec: 45.9 GB reserved of 81.6, 44.6 held (weights 17.6,
# gradients 0.2, optimizer 0.1, logits and loss 0.0, the rest 26.8).
NODES=${NODES:-${SLURM_NNODES:-1}}
HERE=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file. Slurm knows the path of the original.
[[ -e $HERE/common.sh ]] || HERE=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
source "${LAUNCH_DIR:-$HERE}/common.sh" || exit 2

train "${DPO[@]}" \
    --global-batch-size 32 \
    "${OPTIONAL[@]}" "$@"
