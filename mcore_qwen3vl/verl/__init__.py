"""VERL with these models: ``actor_rollout_ref.model.external_lib=mcore_qwen3vl.verl``.

Importing this package registers two engines with VERL, for policies and for critics, instead of its
own Megatron engines. Models other than Qwen3-VL and Qwen3.5 still get VERL's engines. No file of
VERL is changed, and neither mbridge nor Megatron-Bridge is needed. Source: verl 0.9.1,
``verl.workers.engine.megatron.transformer_impl``.
"""

from importlib.util import find_spec

if find_spec("verl") is None:
    raise ImportError(
        "mcore_qwen3vl.verl plugs this model into VERL, which is not installed: docs/verl.md says "
        "how to install both."
    )

from mcore_qwen3vl.verl.engine import register

register()
