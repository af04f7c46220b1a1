"""Where the model runs: CUDA with NCCL or CPU with gloo, one process per rank."""
