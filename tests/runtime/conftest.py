from mcore_qwen3vl.runtime import cpu

cpu.install(training=True)  # before any test module imports megatron
