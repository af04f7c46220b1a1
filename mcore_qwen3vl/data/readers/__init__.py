"""Readers of files that energon cannot read; it shards, shuffles, blends and resumes them."""
