"""What a growing batch takes is what Megatron's own calculator takes."""

from __future__ import annotations

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from mcore_qwen3vl.settings.schedule import samples_of_growing_batches

SEQ_LENGTH = 128


@pytest.mark.parametrize("schedule", ["0:2,256:4", "0:1 1K:3 2K:7", "0:5", "0:2,300:6,10K:8"])
@pytest.mark.parametrize("samples", [1, 9, 14, 16, 40, 117])
def test_the_last_step_may_go_beyond_the_samples(schedule: str, samples: int) -> None:
    calculator = StepBatchsizeNumMicroBatchesCalculator(
        1, 1, False, 1, schedule.replace(",", " "), SEQ_LENGTH
    )
    taken = 0
    while taken < samples:  # as Megatron's update_train_iters
        calculator.update(taken, consistency_check=False)
        taken += calculator.get_current_global_batch_size()
    assert samples_of_growing_batches(schedule, samples, SEQ_LENGTH) == taken
