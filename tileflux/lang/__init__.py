"""Device functions: no host code, no launches."""
