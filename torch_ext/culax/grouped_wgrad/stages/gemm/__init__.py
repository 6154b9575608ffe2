"""SM90 grouped weight-gradient GEMM: config, layouts, roles, kernel."""
