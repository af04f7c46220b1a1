"""Rehearsal of a training run without its GPUs: does it start and fit, and what fills the memory?

Each distinct rank of the run (first, middle and last pipeline stage) runs two iterations of
Megatron's real loop on the simulated GPU (:mod:`mcore_qwen3vl.simulated_gpu`), with the real
flags, sizes and parallel layout, in a process of its own. ``mcore-qwen3vl rehearse`` prints the
result.
"""
