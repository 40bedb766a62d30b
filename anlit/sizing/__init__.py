"""Estimates of a run's needs before it starts: parameters, memory per GPU, FLOPs, days."""
