"""What kernels share: chunks, tiles, gates, states, and stand-ins for tensors. Imported only when kernels are compiled,
except `sizes`."""
