"""A run from top to bottom: what happens, who does it, and which functions of Megatron's we wrap.

A run is Megatron's ``pretrain``, which :meth:`.run.Run.train` calls with our data, our model and
our forward step. Its loop has no callbacks, so a run wraps the functions of :data:`HOOKS` by name:
Megatron calls ours, which calls Megatron's. The events of :data:`BEGIN` happen once, those of
:data:`STEP` in each step, in this order. A program that starts a run hears of some of them, see
:mod:`.events`.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRAINING, _CORE = "megatron.training", "megatron.core"
_LOOP = f"{_TRAINING}.training"


@dataclass(frozen=True)
class WrappedFunction:
    """A function of Megatron's that a run wraps."""

    name: str
    module: str
    """The module that looks the function up when it calls it."""
    why: str
    """What our wrapper does besides, or in its place."""


@dataclass(frozen=True)
class Event:
    """Something that happens in a run, in the order of :data:`BEGIN` and :data:`STEP`."""

    name: str
    what: str
    by: tuple[str, ...]
    """Who does it, in the order in which they are called: ``module:name``."""
    hooks: tuple[WrappedFunction, ...] = ()
    """What is wrapped for it, in the order in which Megatron calls it."""


BEGIN = (
    Event(
        "prepare",
        "Check the flags and the folders, choose the device, lock the folders.",
        ("mcore_qwen3vl.training.run:main",),
        (
            WrappedFunction(
                "compile_helpers",
                f"{_CORE}.datasets.utils",
                "Nothing is compiled. Megatron would compile a helper for GPT data sets, which we "
                "do not use, with a Makefile that its wheel lacks, and exit because of that.",
            ),
        ),
    ),
    Event(
        "build",
        "Build each pipeline chunk, read its weights, freeze; then the second model and Adam.",
        (
            "mcore_qwen3vl.training.model:model_provider",
            "mcore_qwen3vl.training.run:Run._set_up_optimizer",
            "mcore_qwen3vl.training.second_model:SecondModel.build",
            "mcore_qwen3vl.training.run:Run._set_up_rates",
        ),
        (
            WrappedFunction(
                "get_megatron_optimizer",
                _LOOP,
                "Builds the second model first, and adds the parts' own learning rates. Makes "
                "torch's Adam fused and resumable, saves the state in each rank's own part, keeps "
                "the loss scale on the host, and copies updated weights to the model together.",
            ),
            WrappedFunction(
                "get_optimizer_param_scheduler",
                _LOOP,
                "First counts the steps of --num-epochs. Then lets parts with a rate of their own "
                "begin the warm-up lower too.",
            ),
        ),
    ),
    Event(
        "load",
        "Load the checkpoint that the run goes on from.",
        (
            "mcore_qwen3vl.training.checkpoints.run_checkpoints:RunCheckpoints.load",
            "mcore_qwen3vl.training.checkpoints.run_checkpoints:RunCheckpoints.report_differences",
        ),
        (
            WrappedFunction("load_checkpoint", _LOOP, "First chooses a readable checkpoint."),
            WrappedFunction(
                "check_checkpoint_args",
                f"{_TRAINING}.checkpointing",
                "Shows us the arguments of the run that saved the checkpoint.",
            ),
        ),
    ),
    Event(
        "open data",
        "Open the loaders where the run goes on, and give each pipeline chunk its stream.",
        ("mcore_qwen3vl.training.data_provider:DataProvider",),
    ),
    Event(
        "make the passes",
        "Make the function that runs all micro-batches of a step through the pipeline.",
        ("mcore_qwen3vl.training.run:Run._make_passes",),
        (
            WrappedFunction(
                "get_forward_backward_func",
                _LOOP,
                "In each step, first computes the teacher's tokens, the reference, KTO's baseline, "
                "or all embeddings.",
            ),
        ),
    ),
)

