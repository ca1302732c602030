"""A CPU/GPU hybrid inference engine for mixture-of-experts models larger than your GPU."""
