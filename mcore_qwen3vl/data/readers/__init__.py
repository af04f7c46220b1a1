"""Readers of files that energon cannot read, which it shards, shuffles, blends and resumes."""
