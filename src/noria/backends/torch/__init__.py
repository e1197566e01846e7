"""The reference backend: plain torch operations in float32 on the CPU. Tests compare the native kernels with it."""
