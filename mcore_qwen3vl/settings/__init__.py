"""The settings of a run but those of its loss: dataclasses whose fields are flags."""
