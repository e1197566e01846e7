"""The counting backend: shapes only. It computes nothing and says what a step would cost."""
