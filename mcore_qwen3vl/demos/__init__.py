"""What ``make demo`` and ``make train-demo`` run."""
