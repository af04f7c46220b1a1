# Every script in this folder uses this file: it has the common flags, and starts torchrun.
#
#   bash launch/sft_8b.sh --hf-model DIR --load-hf DIR --data-path train.jsonl --save runs/8b
#   sbatch launch/sft_8b.sh --hf-model ...
#
# Flags that you append override the script's, and Megatron's flags work. Run the same command
# again to resume from --save. --dry-run prints the final command instead of running it. It refuses a
# flag that train does not know, and notes on standard error what would stop the run on this machine.
#
# Environment variables: NODES (default: the Slurm job's nodes, or else the script's),
# GPUS_PER_NODE, MASTER_PORT, FP8=1, TP_OVERLAP=1, DEEPEP=1, EP_OVERLAP=1; without Slurm MASTER_ADDR
# and NODE_RANK.
# Kubeflow (pytorchjob.yaml, trainjob.yaml) and SkyPilot (skypilot.yaml) set the nodes and their names themselves.
# REQUEUE=1: a Slurm job whose run stops before its end, or fails, goes back into the queue if it has saved a checkpoint.
# CHECK_RANKS=0 skips the check that the layout divides the ranks.
# LAUNCH_DIR is the path of this folder, in case Slurm cannot tell where a script comes from.
set -euo pipefail
# No Python that is started here imports what lies in the current folder, such as downloaded data.
export PYTHONSAFEPATH=1

LAUNCH_DIR=${LAUNCH_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}
# Kubeflow sets PET_* in each pod, SkyPilot its own variables. In a Slurm job, Slurm's count.
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    NODES=${PET_NNODES:-${SKYPILOT_NUM_NODES:-${NODES:-1}}}
    GPUS_PER_NODE=${GPUS_PER_NODE:-${PET_NPROC_PER_NODE:-${SKYPILOT_NUM_GPUS_PER_NODE:-}}}
    NODE_RANK=${NODE_RANK:-${PET_NODE_RANK:-${SKYPILOT_NODE_RANK:-}}}
    addresses=${SKYPILOT_NODE_IPS:-} # one a line
    MASTER_ADDR=${MASTER_ADDR:-${PET_MASTER_ADDR:-${addresses%%$'\n'*}}}
    MASTER_PORT=${MASTER_PORT:-${PET_MASTER_PORT:-}}
fi
# With --exclusive, Slurm counts all GPUs of a node, while srun gives as many as were asked for: [TYPE:]NUMBER.
asked=${SLURM_GPUS_PER_NODE:-}
GPUS_PER_NODE=${GPUS_PER_NODE:-${asked##*:}}
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
MASTER_PORT=${MASTER_PORT:-29500}
# Seconds for a step and a checkpoint after SIGTERM. torchrun's 30 s would kill a rank while it saves.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# torchrun forwards these to its ranks, by default not the last three; train adds that of --exit-signal.
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU}

COMMON=(
    --bf16 --spec te --packing --seq-length 8192 --micro-batch-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --lr-decay-style cosine --lr-warmup-fraction 0.03
    --num-workers 8 --save-interval 500 --log-interval 10
    # The check has two host syncs for every gradient bucket. The norm is checked after each step anyway.
    --no-check-for-nan-in-loss-and-grad
    --distributed-timeout-minutes 30
)

# Full fine-tuning. The pretrained tower has a lower learning rate than the language model.
SFT=(--train-iters 2000 --lr 1e-5 --min-lr 1e-6 --vision-lr-mult 0.2)

# LoRA on the decoder's linear layers, with a higher learning rate. --load-hf is needed at every start.
LORA=(--train-iters 2000 --lr 1e-4 --min-lr 1e-5 --lora-rank 16 --lora-target language)

# DPO on preference pairs. The reference is the model with its adapter switched off.
DPO=(
    --loss dpo --beta 0.1 --train-iters 500 --lr 5e-6 --min-lr 5e-7
    --lora-rank 16 --lora-target language
)

# Continued pretraining on interleaved image-text.
PRETRAIN=(--train-iters 50000 --lr 5e-5 --min-lr 5e-6 --vision-lr-mult 0.5)

# All decoder layers and vision blocks keep only their inputs.
FULL_RECOMPUTE=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)

# The z-loss keeps router logits small in long bf16 runs. The load-balancing coefficient comes from
# the checkpoint's config. The experts of a rank are one grouped GEMM.
MOE=(--moe-z-loss-coeff 1e-5 --moe-grouped-gemm)

# This needs Transformer Engine, and no flag switches it off. train therefore adds it only if
# --spec torch was not appended.
MOE_TE=(--moe-permute-fusion)

