"""Why a sample is not used."""

from __future__ import annotations


class BadSample(Exception):
    """This sample cannot be used, and the message says why. The loader skips it."""


class OverlongSample(Exception):
    """The sample exceeds the sequence length and is left out, as the policy says."""
