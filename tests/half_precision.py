"""How far another program's bfloat16 may be from float32."""

MORE_NOISE = 1.5
"""Times as far as Hugging Face's model in bfloat16, which adds up the same products otherwise."""