STEP = (
    Event(
        "step",
        "Begin a step, or leave it out.",
        ("mcore_qwen3vl.training.run:Run._step",),
        (
            WrappedFunction(
                "train_step",
                _LOOP,
                "Leaves out --iterations-to-skip. Megatron's own way needs batches that are "
                "dictionaries, and passes by the save, the export and the validation that are due "
                "after such a step.",
            ),
        ),
    ),
    Event(
        "first pass",
        "Compute what a loss needs of the whole step before its gradients, if anything.",
        ("mcore_qwen3vl.training.objectives:passes_of",),
    ),
    Event(
        "batch",
        "Take a batch that a thread has read. This and the next three are of each micro-batch.",
        ("mcore_qwen3vl.data.sharing:SharedBatches.chunk",),
    ),
    Event(
        "forward",
        "Run the model on the micro-batch.",
        (
            "mcore_qwen3vl.training.forward_step:ForwardStep",
            "mcore_qwen3vl.model.qwen3vl:Qwen3VLModel.forward",
        ),
    ),
    Event(
        "losses",
        "Make of its output a sum to minimise, a normaliser, and numbers for the log.",
        ("mcore_qwen3vl.losses.reduction:Objective",),
    ),
    Event(
        "backward",
        "Compute the gradients of the sum.",
        ("megatron.core.pipeline_parallel.schedules:backward_step",),
    ),
    Event(
        "finish gradients",
        "Sum the gradients up over ranks, divide them by the normaliser once, report their norms.",
        (
            "mcore_qwen3vl.training.run:Run._finalize_gradients",
            "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
            "mcore_qwen3vl.training.forward_step:ForwardStep.normalise",
            "mcore_qwen3vl.training.logs.step_report:StepReport.measure",
        ),
        (
            WrappedFunction(
                "_allreduce_non_tensor_model_parallel_grads",
                f"{_CORE}.distributed.finalize_model_grads",
                "Copies only a bounded part of the gradients at a time.",
            ),
        ),
    ),
    Event(
        "clip and update",
        "Clip the gradients by their norm, let Adam change the weights, and set the next rate.",
        ("megatron.core.optimizer.optimizer:MegatronOptimizer.step",),
        (
            WrappedFunction(
                "logical_and_across_model_parallel_group",
                _LOOP,
                "Without host syncs: whether the step was taken on all ranks.",
            ),
            WrappedFunction(
                "reduce_max_stat_across_model_parallel_group",
                _LOOP,
                "Without host syncs: the gradients' norm.",
            ),
        ),
    ),
    Event(
        "log",
        "Stop at a norm that is not finite, show the progress, write the numbers that are due.",
        (
            "mcore_qwen3vl.training.run:Run._log",
            "mcore_qwen3vl.training.logs.step_report:StepReport.log_step",
        ),
        (
            WrappedFunction(
                "training_log",
                _LOOP,
                "Also writes --log-json, and stops at a non-finite gradient norm.",
            ),
        ),
    ),
    Event(
        "validate",
        "Compute the losses of the validation data, every --eval-interval.",
        (
            "mcore_qwen3vl.training.run:Run._evaluate",
            "mcore_qwen3vl.training.logs.step_report:StepReport.validation",
        ),
        (
            WrappedFunction(
                "evaluate",
                _LOOP,
                "Lets batches differ in length, and tells us the losses. Its time does not count "
                "in the speed that we log.",
            ),
        ),
    ),
    Event(
        "save and export",
        "Save a checkpoint, export to Hugging Face, and stop, if any of it is due.",
        (
            "mcore_qwen3vl.training.checkpoints.run_checkpoints:RunCheckpoints.after_iteration",
            "mcore_qwen3vl.training.checkpoints.run_checkpoints:RunCheckpoints.save",
        ),
        (
            WrappedFunction("checkpoint_and_decide_exit", _LOOP, "Also exports to Hugging Face."),
            WrappedFunction(
                "all_gather_item",
                f"{_TRAINING}.dist_signal_handler",
                "Without host syncs: whether any rank has received a signal.",
            ),
            WrappedFunction(
                "save_checkpoint_and_time", _LOOP, "First saves the position in the data."
            ),
            WrappedFunction(
                "generate_state_dict",
                f"{_TRAINING}.checkpointing",
                "With LoRA, checkpoints hold only what trains.",
            ),
            WrappedFunction(
                "get_write_results_queue",
                f"{_CORE}.dist_checkpointing.strategies.filesystem_async",
                "Megatron's needs a process of its own, even for a save that this one waits for.",
            ),
        ),
    ),
)

HOOKS = {hook.name: hook.module for event in (*BEGIN, *STEP) for hook in event.hooks}
"""The functions that a run wraps, each with the calling module, where the name is looked up.

They are in the order in which a run calls them; docs/design.md says what each costs and saves.
"""