# These are optional and need Transformer Engine (--spec te).
OPTIONAL=()
if [[ ${FP8:-0} == 1 ]]; then # Hopper: per-block scales; parameters stay in bf16
    OPTIONAL+=(--fp8-format e4m3 --fp8-recipe blockwise)
    if [[ ${MOE_MODEL:-0} == 1 ]]; then OPTIONAL+=(--moe-router-padding-for-quantization); fi
fi
if [[ ${TP_OVERLAP:-0} == 1 ]]; then # hides TP collectives behind GEMMs; needs TP > 1 and MPI
    OPTIONAL+=(--tp-comm-overlap)
fi
if [[ ${DEEPEP:-0} == 1 ]]; then # dispatches MoE tokens with DeepEP, which must be installed
    OPTIONAL+=(--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep)
fi

# value_of NAME DEFAULT FLAGS...: print the last value of the flag NAME in FLAGS, or DEFAULT.
value_of() {
    local name=$1 value=$2
    shift 2
    while (($#)); do
        case $1 in
            "$name"=*) value=${1#*=} ;;
            "$name") value=${2:-} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

refuse() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

# usage: print the comments at the top of the script and of this file.
usage() {
    local file
    for file in "$0" "$LAUNCH_DIR/common.sh"; do
        sed -n '1,/^[^#]/s/^#\( \|$\)//p' "$file"
        echo
    done
    printf 'Flags to append: mcore-qwen3vl train --help [WORD]\n'
    exit
}

# check_switches: refuse a switch in the environment that is neither 0 nor 1.
check_switches() {
    local name
    for name in FP8 TP_OVERLAP DEEPEP EP_OVERLAP REQUEUE; do
        [[ ${!name:-0} == [01] ]] || refuse "$name is '${!name}': 1 switches it on, 0 off."
    done
}

# check_counts NUMBERS...: refuse what is no count. Bash evaluates whatever an arithmetic expression
# names, so that a[$(command)] would run the command.
check_counts() {
    local number
    for number in "$@"; do
        [[ $number =~ ^[1-9][0-9]*$ ]] || refuse "'$number' is not a number of nodes, GPUs, ranks or samples."
    done
}

# check_ranks FLAGS...: refuse a number of nodes that the layout or the global batch does not divide.
check_ranks() {
    if [[ -n ${SLURM_JOB_ID:-} && $NODES != "${SLURM_NNODES:-$NODES}" ]]; then
        refuse "NODES is $NODES and the Slurm job has $SLURM_NNODES nodes: leave NODES out."
    fi
    local tp pp cp ep etp micro global
    tp=$(value_of --tensor-model-parallel-size 1 "$@")
    pp=$(value_of --pipeline-model-parallel-size 1 "$@")
    cp=$(value_of --context-parallel-size 1 "$@")
    ep=$(value_of --expert-model-parallel-size 1 "$@")
    etp=$(value_of --expert-tensor-parallel-size "$tp" "$@")
    micro=$(value_of --micro-batch-size 1 "${COMMON[@]}" "$@")
    global=$(value_of --global-batch-size 0 "$@")
    [[ $global =~ ^(0|[1-9][0-9]*)$ ]] || refuse "--global-batch-size is '$global'."
    check_counts "$tp" "$pp" "$cp" "$ep" "$etp" "$micro"
    local ranks=$((NODES * GPUS_PER_NODE)) model=$((tp * pp * cp))
    local run="NODES $NODES x GPUS_PER_NODE $GPUS_PER_NODE = $ranks ranks"
    ((ranks % model == 0)) ||
        refuse "$run cannot be divided by TP $tp x PP $pp x CP $cp = $model: change NODES or the layout."
    ((ep == 1 || ranks / pp % (ep * etp) == 0)) ||
        refuse "$run, $((ranks / pp)) a pipeline stage, cannot be divided by EP $ep x ETP $etp: change NODES or the layout."
    local rows=$((micro * ranks / model))
    ((global % rows == 0)) ||
        refuse "$run take $rows samples at once, which do not divide --global-batch-size $global: append --global-batch-size $(((global / rows + 1) * rows)), or change NODES."
}

# drop_overridden: remove from `flags` each use of a flag that a later use overrides. The warm-up has three flags, of which
# one is given.
drop_overridden() {
    local kept=() keys=() i keep=1
    local -A last=()
    for i in "${!flags[@]}"; do
        if [[ ${flags[i]} != --* ]]; then continue; fi
        case ${flags[i]%%=*} in
            --lr-warmup-iters | --lr-warmup-samples) keys[i]=--lr-warmup-fraction ;;
            *) keys[i]=${flags[i]%%=*} ;;
        esac
        last[${keys[i]}]=$i
    done
    for i in "${!flags[@]}"; do
        if [[ -n ${keys[i]:-} ]]; then
            keep=0
            if [[ ${last[${keys[i]}]} == "$i" ]]; then keep=1; fi
        fi
        if ((keep)); then kept+=("${flags[i]}"); fi
    done
    flags=("${kept[@]}")
}

