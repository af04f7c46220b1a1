"""From a record in a file to a conversation: formats, media, bad samples.

Every function here that reads a record or its media raises ``BadSample`` if they cannot be used;
the message says why. The steps of :mod:`mcore_qwen3vl.data.encoding` pass it on.
"""
