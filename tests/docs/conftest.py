from mcore_qwen3vl.runtime import cpu

cpu.install()  # before any test module imports megatron
