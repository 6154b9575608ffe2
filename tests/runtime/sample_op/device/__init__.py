"""What the sample op's kernels share."""