# check_flags [--dry-run] FLAGS...: check the flags once, in a second. Each rank would print the same
# error a minute later, among torchrun's tracebacks. Only exit codes 0 and 2 count: if srun starts a
# container, the Python here may lack the package.
check_flags() {
    local said code=0
    said=$(WORLD_SIZE=$((NODES * GPUS_PER_NODE)) python3 -m mcore_qwen3vl.training.arguments.launch_check "$@" 2>&1) || code=$?
    ((code == 0 || code == 2)) || return 0
    if [[ -n $said ]]; then printf '%s\n' "$said" >&2; fi
    return "$code"
}

# newest_step FOLDER: print the step of the newest checkpoint of a run; nothing if it has none.
newest_step() {
    cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null || true
}

# run_and_requeue FOLDER COMMAND...: run the command. If it ends otherwise than well, put the Slurm job back into the
# queue, but only if the command has saved a checkpoint in FOLDER: otherwise it would end in the same way again.
run_and_requeue() {
    local folder=$1 code=0 before
    shift
    before=$(newest_step "$folder")
    "$@" || code=$?
    # A job that somebody has cancelled is no longer running.
    if ((code)) && [[ $(squeue --noheader --format %T --jobs "$SLURM_JOB_ID") == RUNNING ]]; then
        if [[ $(newest_step "$folder") == "$before" ]]; then
            printf 'REQUEUE=1: the run has saved no checkpoint since it started, so the job ends.\n' >&2
        else
            printf 'REQUEUE=1: the job goes back into the queue, and then on from %s.\n' "$folder" >&2
            scontrol requeue "$SLURM_JOB_ID"
        fi
    fi
    exit "$code"
}

# train FLAGS...: run launch/train.py on NODES x GPUS_PER_NODE ranks, or print the command.
train() {
    local flags=() dry_run=0 flag
    check_switches
    for flag in "$@"; do
        case $flag in
            --dry-run) dry_run=1 ;;
            -h | --help) usage ;;
            *) flags+=("$flag") ;;
        esac
    done
    if [[ ${MOE_MODEL:-0} == 1 && $(value_of --spec te "${flags[@]}") == te ]]; then flags+=("${MOE_TE[@]}"); fi
    if [[ ${EP_OVERLAP:-0} == 1 && " ${flags[*]} " != *" --overlap-moe-expert-parallel-comm "* ]]; then
        refuse "EP_OVERLAP=1: this script has no layout for it. sft_30b_a3b, pretrain_30b_a3b and pretrain_235b_a22b have one."
    fi
    check_counts "$NODES" "$GPUS_PER_NODE"
    if [[ ${CHECK_RANKS:-1} == 1 ]]; then check_ranks "${flags[@]}"; fi
    local save
    save=$(value_of --save "" "${flags[@]}")
    if [[ ${REQUEUE:-0} == 1 && $dry_run == 0 && (-z ${SLURM_JOB_ID:-} || -z $save) ]]; then
        refuse "REQUEUE=1 needs a Slurm job, and --save with the checkpoints to go on from."
    fi
    local command=(torchrun --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE")
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        local head_node
        head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
        command=(
            srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${command[@]}" --rdzv-backend c10d
            --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head_node:$MASTER_PORT"
        )
    elif ((NODES > 1)); then
        if ((!dry_run)) && [[ -z ${NODE_RANK:-} || -z ${MASTER_ADDR:-} ]]; then
            refuse "NODES is $NODES: start this on each node, with MASTER_ADDR, the name of the first, and NODE_RANK, from 0."
        fi
        # A dry run prints the names of the variables that are to be filled in.
        command+=(
            --node-rank "${NODE_RANK:-NODE_RANK}" --master-addr "${MASTER_ADDR:-MASTER_ADDR}"
            --master-port "$MASTER_PORT"
        )
    fi
    local exit_signal
    exit_signal=$(value_of --exit-signal SIGTERM "${flags[@]}")
    if [[ ,$PET_SIGNALS_TO_HANDLE, != *,"$exit_signal",* && $exit_signal == SIG* ]]; then
        PET_SIGNALS_TO_HANDLE+=,$exit_signal
    fi
    flags=("${COMMON[@]}" "${flags[@]}")
    drop_overridden
    command+=("$LAUNCH_DIR/train.py" "${flags[@]}")
    if ((dry_run)); then
        if [[ ${CHECK_RANKS:-1} == 1 ]]; then check_flags --dry-run "${flags[@]}" || exit 2; fi
        printf '%q ' "${command[@]}"
        printf '\n'
        return
    fi
    check_flags "${flags[@]}" || exit 2
    if [[ ${REQUEUE:-0} == 1 ]]; then run_and_requeue "$save" "${command[@]}"; fi
    exec "${command[@]}"
}
