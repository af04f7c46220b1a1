from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.errors import CheckFailed
from mcore_qwen3vl.verification.measurement import (
    Finding,
    Measurement,
    judge_measurements,
    measure,
    merge,
)
from mcore_qwen3vl.verification.report import Report


def finding(error: float, scale: float = 1.0, tolerance: float = 1e-3, **more) -> Finding:
    return Finding("gradients", "w", Measurement(error, scale, 4), tolerance, **more)


def test_the_error_is_the_largest_and_relative_to_the_largest_expected():
    one = measure(torch.tensor([1.0, 2.5, -4.0]), torch.tensor([1.0, 2.0, -5.0]))
    assert one == Measurement(absolute_error=1.0, scale=5.0, count=3)
    assert Finding("part", "name", one, 0.1).relative_error == pytest.approx(0.2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_infinitely_wrong(value):
    one = measure(torch.tensor([0.0, value]), torch.zeros(2))
    assert Finding("part", "name", one, 1e9).relative_error == math.inf


def test_half_precision_is_not_compared_in_half_precision():
    one = measure(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.001]))
    assert one.absolute_error == pytest.approx(1e-3, rel=0.01)


def test_nothing_is_expected_of_a_zero_but_zero():
    assert finding(0.0, scale=0.0).ok
    assert not finding(1e-30, scale=0.0).ok


def test_shapes_must_agree():
    with pytest.raises(CheckFailed, match=r"\(2,\) was found where \(3,\)"):
        measure(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_bits_are_compared_and_differences_counted(dtype):
    a = torch.tensor([0.0, 2.0, torch.nan, -4.0, 1.0]).to(dtype)
    assert measure(a.clone(), a, bitwise=True) == Measurement(count=5)
    b = torch.tensor([-0.0, 2.0, torch.nan, -4.0, 1.5]).to(dtype)
    one = measure(b, a, bitwise=True)
    assert (one.different, one.count, one.absolute_error) == (2, 5, 0.5)
    assert str(Finding("tensors", "w", one)) == "tensors w: 2 values differ, by at most 0.5"
    assert not Finding("tensors", "w", one).ok
    zeros = measure(b[:1], a[:1], bitwise=True)
    assert (zeros.relative, Finding("tensors", "w", zeros).ok) == (0.0, False)


def test_bits_of_different_dtypes_are_not_compared():
    with pytest.raises(CheckFailed, match=r"torch.float16 was found where torch.bfloat16"):
        measure(torch.zeros(1).half(), torch.zeros(1).bfloat16(), bitwise=True)


def test_what_cannot_be_compared_fails_whatever_the_numbers():
    absent = Finding("files", "config.json", flaw="only in A")
    assert not absent.ok
    assert str(absent) == "files config.json: only in A"
    assert Finding("files", "config.json").ok


def test_measurements_of_ranks_merge():
    key = ("gradients", "w")
    copy = measure(torch.tensor([4.5, 0.0, 0.0]), torch.tensor([4.0, 0.0, 0.0]), main=False)
    merged = merge([{key: Measurement(1.0, 2.0, 3)}, {key: copy}])
    assert merged == {key: Measurement(1.0, 4.0, 3, copies=3)}


def test_a_tensor_that_was_not_compared_whole_fails():
    key = ("gradients", "w")
    measured = {key: Measurement(0.0, 1.0, 3)}
    [half] = judge_measurements(measured, {"gradients": 1.0}, counts={key: 6})
    assert not half.ok
    assert "3 of 6 values were compared" in str(half)
    [absent] = judge_measurements({}, {"gradients": 1.0}, counts={key: 6})
    assert not absent.ok
    [unexpected] = judge_measurements(measured, {"gradients": 1.0}, counts={})
    assert not unexpected.ok


def test_a_report_names_the_worst_and_fails():
    report = Report("a against b", findings=[finding(1e-4), finding(5e-2, context="image")])
    assert not report.ok
    with pytest.raises(CheckFailed, match=r"1 of 2 .*\n  gradients w \(image\): relative error 5"):
        report.require()
    assert report.parts()["image", "gradients"].worst.relative_error == pytest.approx(5e-2)
    assert [finding.context for finding in report.worst()] == ["image", ""]
    assert [entry["ok"] for entry in report.to_dict()["findings"]] == [True, False]
    Report("fine", findings=[finding(1e-4)]).require()


def test_values_that_ranks_hold_copies_of_are_counted_once():
    """For example, each TP rank holds all of a norm's weight."""
    key, wrong, right = ("weights", "norm"), torch.ones(7), torch.zeros(7)

    def of_two_ranks(first: Tensor, second: Tensor) -> Finding:
        ranks = ((first, True), (second, False))
        each = [{key: measure(v, right, bitwise=True, main=main)} for v, main in ranks]
        return Finding(*key, merge(each)[key], expected_count=7)

    assert of_two_ranks(wrong, wrong).detail == "7 values differ, by at most 1"
    copy = of_two_ranks(right, wrong)
    assert not copy.ok
    assert copy.detail == "7 copies on other ranks differ, by at most 1"
