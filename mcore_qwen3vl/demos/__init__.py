"""The programs that ``make demo`` and ``make train-demo`` run."""
