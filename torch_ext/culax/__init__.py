"""culax: Kimi Delta Attention and grouped weight gradients as PyTorch ops.

``import culax`` registers ``torch.ops.culax.*``. It needs no GPU, initialises no CUDA, imports no kernel compiler.
"""

from . import ops as ops
from .explain import Explanation, explain, warmup
from .kda.chunk_kda import chunk_kda
from .nn import GroupedLinear
from .version import __version__

__all__ = ["Explanation", "GroupedLinear", "__version__", "chunk_kda", "explain", "ops", "warmup"]
