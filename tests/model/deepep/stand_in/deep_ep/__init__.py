"""A reference of DeepEP's interface, as Megatron-Core calls it, over ``torch.distributed``.

It is written from the documented interface of DeepEP 1.2 (``Buffer``) and of its branch hybrid-ep
(``HybridEPBuffer``). What those refuse is refused here too, except float32, in which results are
compared. A group is one node.
"""

from deep_ep.buffer import Buffer, Config
from deep_ep.hybrid_ep_buffer import HybridEPBuffer
from deep_ep.utils import EventOverlap

__all__ = ["Buffer", "Config", "EventOverlap", "HybridEPBuffer"]
