"""The SM90 kernel for block-scaled operands: dequantises to bf16 on the way and multiplies with bf16 WGMMA."""
