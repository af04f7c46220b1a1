"""Entry point for torchrun: ``launch/train.py --hf-model DIR --data-path FILE [FLAGS]``."""

from mcore_qwen3vl.training.__main__ import entry

if __name__ == "__main__":
    entry()
