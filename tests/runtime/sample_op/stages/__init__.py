"""Stage packages of the sample op."""
