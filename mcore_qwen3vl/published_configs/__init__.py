"""``config.json`` of published models, for tests, benchmarks and estimates.

Those of Qwen3.5 were not downloaded: every size, and every other value that differs between them,
is as public source code quotes the published files. The source of 35B-A3B quotes Qwen3.6-35B-A3B's
whole file, and the source of 27B names all fields. The sources of 0.8B and 9B name all sizes; their
other fields are the 27B's. With its mtp.* and its values in float32, 9B has the size that its
published index states.

Of Qwen3.8-2.4T-A95B, a language model alone, public issues quote the layers, experts, heads, delta
nets and the width of an expert. It has 2.4 trillion parameters, 95 billion of them active. From
this follow the hidden size, and a shared expert as wide as another. Other fields are the 35B-A3B's.
"""

from __future__ import annotations

from pathlib import Path

PUBLISHED = Path(__file__).parent
"""The folder of 2b.json, 4b.json, 8b.json, 32b.json, 30b_a3b.json and 235b_a22b.json (Qwen3-VL),
qwen3.5_0.8b.json, qwen3.5_9b.json, qwen3.5_27b.json, qwen3.5_35b_a3b.json and
qwen3.8_2.4t_a95b.json."""
