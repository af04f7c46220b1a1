"""Bytes on disk: archives, unpickling, direct and mapped files, boxes, staging. Knows no model."""
