"""The reasons for which a sample is not used."""

from __future__ import annotations


class BadSample(Exception):
    """The sample cannot be used, and the message says why. The loader skips it."""


class OverlongSample(Exception):
    """The sample is longer than the sequence length, and the policy is to leave it out."""
