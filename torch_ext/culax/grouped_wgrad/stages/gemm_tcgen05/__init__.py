"""SM100 block-scaled grouped weight-gradient GEMM: config, layouts, roles, kernel."""
