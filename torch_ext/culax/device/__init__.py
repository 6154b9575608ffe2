"""What kernels share: chunks, tiles, tape images, rings, gates, states, and stand-ins for tensors. Imported only when
kernels are compiled, except `sizes` and `walks`."""
